import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.order import Visits, check_same_data


def visits(rows=5, *, shuffle=True, seed=0):
    return Visits(rows, shuffle=shuffle, seed=seed)


def first(order, count):
    return [order.at(number) for number in range(count)]


def test_without_shuffling_the_rows_come_in_order_for_ever():
    assert first(visits(3, shuffle=False), 7) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@given(rows=st.integers(1, 40), seed=st.integers(0, 2**32), epochs=st.integers(1, 4))
def test_every_epoch_visits_every_row_once(rows, seed, epochs):
    got = first(visits(rows, seed=seed), rows * epochs)
    for epoch in range(epochs):
        assert sorted(got[epoch * rows : (epoch + 1) * rows]) == [(epoch, row) for row in range(rows)]


@given(numbers=st.lists(st.integers(0, 60), max_size=20))
def test_a_visit_does_not_depend_on_those_before(numbers):
    order, whole = visits(7, seed=3), first(visits(7, seed=3), 61)
    assert [order.at(number) for number in numbers] == [whole[number] for number in numbers]


def test_epochs_and_seeds_differ_and_are_repeatable():
    rows = [row for _, row in first(visits(100), 200)]
    assert rows[:100] != rows[100:]
    assert first(visits(100), 100) == first(visits(100), 100)
    assert rows[:100] != [row for _, row in first(visits(100, seed=1), 100)]


def test_a_position_over_other_data_is_refused():
    check_same_data("5-ab", "5-ab")
    with pytest.raises(ValueError, match=r"belongs to other data \(rows, content and order 9-cd, here 5-ab\)"):
        check_same_data("9-cd", "5-ab")
