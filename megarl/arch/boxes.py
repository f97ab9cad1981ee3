"""Boxes: parts of tensors, in transfer plans and in checkpoints, given as one (start, stop) for each dimension."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def box_shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def box_size(box: Box) -> int:
    """Number of elements."""
    return prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The overlap of two boxes; None if it is empty."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def slices(box: Box, origin: Shape) -> tuple[slice, ...]:
    """The index of a box in a tensor whose first element is at `origin`."""
    return tuple(slice(start - at, stop - at) for (start, stop), at in zip(box, origin, strict=True))


def origin(box: Box) -> Shape:
    """The place of its first element."""
    return tuple(start for start, _ in box)


def box_at(start: Iterable[int], shape: Iterable[int]) -> Box:
    """The box of this shape whose first element is at `start`."""
    return tuple((first, first + length) for first, length in zip(start, shape, strict=True))


def contains(outer: Box, inner: Box) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for o, i in zip(outer, inner, strict=True))


@lru_cache(1024)  # the tensors of all layers and experts are cut in the same way
def refine(boxes: tuple[Box, ...]) -> Mapping[Box, Sequence[Box]]:
    """Cut every box along the edges of all others; any two of the resulting cells are equal or disjoint.

    Returns the cells of each box.  Boxes that are equal or disjoint from the start stay whole, unless they are cut
    along different dimensions.
    Example in one dimension: (0, 4) and (2, 6) become (0, 2) (2, 4) and (2, 4) (4, 6).
    """
    distinct = list(dict.fromkeys(boxes))
    if len(distinct) == 1:
        return {distinct[0]: distinct}
    edges = [sorted({edge for side in sides for edge in side}) for sides in zip(*distinct, strict=True)]
    return {box: list(product(*map(_cut_at, box, edges))) for box in distinct}


def _cut_at(side: tuple[int, int], edges: list[int]) -> Iterator[tuple[int, int]]:
    """The parts of one side between the edges of all boxes."""
    return pairwise(edges[bisect_left(edges, side[0]) : bisect_right(edges, side[1])])


def cut(box: Box, at_most: int) -> Iterator[Box]:
    """Parts of a box with at most `at_most` elements each, in row-major order; as few as whole rows allow."""
    assert at_most > 0, "a part has at least one element"
    size = box_size(box)
    if size <= at_most:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, at_most // (size // (stop - start)))
    for first in range(start, stop, step):
        yield from cut((*box[:dim], (first, min(first + step, stop)), *box[dim + 1 :]), at_most)


def boxes_of(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut elements [start, stop) of a row-major tensor into boxes, each contiguous: (its first element, box).

    At most 2 * len(shape) - 1 boxes: of a matrix the rest of a row, whole rows, and the beginning of a row.
    Example: shape (3, 4), elements 2 to 9 -> (2, ((0, 1), (2, 4))), (4, ((1, 2), (0, 4))), (8, ((2, 3), (0, 1))).
    """
    if start >= stop:
        return
    if not shape:
        yield start, ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # within one row, and neither its beginning nor its end
        yield from _within(shape, last, start, stop)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start, first * row)
    if first < last:
        yield first * row, ((first, last), *((0, size) for size in shape[1:]))
    if last * row < stop:
        yield from _within(shape, last, last * row, stop)


def _within(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The boxes of a run inside one row."""
    begin = index * prod(shape[1:])
    for at, box in boxes_of(shape[1:], start - begin, stop - begin):
        yield at + begin, ((index, index + 1), *box)
