"""Checks whether servers draw as a run says, and tell from which tokens, where top-p or top-k left only a part."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import Config
from megarl.config.server_options import options_of

# Of SGLang, which adds what it says to every request: fields that the request has not, such as a penalty.
PREFERRED = "--preferred-sampling-params"
WHY_NOT_PREFERRED = "a server would draw from other logits than those of which the trainer computes log-probs"
_LIMIT, _DEFAULT_LIMIT = "--sampling-mask-max-tokens", 4096  # of SGLang


def largest_top_k(limit: int) -> int:
    """The largest top_k for servers that tell of `limit` tokens at most.

    Half of it: tokens that are as likely as the last of the k are drawn too, and SGLang ends a request with an error if
    all of them are more than the limit.
    """
    return limit // 2


def advice(config: Config) -> Iterator[str]:
    """One sentence for an evaluation that asks for the same answer several times."""
    val = config.rollout.val_kwargs
    if config.data.val_files and val.n > 1 and val.temperature == 0:
        why = "rollout.val_kwargs.temperature=0 is greedy, and writes the same answer each time"
        yield f"rollout.val_kwargs.n={val.n}: {why}; expected n=1, or a temperature above 0"


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each invalid combination."""
    rollout = config.rollout
    if rollout.engine == "hf":
        return
    options = dict(options_of(rollout.sglang.args))
    if PREFERRED in options:
        yield f"rollout.sglang.args={PREFERRED}: {WHY_NOT_PREFERRED}; expected no such option"
    if not config.narrows_sampling:
        return
    limit = options.get(_LIMIT, "")
    most = largest_top_k(int(limit) if limit.isdecimal() else _DEFAULT_LIMIT)
    if not 1 <= rollout.top_k <= most:
        given = f"rollout.top_p={rollout.top_p}" if rollout.top_k == -1 else f"rollout.top_k={rollout.top_k}"
        told = f"SGLang tells from which tokens it drew only for a rollout.top_k of 1 to {most}, half of {_LIMIT}"
        yield f"{given}: {told}; expected one, or rollout.engine=hf"
