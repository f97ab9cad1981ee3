"""How servers are asked for the tokens that could be drawn for each token, and what they answer: an `EngineColumn`.

SGLang (0.5.23; for 0.5.17 see trainer/abilities.py) and our own server report "output_token_sampling_mask", for each
new token the ids that top-k and top-p left, and "output_token_sampling_logprobs", its log-prob among these, which
`parse_replies` takes.  Both are kept from when the token was drawn: a retraction changes nothing of them.  SGLang fails
if a request asks for several completions at once; the rollout asks for one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.ragged import Ragged
from megarl.rollout.protocol import SAMPLING_LOG_PROBS
from megarl.rollout.wire_columns import ColumnsLost
from megarl.sample import SUPPORT

_FIELD = "output_token_sampling_mask"


@dataclass(frozen=True)
class EngineSupport:
    """Of the completions that are sampled so.

    Evaluations that sample otherwise have none; those that sample in the same way have it too, and nobody reads it.

    Example: EngineSupport(top_p=0.9, top_k=20).read(reply["meta_info"], 7, 3, num_known=0), 10 lists.
    """

    top_p: float
    top_k: int
    num_ids: int = 2**31  # the vocabulary's, where it is known; else what a column holds

    @property
    def name(self) -> str:
        return SUPPORT

    @property
    def most_bytes(self) -> int:
        """The ids of all tokens that could be drawn, and what stands between them."""
        return 12 * (self.num_ids if self.top_k < 1 else min(self.top_k, self.num_ids))

    def is_of(self, temperature: float, top_p: float, top_k: int) -> bool:  # noqa: ARG002
        return (top_p, top_k) == (self.top_p, self.top_k)

    def request(self, num_known: int) -> dict[str, Any]:  # noqa: ARG002
        return {"return_sampling_mask": True}

    def read(self, meta: Mapping[str, Any], num_asked: int, num_new: int, num_known: int) -> Ragged:  # noqa: ARG002
        """Lists of ids; of the request's tokens they are empty."""
        masks = None if meta.get(SAMPLING_LOG_PROBS) is None else meta.get(_FIELD)
        if masks is None and meta["finish_reason"]["type"] == "abort":
            raise ColumnsLost(num_new, "the request was ended in the queue, without the tokens that could be drawn")
        if masks is None:
            raise ValueError(
                f"rollout.top_p={self.top_p} and rollout.top_k={self.top_k}: the server does not tell which tokens "
                "could be drawn; expected one that does, such as SGLang 0.5.23, or 1.0 and -1"
            )
        drawn = [triple[1] for triple in meta["output_token_logprobs"]]
        if not isinstance(masks, list) or len(masks) != num_new or not all(map(self._holds, masks, drawn)):
            raise ValueError(
                f"{_FIELD} of a completion: expected {num_new} lists of ids below {self.num_ids}, each with the "
                "token's own"
            )
        return Ragged.of([*[()] * num_asked, *masks])

    def check(self, column: Any, num_known: int) -> None:  # noqa: ARG002
        if not isinstance(column, Ragged):
            raise ValueError(f"column {SUPPORT} of a completion: expected no such column, but the field {_FIELD}")

    def _holds(self, ids: Any, token: int) -> bool:
        if not isinstance(ids, list) or token not in ids or set(map(type, ids)) != {int}:
            return False
        return min(ids) >= 0 and max(ids) < self.num_ids
