"""The column of routing replay: the experts that each layer of a model chose for each token.

Entry t describes the pass that predicted token t, in which the model read the token before it: [layers with experts,
experts of a token].  So the first entry of a row is zeros, and a new token comes with the experts that generated it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.arch.layout import numbers_of

ROUTED_EXPERTS = "routed_experts"  # its name, among the columns of a row and in the replies of servers


@dataclass(frozen=True)
class RoutedExperts:
    """What such a column looks like for one model.  Example: RoutedExperts(4, (1, 2, 3), num_experts=8, chosen=2)."""

    num_layers: int  # of the model
    layers: tuple[int, ...]  # those with experts, from 0
    num_experts: int  # among which a layer chooses; shared experts do not count
    chosen: int  # experts of a token in a layer

    @staticmethod
    def of(hf: Mapping[str, Any]) -> RoutedExperts | None:
        """From a config.json; None for a model without experts, or if the numbers are not there."""
        numbers = numbers_of(hf)
        layers, count, chosen = numbers.num_hidden_layers, numbers.num_experts, numbers.num_experts_per_tok
        if not (layers and count and chosen):
            return None
        sparse = tuple(layer for layer in range(layers) if layer not in numbers.dense_layers)
        return RoutedExperts(layers, sparse, count, chosen)

    @property
    def dtype(self) -> str:
        """The narrowest type for the number of an expert."""
        return "uint8" if self.num_experts <= 256 else "uint16"

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.chosen * (1 if self.dtype == "uint8" else 2)
