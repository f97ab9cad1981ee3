"""The KV cache of the running requests: one tensor [2 * layers, slots, positions, kv_heads, head_dim].

Row i of the running batch uses slot i. Keys and values may be narrower than head_dim: with latent attention they are
the latent and the rotary part, of one head. They use the first columns. Two temporary views implement transformers'
cache interface in a forward pass: `Prefill` writes whole prompts, each into one slot per completion; `Decode` writes
one token per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LENGTH_STEP = 16  # positions are reserved in multiples of this, so that the tensor is rarely reallocated


class KVSlots:
    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._shape = (2 * num_layers, num_kv_heads, head_dim)
        self._dtype = dtype
        self.data = self._zeros(0, 0)

    def _zeros(self, slots: int, positions: int) -> Tensor:
        # zeros, not empty: the value at a masked position is multiplied by 0, and 0 * NaN is NaN
        layers, heads, dim = self._shape
        return torch.zeros(layers, slots, positions, heads, dim, dtype=self._dtype)

    def fits(self, slots: int, positions: int) -> bool:
        """Whether `slots` rows of `positions` tokens stay within the limit of tokens."""
        return slots * positions <= self.max_tokens

    def reserve(self, slots: int, positions: int, used: tuple[int, int]) -> None:
        """Allocate for `slots` rows of `positions` tokens; the first `used` (slots, positions) keep their content."""
        assert self.fits(slots, positions), f"{slots} rows of {positions} tokens exceed {self.max_tokens}"
        have_slots, have_positions = self.data.shape[1:3]
        if slots <= have_slots and positions <= have_positions:
            return
        rounded = -(-positions // _LENGTH_STEP) * _LENGTH_STEP
        want_positions = max(have_positions, rounded)
        want_slots = max(have_slots, slots)
        if not self.fits(want_slots, want_positions):
            want_slots, want_positions = slots, positions
        grown = self._zeros(want_slots, want_positions)
        grown[:, : used[0], : used[1]] = self.data[:, : used[0], : used[1]]
        self.data = grown

    def move(self, source: Tensor, target: Tensor, positions: int) -> None:
        """Copy the first `positions` tokens of slots `source` into slots `target`."""
        self.data[:, target, :positions] = self.data[:, source, :positions]

    def free(self) -> None:
        self.data = self._zeros(0, 0)


class _View:
    """The cache of transformers' attention layers: `update` stores new keys and values, returns those to attend to."""

    is_compileable = False

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise AssertionError("positions and masks are passed in, so nobody needs to ask the cache for its length")


class Prefill(_View):
    """Sequences [S, positions] from their first token; slot first + i receives sequence source[i]."""

    def __init__(self, slots: KVSlots, first: int, source: Tensor) -> None:
        super().__init__(slots.data)
        self._rows = slice(first, first + len(source))
        self._source = source

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        for half, new in enumerate((key, value)):
            held = self.data[2 * layer_idx + half, ..., : new.shape[3]]
            held[self._rows, : new.shape[2]] = new.transpose(1, 2)[self._source]
        return key, value


class Decode(_View):
    """One new token for each of the first R rows, stored at positions [R]; attends to the first `length` positions."""

    def __init__(self, slots: KVSlots, positions: Tensor, length: int) -> None:
        super().__init__(slots.data)
        self._rows = torch.arange(len(positions))
        self._positions = positions
        self._length = length

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._store(2 * layer_idx, key), self._store(2 * layer_idx + 1, value)

    def _store(self, index: int, new: Tensor) -> Tensor:
        held = self.data[index, ..., : new.shape[3]]
        held[self._rows, self._positions] = new[:, :, 0]
        return held[: len(self._rows), : self._length].transpose(1, 2)
