"""Batches carry columns of any dtype and shape, each entry with its token."""

import math
from decimal import Decimal

import pytest
import torch
from torch import Tensor

from megarl.samples.batch import Batch
from megarl.samples.sample import Row, TurnSpan, VersionSpan, text_of

DTYPES = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTHS = torch.tensor([3, 0, 2, 4])


def column(dtype: torch.dtype, *shape: int) -> Tensor:
    """Entry t of nine holds numbers that t tells."""
    numbers = 7 * torch.arange(9).view(9, *(1 for _ in shape)) + torch.arange(math.prod(shape)).view(shape)
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def batch_of(**columns: Tensor) -> Batch:
    return Batch(torch.arange(9), LENGTHS, columns)


@pytest.mark.parametrize("shape", [(), (2,), (3, 2), (0,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_selected_sequences_keep_their_columns(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    batch = batch_of(some=column(dtype, *shape))
    chosen = batch.select([3, 1, 0])
    assert chosen.tokens.tolist() == [5, 6, 7, 8, 0, 1, 2]
    found = chosen.columns["some"]
    assert (found.dtype, found.shape) == (dtype, (7, *shape))
    assert found.tolist() == [batch.columns["some"][t].tolist() for t in chosen.tokens]
    assert batch.select([]).columns["some"].shape == (0, *shape)
    assert batch.select([]).columns["some"].dtype == dtype


def test_a_column_is_split_by_sequence() -> None:
    parts = batch_of().split(column(torch.uint8, 2))
    assert [part.tolist() for part in parts] == [[[0, 1], [7, 8], [14, 15]], [], [[21, 22], [28, 29]]] + [
        [[35, 36], [42, 43], [49, 50], [56, 57]]
    ]


def test_columns_are_added_and_chosen_by_name() -> None:
    batch = batch_of(one=torch.zeros(9)).with_columns(two=torch.ones(9, 2), three=torch.zeros(9, 0, 4))
    assert list(batch.columns) == ["one", "two", "three"]
    kept = batch.with_per_sequence(score=torch.zeros(4)).keep_columns("two")
    assert (list(kept.columns), kept.per_sequence) == (["two"], {})


def test_a_column_of_another_number_of_tokens_is_a_defect() -> None:
    with pytest.raises(AssertionError, match=r"column some has shape \(8, 2\), expected \(9, \.\.\.\)"):
        batch_of(some=torch.zeros(8, 2))


def test_a_row_knows_which_tokens_are_learnt_in_it() -> None:
    turns, versions = (TurnSpan(0, 2, 3), TurnSpan(1, 4, 6)), (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))
    row = Row([1, 2, 3, 4, 5, 6], turns, [-0.1, -0.2, -0.3], versions, "stop")
    assert row.learnt_ids == [3, 5, 6] and row.num_learnt == 3


@pytest.mark.parametrize(
    ("turns", "num_log_probs", "versions", "message"),
    [
        ([TurnSpan(0, 1, 3), TurnSpan(1, 2, 4)], 4, [VersionSpan(0, 0, 4)], "overlap"),
        ([TurnSpan(0, 3, 5)], 2, [VersionSpan(0, 0, 2)], "outside the 4 tokens"),
        ([TurnSpan(0, 1, 3)], 1, [VersionSpan(0, 0, 1)], "1 log-probs of 2 learnt tokens"),
        ([TurnSpan(0, 1, 3)], 2, [VersionSpan(0, 0, 1)], "do not cover 2 learnt tokens"),
    ],
)
def test_a_row_that_does_not_fit_together_is_noticed(
    turns: list[TurnSpan], num_log_probs: int, versions: list[VersionSpan], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        Row([1, 2, 3, 4], tuple(turns), [-0.5] * num_log_probs, tuple(versions), "stop")


@pytest.mark.parametrize(
    ("truth", "text"),
    [("46.00", "46"), ("46.50", "46.5"), ("-0.25", "-0.25"), ("1E+3", "1000"), ("460", "460"), ("NaN", "NaN")],
)
def test_a_ground_truth_of_a_column_of_decimals_has_no_zeros_of_the_column(truth, text):
    assert text_of(Decimal(truth)) == text
