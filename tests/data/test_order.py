import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.order import Visits


def visits(rows=5, *, shuffle=True, seed=0, fingerprint="5-ab"):
    return Visits(rows, shuffle=shuffle, seed=seed, fingerprint=fingerprint)


def test_without_shuffling_the_rows_come_in_order_for_ever():
    assert visits(3, shuffle=False).next(7) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@given(rows=st.integers(1, 40), seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 30), max_size=6))
def test_every_epoch_visits_every_row_once_however_it_is_cut(rows, seed, sizes):
    order, whole = visits(rows, seed=seed), visits(rows, seed=seed)
    got = [visit for size in sizes for visit in order.next(size)]
    assert got == whole.next(sum(sizes))
    for epoch in range(sum(sizes) // rows):
        assert sorted(got[epoch * rows : (epoch + 1) * rows]) == [(epoch, row) for row in range(rows)]


def test_epochs_and_seeds_differ_and_are_repeatable():
    first, second = visits(100).next(100), visits(100, seed=1).next(100)
    assert first == visits(100).next(100)
    assert [row for _, row in first] != [row for _, row in second]
    order = visits(100)
    assert [row for _, row in order.next(100)] != [row for _, row in order.next(100)]


@given(before=st.integers(0, 23), after=st.integers(1, 23))
def test_a_saved_position_goes_on_where_it_was(before, after):
    order = visits()
    order.next(before)
    state = json.loads(json.dumps(order.state_dict()))
    expected = order.next(after)
    again = visits()
    again.next(3)
    again.load_state_dict(state)
    assert again.next(after) == expected


def test_a_position_over_other_data_is_refused():
    state = visits(fingerprint="9-cd").state_dict()
    with pytest.raises(ValueError, match=r"belongs to other data \(rows and content 9-cd, here 5-ab\)"):
        visits().load_state_dict(state)
