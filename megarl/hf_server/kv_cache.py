"""The KV cache of the running requests: two tensors per layer, [slots, positions, kv_heads, head_dim].

With `routes` one tensor more, [slots, positions, 1, routes]: the experts, and the keys of indexers, that the pass chose
which computed the KV of a token.  They are kept, moved and shared as that is.

Row i of the running batch uses slot i. Keys and values may be narrower than head_dim: with latent attention they are
the latent and the rotary part, of one head. They use the first columns. Two temporary views implement transformers'
cache interface in a forward pass: `Prefill` writes the new tokens of sequences, each into one slot per completion;
`Decode` writes one token per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.hf_server.device import free_cached

_LENGTH_STEP = 16  # positions are reserved in multiples of this, so that the tensor is rarely reallocated


class KVSlots:
    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_tokens: int,
        device: torch.device | str = "cpu",
        routes: tuple[int, torch.dtype] | None = None,
    ) -> None:
        """`routes`: so many numbers of a token, and their type, to keep these too."""
        self.max_tokens, self.device = max_tokens, torch.device(device)
        self._kinds = [((num_kv_heads, head_dim), dtype)] * (2 * num_layers)  # of each tensor: shape of a token, dtype
        self._kinds += [] if routes is None else [((1, routes[0]), routes[1])]
        self.free()

    @property
    def bytes_per_token(self) -> int:
        return sum(width * height * dtype.itemsize for (width, height), dtype in self._kinds)

    def fits(self, slots: int, positions: int) -> bool:
        """Whether `slots` rows of `positions` tokens stay within the limit of tokens."""
        return slots * positions <= self.max_tokens

    def size_for(self, slots: int, positions: int) -> tuple[int, int]:
        """What `reserve` allocates for `slots` rows of `positions` tokens."""
        have_slots, have_positions = self.size
        if slots <= have_slots and positions <= have_positions:
            return self.size
        rounded = -(-positions // _LENGTH_STEP) * _LENGTH_STEP
        grown = max(have_slots, slots), max(have_positions, rounded)
        return grown if self.fits(*grown) else (slots, positions)

    def reserve(self, slots: int, positions: int, used: tuple[int, int]) -> None:
        """Allocate for `slots` rows of `positions` tokens; the first `used` (slots, positions) keep their content.

        The tensors grow one after the other, so that the peak is one of them above the limit.
        """
        assert self.fits(slots, positions), f"{slots} rows of {positions} tokens exceed {self.max_tokens}"
        size = self.size_for(slots, positions)
        if size == self.size:
            return
        for index, held in enumerate(self.tensors):
            grown = self._zeros(index, *size)
            grown[: used[0], : used[1]] = held[: used[0], : used[1]]
            self.tensors[index] = grown
            del held
            free_cached(self.device)

    @property
    def size(self) -> tuple[int, int]:
        """(slots, positions) that are allocated."""
        slots, positions = self.tensors[0].shape[:2]
        return slots, positions

    def move(self, source: Tensor, target: Tensor, positions: int) -> None:
        """Copy the first `positions` tokens of slots `source` into slots `target`."""
        for held in self.tensors:
            held[target, :positions] = held[source, :positions]

    def copy(self, source: KVSlots, taken: tuple[Tensor, Tensor], placed: tuple[Tensor, Tensor]) -> None:
        """Copy tokens of another cache: from slots and positions there to those here, four tensors [tokens]."""
        where, here = (tuple(index.to(self.device) for index in pair) for pair in (taken, placed))
        for held, theirs in zip(self.tensors, source.tensors, strict=True):
            held[here] = theirs[where]

    def routes(self, slot: int, start: int, end: int) -> Tensor:
        """[tokens, routes], a copy of those of the tokens at positions `start` to `end` of a slot, on the CPU."""
        return self.tensors[-1][slot, start:end, 0].to("cpu", copy=True)

    def free(self) -> None:
        self.tensors = [self._zeros(index, 0, 0) for index in range(len(self._kinds))]

    def _zeros(self, index: int, slots: int, positions: int) -> Tensor:
        shape, dtype = self._kinds[index]
        # zeros, not empty: the value at a masked position is multiplied by 0, and 0 * NaN is NaN
        return torch.zeros(slots, positions, *shape, dtype=dtype, device=self.device)


class _View:
    """The cache of transformers' attention layers: `update` stores new keys and values, returns those to attend to."""

    is_compileable = False

    def __init__(self, slots: KVSlots) -> None:
        self._tensors = slots.tensors

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise AssertionError("positions and masks are passed in, so transformers does not need the length of the cache")


class Prefill(_View):
    """New tokens of S sequences, right-padded: `counts[i]` of sequence i, which come at its positions `starts[i]`, ...

    Slot first + r receives those of sequence sources[r] and holds the tokens before `start`.  A sequence attends to the
    first slot that receives it.
    """

    def __init__(
        self, slots: KVSlots, first: int, sources: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        super().__init__(slots)
        self.starts = torch.tensor(starts, device=slots.device)
        self.length = max(start + count for start, count in zip(starts, counts, strict=True))
        self._readers = torch.tensor([first + sources.index(i) for i in range(len(starts))], device=slots.device)
        source, count = torch.tensor(sources), torch.tensor(counts)
        slot, token = (torch.arange(max(counts)) < count[source][:, None]).nonzero().unbind(1)
        sequence = source[slot]
        position = torch.tensor(starts)[sequence] + token
        self._from = sequence.to(slots.device), token.to(slots.device)
        self._to = (first + slot).to(slots.device), position.to(slots.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._store(2 * layer_idx, key), self._store(2 * layer_idx + 1, value)

    def _store(self, index: int, new: Tensor) -> Tensor:
        held, (sequence, token) = self._tensors[index][..., : new.shape[3]], self._from
        held[self._to] = new[sequence, :, token]
        return held[self._readers, : self.length].transpose(1, 2)

    def store_routes(self, routes: Tensor) -> None:
        """[S, tokens, routes]: of the tokens of this pass."""
        held = self._tensors[-1][:, :, 0]
        held[self._to] = routes[self._from].to(held.dtype)


class Decode(_View):
    """One new token for each of the first R rows, stored at positions [R]; attends to the first `length` positions."""

    def __init__(self, slots: KVSlots, positions: Tensor, length: int) -> None:
        super().__init__(slots)
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions = positions
        self._length = length

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._store(2 * layer_idx, key), self._store(2 * layer_idx + 1, value)

    def _store(self, index: int, new: Tensor) -> Tensor:
        held = self._tensors[index][..., : new.shape[3]]
        held[self._rows, self._positions] = new[:, :, 0]
        return held[: len(self._rows), : self._length].transpose(1, 2)

    def store_routes(self, routes: Tensor) -> None:
        """[R, 1, routes]: of the tokens of this pass."""
        held = self._tensors[-1][:, :, 0]
        held[self._rows, self._positions] = routes[:, 0].to(held.dtype)
