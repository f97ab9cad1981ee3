"""An HF folder whose experts are stacked, under the names of single experts' tensors that a table has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megarl.weights.hf.folder import HFFolder
from megarl.weights.mapping.stacks import Stack, joined_sizes, places

# MXFP4 (OCP Microscaling Formats v1.0): blocks of 32 numbers of 4 bits with one power of two.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest of the four bits is the sign
_NUMBERS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)])
_BIAS = 127  # of a block's exponent (E8M0)
BLOCKS, SCALES = "_blocks", "_scales"  # endings of the two tensors that a stack in MXFP4 is stored in


class Unstacked(HFFolder):
    """Reads an expert at a time.  Stacks in MXFP4 are read as the bfloat16 numbers that they stand for."""

    def __init__(self, held: HFFolder, stacks: Sequence[Stack]) -> None:
        """ValueError for a stack of another shape, or beside its parts; a missing one has no parts in `shapes`."""
        self.folder = held.folder
        self.in_several = held.in_several
        self._held = held
        self._stored = {stack.hf_name: _stored(held, stack) for stack in stacks}
        self._stacks = {stack.hf_name: stack for stack in stacks if self._stored[stack.hf_name]}
        self._places = places(self._stacks.values())
        self._last: tuple[str, int, Tensor] | None = None  # gate and up are in the same expert's part
        if doubled := next((name for name in self._places if name in held.shapes), None):
            raise ValueError(
                f"{held.folder} holds {doubled} and {self._places[doubled].stack.hf_name}, of which it is a part; "
                "expected one of the two"
            )
        of_stacks = {name for names in self._stored.values() for name in names}
        parts = {name: place.stack.part_shape for name, place in self._places.items()}
        self.shapes = {name: shape for name, shape in held.shapes.items() if name not in of_stacks} | parts

    @property
    def hub_shapes(self) -> dict[str, tuple[int, ...]]:
        own = [stack for stack in self._stacks.values() if stack.in_hub]
        sizes = joined_sizes({name: (shape, None) for name, shape in self.shapes.items()}, own)
        return {name: shape for name, (shape, _) in sizes.items()}

    def read(self, name: str, dim: int, start: int, length: int) -> Tensor:
        if name not in self._places:
            return self._held.read(name, dim, start, length)
        place = self._places[name]
        return place.stack.part_of(self._expert(place.stack, place.expert), place.part).narrow(dim, start, length)

    def dtype(self, name: str) -> torch.dtype:
        whole = self._whole(name)
        return self._held.dtype(whole) if self._stored.get(whole, (whole,)) == (whole,) else torch.bfloat16

    def path_of(self, name: str) -> Path:
        whole = self._whole(name)
        return self._held.path_of(self._stored.get(whole, (whole,))[0])

    def _whole(self, name: str) -> str:
        return self._places[name].stack.hf_name if name in self._places else name

    def read_hub(self, name: str) -> Tensor:
        if name not in self._stacks:
            return self.read(name, 0, 0, self.shapes[name][0])
        stack = self._stacks[name]
        return torch.stack([self._expert(stack, number) for number in range(stack.num_experts)])

    def _expert(self, stack: Stack, number: int) -> Tensor:
        """[columns, rows of all parts], or [rows] of a bias."""
        if self._last is None or self._last[:2] != (stack.hf_name, number):
            names = self._stored[stack.hf_name]
            own = [self._held.read(name, 0, number, 1)[0] for name in names]
            expert = own[0] if len(own) == 1 else self._held.checked(names[0], dequantized(*own)).T
            self._last = stack.hf_name, number, expert
        return self._last[2]


def _stored(held: HFFolder, stack: Stack) -> tuple[str, ...]:
    """The tensors in which the folder holds a stack: one, or two in MXFP4, or none."""
    blocks, scales = stack.hf_name + BLOCKS, stack.hf_name + SCALES
    experts, *rest = stack.shape
    wanted: dict[tuple[str, ...], list[tuple[int, ...]]] = {(stack.hf_name,): [stack.shape]}
    if len(rest) == 2 and rest[0] % 32 == 0:
        wanted[blocks, scales] = [(experts, rest[1], rest[0] // 32, 16), (experts, rest[1], rest[0] // 32)]
    for names, shapes in wanted.items():
        if not all(name in held.shapes for name in names):
            continue
        for name, shape in zip(names, shapes, strict=True):
            if held.shapes[name] != shape:
                raise ValueError(
                    f"the weights in {held.folder} do not fit its config.json; of another shape: {name} (has "
                    f"{list(held.shapes[name])}, expected {list(shape)})"
                )
        return names
    if found := [name for name in (stack.hf_name, blocks, scales) if name in held.shapes]:
        raise ValueError(f"{held.folder} has {found[0]} alone; expected {stack.hf_name}, or {blocks} and {scales}")
    return ()


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """[.., blocks, 16] bytes of two numbers each, the lower bits first, and [.., blocks] exponents -> [.., numbers].

    bfloat16 holds every such number exactly.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - _BIAS
    return torch.ldexp(_NUMBERS[codes.int()], exponents[..., None]).flatten(-2).bfloat16()
