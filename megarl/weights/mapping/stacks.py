"""Tensors that stack all experts of a layer, as the folders of some families have them.

A table has the matrices of each expert by themselves, under names of their own, so that a rank's experts are whole
tensors for it.  Folders and servers see the stacks: `joined` makes them, and `weights/hf/unstacked.py` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar

from megarl.weights.mapping.names import Shape

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Stack:
    """For each expert the transpose of its parts' rows, which alternate.

    Example, 2 experts with 3 rows of 4 columns in each of two parts: [2, 4, 6], where [1, :, 2] is row 1 of the first
    part of expert 1.  Of biases it is [2, 6].
    """

    hf_name: str
    num_experts: int
    parts: tuple[str, ...]  # names in the table, with {} for the number of the expert
    part_shape: Shape  # (rows, columns), or (rows,) of a bias

    in_hub: ClassVar[bool] = True  # so are the folders of the hub, and servers

    @property
    def shape(self) -> Shape:
        rows, *columns = self.part_shape
        return (self.num_experts, *columns, rows * len(self.parts))

    def part_of(self, of_expert: Tensor, number: int) -> Tensor:
        """A view of the numbered part, as the table has it, in an expert's part of the stack."""
        rows = of_expert.T if of_expert.dim() == 2 else of_expert
        return rows[number :: len(self.parts)]


class PlainStack(Stack):
    """For each expert its parts one after another, as transformers holds them; folders of the hub have single experts.

    Example, 2 experts with 3 rows of 4 columns in each of two parts: [2, 6, 4], where [1, 3:] is the second part of
    expert 1.
    """

    in_hub = False

    @property
    def shape(self) -> Shape:
        rows, *columns = self.part_shape
        return (self.num_experts, rows * len(self.parts), *columns)

    def part_of(self, of_expert: Tensor, number: int) -> Tensor:
        rows = self.part_shape[0]
        return of_expert[number * rows : (number + 1) * rows]


class Place(NamedTuple):
    """Where a tensor of the table is stored."""

    stack: Stack
    expert: int
    part: int


def places(stacks: Iterable[Stack]) -> dict[str, Place]:
    """Name in the table -> its place, for everything that is stacked."""
    return {
        part.format(expert): Place(stack, expert, number)
        for stack in stacks
        for expert in range(stack.num_experts)
        for number, part in enumerate(stack.parts)
    }


def joined(stream: Iterable[tuple[str, Tensor]], stacks: Sequence[Stack]) -> Iterator[tuple[str, Tensor]]:
    """The stream with each stack in place of the last of its parts.  Peak extra memory: the stacks that are unfinished.

    These are one at a time if all parts of a stack are neighbours.
    """
    where = places(stacks)
    unfinished: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in stream:
        if name not in where:
            yield name, tensor
            continue
        stack, expert, part = where[name]
        whole, done = unfinished.get(stack.hf_name) or (tensor.new_empty(stack.shape), 0)
        stack.part_of(whole[expert], part).copy_(tensor)
        unfinished[stack.hf_name] = whole, done + 1
        if done + 1 == stack.num_experts * len(stack.parts):
            yield stack.hf_name, unfinished.pop(stack.hf_name)[0]
    assert not unfinished, f"parts of {', '.join(unfinished)} never came"


def joined_sizes(sizes: Mapping[str, tuple[Shape, T]], stacks: Sequence[Stack]) -> dict[str, tuple[Shape, T]]:
    """Names, shapes and types (or anything else) of what `joined` yields, in its order."""
    last = {stack.parts[-1].format(stack.num_experts - 1): stack for stack in stacks}
    where, found = places(stacks), dict[str, tuple[Shape, T]]()
    for name, (shape, dtype) in sizes.items():
        if name in last:
            found[last[name].hf_name] = last[name].shape, dtype
        elif name not in where:
            found[name] = shape, dtype
    return found
