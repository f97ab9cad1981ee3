"""The columns of replay: what each layer of a model chose for each token, experts and, by an indexer, keys.

Entry t describes the pass that predicted token t, in which the model read the token before it: [layers that choose,
choices].  So the first entry of a row is zeros, and a new token comes with the experts that generated it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.arch.layout import layers_that_share, numbers_of

# Their names, among the columns of a row and in the replies of servers.
ROUTED_EXPERTS, INDEXED_KEYS = "routed_experts", "indexed_keys"
REPLAYED = (ROUTED_EXPERTS, INDEXED_KEYS)


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


@dataclass(frozen=True)
class IndexedKeys:
    """The column of the keys to which a token attended, in layers with indexers: their positions in its sequence.

    Of a token at a position below `chosen` the entry says nothing: it attends to itself and all tokens before it.
    Example: IndexedKeys(4, (0, 1, 3), chosen=2048, dtype="int32").
    """

    num_layers: int  # of the model
    layers: tuple[int, ...]  # those with an indexer, from 0
    chosen: int  # keys of a token
    dtype: str

    @staticmethod
    def of(hf: Mapping[str, Any]) -> IndexedKeys | None:
        """From a config.json; None for a model without indexers."""
        if (chosen := hf.get("index_topk")) is None:
            return None
        layers = [layer for layer in range(hf["num_hidden_layers"]) if layer not in layers_that_share(hf)]
        is_short = (hf.get("max_position_embeddings") or 2**31) <= 2**16
        return IndexedKeys(hf["num_hidden_layers"], tuple(layers), chosen, "uint16" if is_short else "int32")
