"""A column of lists outside and inside of a batch."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.samples.batch import Batch
from megarl.samples.ragged import Ragged, gathered

LISTS = [[7], [], [3, 5], [9, 8, 6], []]


def test_it_is_cut_and_joined_as_an_array() -> None:
    column = Ragged.of(LISTS)
    assert (len(column), column.shape, column.dtype.name) == (5, (5, None), "int32")
    assert column.counts.tolist() == [1, 0, 2, 3, 0]
    assert column[2:].lists() == LISTS[2:]
    assert column[1:3].lists() == LISTS[1:3]
    assert column[4:2].lists() == []
    whole = np.concatenate([column[:2], column[2:], Ragged.of([[1]])])
    assert isinstance(whole, Ragged)
    assert whole.lists() == [*LISTS, [1]]
    assert pickle.loads(pickle.dumps(column)).lists() == column.copy().lists() == LISTS


def test_it_is_not_joined_with_an_array() -> None:
    with pytest.raises(TypeError):
        np.concatenate([Ragged.of([[1]]), np.zeros(1)])  # type: ignore[arg-type]


def test_in_a_batch_the_lists_of_a_row_stand_end_to_end() -> None:
    """Rows of 2 and 3 tokens: the second holds 5 numbers in 2 places per token."""
    places, counts = Ragged.of(LISTS).spread(np.array([2, 3]))
    assert counts.tolist() == [1, 0, 2, 3, 0]
    assert places.tolist() == [[7, 0], [0, 0], [3, 5], [9, 8], [6, 0]]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=5), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_every_token_finds_its_list_in_any_selection_of_rows(rows: list[list[list[int]]], order: object) -> None:
    lengths = np.array([len(row) for row in rows])
    places, counts = Ragged.of([ids for row in rows for ids in row]).spread(lengths)
    assert places.size(1) == max(-(-sum(map(len, row)) // len(row)) for row in rows)
    columns = {"places": places, "counts": counts}
    batch = Batch(torch.arange(int(lengths.sum())), torch.from_numpy(lengths), columns)
    chosen = list(range(len(rows)))
    order.shuffle(chosen)  # type: ignore[attr-defined]
    some = batch.select(chosen[: 1 + len(rows) // 2])
    own = some.columns["counts"].long()
    starts, numbers = gathered(some.columns["places"], own, some.row_starts, some.row_ids)
    found = [numbers[a : a + n].tolist() for a, n in zip(starts.tolist(), own.tolist(), strict=True)]
    assert found == [ids for row in chosen[: 1 + len(rows) // 2] for ids in rows[row]]
