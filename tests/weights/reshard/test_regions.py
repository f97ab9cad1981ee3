from hypothesis import given
from hypothesis import strategies as st

from megarl.weights.reshard.regions import box_size, contains, cut, intersect, refine

sides = st.tuples(st.integers(0, 6), st.integers(1, 6)).map(lambda s: (s[0], s[0] + s[1]))
boxes = st.tuples(sides, sides)


def points(box):
    return {(i, j) for i in range(*box[0]) for j in range(*box[1])}


def test_rows_meet_columns_in_a_rectangle():
    assert intersect(((2, 4), (0, 8)), ((0, 9), (5, 8))) == ((2, 4), (5, 8))
    assert intersect(((0, 4),), ((4, 8),)) is None


def test_overlapping_runs_are_cut_at_each_others_edges():
    assert refine((((0, 4),), ((2, 6),))) == {((0, 4),): [((0, 2),), ((2, 4),)], ((2, 6),): [((2, 4),), ((4, 6),)]}


def test_boxes_that_tile_a_tensor_stay_whole():
    tiles = tuple(((i, i + 2), (0, 5)) for i in range(0, 8, 2))
    assert refine(tiles) == {tile: [tile] for tile in tiles}


@given(st.lists(boxes, min_size=1, max_size=5))
def test_cells_make_up_their_boxes_and_are_equal_or_apart(some):
    cells = refine(tuple(some))
    for box in some:
        assert set.union(*(points(cell) for cell in cells[box])) == points(box)
        assert sum(box_size(cell) for cell in cells[box]) == box_size(box)
    everywhere = {cell for of_box in cells.values() for cell in of_box}
    assert all(a == b or intersect(a, b) is None for a in everywhere for b in everywhere)


@given(boxes, st.integers(1, 20))
def test_parts_are_small_enough_and_in_row_major_order(box, at_most):
    parts = list(cut(box, at_most))
    assert all(box_size(part) <= at_most and contains(box, part) for part in parts)
    assert [point for part in parts for point in sorted(points(part))] == sorted(points(box))


def test_whole_rows_are_kept_together_where_they_fit():
    assert list(cut(((0, 5), (0, 4)), 8)) == [((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 5), (0, 4))]
    assert list(cut(((0, 1), (0, 4)), 3)) == [((0, 1), (0, 3)), ((0, 1), (3, 4))]
