"""A server's log-probs of given tokens, and of the most likely ones at their places: the request and its reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.rollout.protocol import Route, SamplingParams


@dataclass(frozen=True)
class Scores:
    """Of the tokens of a sequence from `start` on, at temperature 1; for each `top_k` tokens, most likely first."""

    log_probs: list[float]
    top_ids: list[list[int]]
    top_log_probs: list[list[float]]


def score_body(token_ids: Sequence[int], start: int, top_k: int = 0) -> dict[str, Any]:
    """The body of /generate for the log-probs of the tokens from `start` on, 1 or more.

    A new token is asked for too, since not every server takes a request for none; nobody reads it.
    """
    return {
        "input_ids": list(token_ids),
        "sampling_params": SamplingParams(temperature=0.0, max_new_tokens=1).to_json(),
        "return_logprob": True,
        "logprob_start_len": start - 1,  # the first entry of a reply has no log-prob
        "top_logprobs_num": top_k,
    }


def parse_scores(reply: Any, count: int, top_k: int = 0) -> Scores:
    """The scores of `count` tokens.  Raises ValueError for a reply of another shape."""
    try:
        meta = reply["meta_info"]
        log_probs = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        tops = meta["input_top_logprobs"][1:] if top_k else [[]] * count
        found = Scores(log_probs, *([[entry[i] for entry in top] for top in tops] for i in (1, 0)))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"a reply of {Route.GENERATE} has no log-probs of its prompt: {error!r}") from error
    if None in found.log_probs or any(None in top for top in found.top_log_probs):  # in place of what is not finite
        raise ValueError(f"a reply of {Route.GENERATE} has null in place of a log-prob: it is not a number")
    sizes = {len(found.log_probs), len(found.top_ids)}
    if sizes != {count} or any(len(top) != top_k for top in found.top_ids):
        raise ValueError(
            f"a reply of {Route.GENERATE} has {len(log_probs)} log-probs and {len(found.top_ids)} lists of tokens; "
            f"expected {count} with {top_k} tokens each"
        )
    return found
