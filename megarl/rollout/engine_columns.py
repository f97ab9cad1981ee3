"""How servers are asked for the experts of each token, the keys to which it attended and the tokens that could be
drawn, and what they answer.

`EngineRoutes`: SGLang (0.5.17 and newer, with --enable-return-routed-experts) reports "routed_experts": base64 of int32
[rows, all layers, experts of a token], zeros in layers without experts.  Row i is of the i-th token that the model
read, from `routed_experts_start_len` on; the completion's last token is not read.  Our own server sends the column
itself, also without what the caller knows.

`EngineKeys`: SGLang (on GPUs, with --enable-return-indexer-topk and SGLANG_DSA_FUSE_TOPK=0) reports "indexer_topk" in
the same way, from the first token on: base64 of int32 [rows, all layers, keys of a token], -1 after the last key.

`EngineSupport`: SGLang (0.5.23; for 0.5.17 see trainer/servers/abilities.py) and our own server report
"output_token_sampling_mask", for each new token the ids that top-k and top-p left, and
"output_token_sampling_logprobs", its log-prob among these, which `parse_replies` takes.  Both are kept from when the
token was drawn: a retraction changes nothing of them.  SGLang fails if a request asks for several completions at once;
the rollout asks for one at a time.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.arch.routed_experts import INDEXED_KEYS, ROUTED_EXPERTS, IndexedKeys, RoutedExperts
from megarl.rollout.protocol import SAMPLING_LOG_PROBS
from megarl.rollout.wire_columns import ColumnsLost
from megarl.samples.ragged import Ragged
from megarl.samples.sample import SUPPORT

_MASKS = "output_token_sampling_mask"


@dataclass(frozen=True)
class EngineSupport:
    """The tokens that could be drawn at each place of a completion, where top_p or top_k restrict them.

    An evaluation has this column only if it samples in the same way, and then it is not read.

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
        """Lists of ids; they are empty for the tokens of the request."""
        masks = None if meta.get(SAMPLING_LOG_PROBS) is None else meta.get(_MASKS)
        if masks is None and meta["finish_reason"]["type"] == "abort":
            raise ColumnsLost(num_new, "the request was ended in the queue, without the tokens that could be drawn")
        if masks is None:
            raise ValueError(
                f"rollout.top_p={self.top_p} and rollout.top_k={self.top_k}: the server does not report which tokens "
                "could be drawn; expected one that does, such as SGLang 0.5.23, or 1.0 and -1"
            )
        drawn = [triple[1] for triple in meta["output_token_logprobs"]]
        if not isinstance(masks, list) or len(masks) != num_new or not all(map(self._holds, masks, drawn)):
            raise ValueError(
                f"{_MASKS} of a completion: expected {num_new} lists of ids below {self.num_ids}, each with the "
                "token's own"
            )
        return Ragged.of([*[()] * num_asked, *masks])

    def check(self, column: Any, num_known: int) -> None:  # noqa: ARG002
        if not isinstance(column, Ragged):
            raise ValueError(f"column {SUPPORT} of a completion: expected no such column, but the field {_MASKS}")

    def _holds(self, ids: Any, token: int) -> bool:
        if not isinstance(ids, list) or token not in ids or set(map(type, ids)) != {int}:
            return False
        return min(ids) >= 0 and max(ids) < self.num_ids


@dataclass(frozen=True)
class EngineRoutes:
    """Example: EngineRoutes(RoutedExperts.of(hf)).read(reply["meta_info"], 7, 3, num_known=0) -> [7 + 3, L, K].

    `sampling`: temperature, top_p and top_k of the completions that are learnt, which alone have it; None: all have it.
    """

    of: RoutedExperts
    sampling: tuple[float, float, int] | None = None

    @property
    def name(self) -> str:
        return ROUTED_EXPERTS

    @property
    def most_bytes(self) -> int:
        """Base64 of an int32 for each layer and expert."""
        return 6 * self.of.num_layers * self.of.chosen

    def is_of(self, temperature: float, top_p: float, top_k: int) -> bool:
        return self.sampling in (None, (temperature, top_p, top_k))

    def request(self, num_known: int) -> dict[str, Any]:
        """The last token that the caller knows was not read by the model yet, and its experts generate the next one."""
        return {"return_routed_experts": True, "routed_experts_start_len": self._start(num_known)}

    @staticmethod
    def _start(num_known: int) -> int:
        return max(0, num_known - 1)

    def read(self, meta: Mapping[str, Any], num_asked: int, num_new: int, num_known: int) -> np.ndarray:
        """[P + T, layers with experts, experts of a token]; zeros before the first row that was sent.

        SGLang keeps the experts of each token beside its KV, so a request that was retracted has those of the pass that
        computed the KV again, and one that ends while it waits for that pass has none: ColumnsLost.
        """
        field = meta.get(ROUTED_EXPERTS)
        if field is None and meta["finish_reason"]["type"] == "abort":
            raise ColumnsLost(num_new, "the request was ended in the queue, without the experts of its tokens")
        if field is None:
            raise ValueError(
                "actor.router_replay=rollout: the server does not report the experts of tokens; expected one that was "
                "started with --enable-return-routed-experts"
            )
        if meta.get("num_retractions"):
            raise ColumnsLost(num_new, "the request was retracted, and reports the experts of another pass")
        count = num_asked + num_new - 1 - self._start(num_known)
        sent = _rows("experts", field, self.of, count, self.of.num_experts)
        column = np.zeros((num_asked + num_new, len(self.of.layers), self.of.chosen), dtype=self.of.dtype)
        column[len(column) - len(sent) :] = sent[:, list(self.of.layers)]
        return column

    def check(self, column: np.ndarray, num_known: int) -> None:
        of = self.of
        if column.shape[1:] != (len(of.layers), of.chosen) or column.dtype.name != of.dtype:
            raise ValueError(
                f"the experts of a completion's tokens are {column.dtype} {list(column.shape)}: expected {of.dtype} "
                f"of {len(of.layers)} layers with {of.chosen} of {of.num_experts} experts"
            )
        new = np.sort(column[max(1, num_known) :], axis=-1)  # nothing predicted the first token
        if new[..., -1].max() >= of.num_experts or (new[..., 1:] == new[..., :-1]).any():  # SGLang leaves zeros
            raise ValueError(
                f"the experts of a completion's tokens are not {of.chosen} different ones of {of.num_experts}: the "
                "server's kernels do not report what they choose"
            )


