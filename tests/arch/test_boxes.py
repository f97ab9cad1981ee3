"""Runs of a flat tensor as boxes, and what two boxes share."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.arch.boxes import box_at, boxes_of, intersect, slices


@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_boxes_hold_each_element_of_a_run_once_and_in_order(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    boxes = list(boxes_of(tuple(shape), start, stop))
    held = [whole[slices(box, tuple(0 for _ in shape))].reshape(-1) for _, box in boxes]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *held]), torch.arange(start, stop))
    assert [first for first, _ in boxes] == [int(part[0]) for part in held]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_the_overlap_of_two_boxes() -> None:
    assert intersect(box_at((1, 2), (3, 3)), box_at((3, 0), (5, 4))) == box_at((3, 2), (1, 2))
    assert intersect(box_at((0, 0), (2, 2)), box_at((2, 0), (2, 2))) is None
    assert intersect((), ()) == ()
