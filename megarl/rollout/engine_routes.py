"""How servers are asked for the experts of each token, and what SGLang answers: an `EngineColumn`.

SGLang (0.5.17 and newer, with --enable-return-routed-experts) reports "routed_experts": base64 of int32 [rows, all
layers, experts of a token], zeros in layers without experts.  Row i is of the i-th token that the model read, from
`routed_experts_start_len` on; the completion's last token is not read.  Our own server sends the column itself.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.rollout.wire_columns import ColumnsLost
from megarl.routed_experts import ROUTED_EXPERTS, RoutedExperts


@dataclass(frozen=True)
class EngineRoutes:
    """Example: EngineRoutes(RoutedExperts.of(hf)).read(reply["meta_info"], num_asked=7, num_new=3) -> [10, L, K]."""

    of: RoutedExperts

    @property
    def name(self) -> str:
        return ROUTED_EXPERTS

    def request(self, num_known: int) -> dict[str, Any]:
        """The last token that the caller knows was not read by the model yet, and its experts wrote the next one."""
        return {"return_routed_experts": True, "routed_experts_start_len": max(0, num_known - 1)}

    def read(self, meta: Mapping[str, Any], num_asked: int, num_new: int) -> np.ndarray:
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
        sent = _rows(field, self.of, num_asked + num_new - 1)
        column = np.zeros((num_asked + num_new, len(self.of.layers), self.of.chosen), dtype=self.of.dtype)
        column[len(column) - len(sent) :] = sent[:, list(self.of.layers)]
        return column

    def check(self, column: np.ndarray) -> None:
        of = self.of
        if column.shape[1:] != (len(of.layers), of.chosen) or column.dtype.name != of.dtype:
            raise ValueError(
                f"the experts of a completion's tokens are {column.dtype} {list(column.shape)}: expected {of.dtype} "
                f"of {len(of.layers)} layers with {of.chosen} of {of.num_experts} experts"
            )
        last = np.sort(column[-1], axis=-1)  # of the completion's last token, which every reply has
        if column.max() >= of.num_experts or (last[:, 1:] == last[:, :-1]).any():  # SGLang leaves zeros
            raise ValueError(
                f"the experts of a completion's tokens are not {of.chosen} different ones of {of.num_experts}: the "
                "server's kernels do not report what they choose"
            )


def _rows(field: Any, of: RoutedExperts, most: int) -> np.ndarray:
    """[rows, all layers, experts of a token] int32; at most as many rows as tokens were read."""
    try:
        numbers = np.frombuffer(b64decode(field, validate=True), np.dtype("<i4"))
        rows = numbers.reshape(-1, of.num_layers, of.chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the experts of a completion's tokens cannot be read: {error}") from error
    if not 0 < len(rows) <= most or rows.min() < 0 or rows.max() >= of.num_experts:
        raise ValueError(
            f"the experts of a completion's tokens have {len(rows)} rows: expected 1 to {most}, of numbers below "
            f"{of.num_experts}"
        )
    return rows
