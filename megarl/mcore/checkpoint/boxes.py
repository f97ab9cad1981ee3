"""Boxes of a tensor: the part from `offset` with `shape`, in each dimension."""

from __future__ import annotations

import math
from collections.abc import Iterator

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]  # offset, shape


def boxes_of(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut elements [start, stop) of a row-major tensor into boxes, each contiguous: (its first element, box).

    At most 2 * len(shape) - 1 boxes: of a matrix the rest of a row, whole rows, and the beginning of a row.
    Example: shape (3, 4), elements 2 to 9 -> (2, ((0, 2), (1, 2))), (4, ((1, 0), (1, 4))), (8, ((2, 0), (1, 1))).
    """
    if start >= stop:
        return
    if not shape:
        yield start, ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows
    if first > last:  # within one row, and neither its beginning nor its end
        yield from _within(shape, last, start, stop)
        return
    if start < first * row:
        yield from _within(shape, first - 1, start, first * row)
    if first < last:
        rest = shape[1:]
        yield first * row, ((first, *(0 for _ in rest)), (last - first, *rest))
    if last * row < stop:
        yield from _within(shape, last, last * row, stop)


def _within(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The boxes of a run inside one row."""
    begin = index * math.prod(shape[1:])
    for at, (offset, size) in boxes_of(shape[1:], start - begin, stop - begin):
        yield at + begin, ((index, *offset), (1, *size))


def overlap(one: Box, other: Box) -> Box | None:
    """The box that both contain; None if there is none."""
    begins = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return (begins, sizes) if all(size > 0 for size in sizes) else None


def slices(box: Box, origin: Shape) -> tuple[slice, ...]:
    """The index of a box in a tensor whose first element is at `origin`."""
    return tuple(slice(o - at, o - at + n) for o, n, at in zip(*box, origin, strict=True))