@dataclass(frozen=True)
class EngineKeys:
    """The keys that indexers chose for each token, which our own server sends with the experts."""

    of: IndexedKeys
    sampling: tuple[float, float, int] | None = None  # as in EngineRoutes

    @property
    def name(self) -> str:
        return INDEXED_KEYS

    @property
    def most_bytes(self) -> int:
        """Base64 of an int32 for each layer and key."""
        return 6 * self.of.num_layers * self.of.chosen

    def is_of(self, temperature: float, top_p: float, top_k: int) -> bool:
        return self.sampling in (None, (temperature, top_p, top_k))

    def request(self, num_known: int) -> dict[str, Any]:  # noqa: ARG002
        return {"return_indexer_topk": True}

    def read(self, meta: Mapping[str, Any], num_asked: int, num_new: int, num_known: int) -> np.ndarray:  # noqa: ARG002
        """[P + T, layers with an indexer, keys of a token]; zeros where a token attends to all before it."""
        field = meta.get("indexer_topk")
        if field is None and meta["finish_reason"]["type"] == "abort":
            raise ColumnsLost(num_new, "the request was ended in the queue, without the keys of its tokens")
        if field is None:
            raise ValueError("actor.router_replay=rollout: the server does not report the keys that indexers choose")
        if meta.get("num_retractions"):
            raise ColumnsLost(num_new, "the request was retracted, and reports the keys of another pass")
        of, length = self.of, num_asked + num_new
        # SGLang computes short prompts without a choice: the first rows may be those of other requests.
        sent = _rows("keys", field, of, length - 1, length, start=of.chosen)
        column = np.zeros((length, len(of.layers), of.chosen), dtype=of.dtype)
        column[of.chosen + 1 :] = sent[:, list(of.layers)]
        return column

    def check(self, column: np.ndarray, num_known: int) -> None:
        of, at = self.of, np.arange(len(column))[:, None, None]
        if column.shape[1:] != (len(of.layers), of.chosen) or column.dtype.name != of.dtype:
            raise ValueError(
                f"the keys of a completion's tokens are {column.dtype} {list(column.shape)}: expected {of.dtype} of "
                f"{len(of.layers)} layers with {of.chosen} keys"
            )
        first = max(1, num_known)
        new, many = np.sort(column[first:], axis=-1), at[first:] > of.chosen  # the column says nothing of the others
        if (new[..., -1:] >= at[first:]).any() or (many & (new[..., :-1] == new[..., 1:])).any():
            raise ValueError(
                f"the keys of a completion's tokens are not {of.chosen} different ones before them; expected "
                "positions, as of a SGLang that was started with SGLANG_DSA_FUSE_TOPK=0"
            )


def _rows(what: str, field: Any, of: RoutedExperts | IndexedKeys, count: int, most: int, start: int = 0) -> np.ndarray:
    """[count - start, all layers, choices of a token] int32 from 0 on and below `most`, without the first `start`."""
    try:
        numbers = np.frombuffer(b64decode(field, validate=True), np.dtype("<i4"))
        rows = numbers.reshape(-1, of.num_layers, of.chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {what} of a completion's tokens cannot be read: {error}") from error
    read = rows[start:]
    if len(rows) != count or read.min(initial=0) < 0 or read.max(initial=0) >= most:
        raise ValueError(
            f"the {what} of a completion's tokens have {len(rows)} rows: expected {count}, of numbers below {most}"
        )
    return read
