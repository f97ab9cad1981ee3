import pytest
import torch
from algo_reference import Packed, packs
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.reward_shaping import overlong_filter, overlong_penalty
from megarl.samples.batch import Batch


def batch_of(lengths, mask, **rows) -> Batch:
    columns = {"response_mask": torch.tensor(mask, dtype=torch.float32)}
    rows = {name: torch.tensor(row, dtype=torch.float32) for name, row in rows.items()}
    return Batch(torch.zeros(sum(lengths), dtype=torch.int64), torch.tensor(lengths), columns, rows)


def test_the_overlong_penalty_by_hand():
    # limit 8, buffer 4: nothing up to 4 tokens, then a quarter of the factor for each, not bounded below
    lengths = [1 + n for n in (3, 4, 5, 6, 8, 9)]
    mask = sum(([0] + [1] * (n - 1) for n in lengths), [])
    out, stats = overlong_penalty(
        batch_of(lengths, mask, score=[1.0] * 6), max_response_length=8, buffer_length=4, factor=2.0
    )
    assert out.per_sequence["score"].tolist() == [1, 1, 0.5, 0, -1, -1.5]
    assert out.per_sequence["raw_score"].tolist() == [1] * 6
    assert stats["reward/overlong_penalty"].result() == pytest.approx((-0.5 - 1 - 2 - 2.5) / 6)
    assert stats["reward/overlong_share"].result() == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("buffer_length", "factor", "sentence"),
    [*((n, 1.0, f"len={n}: expected a number from 1 to .*=8") for n in (0, 9)), (4, -1.0, "penalty_factor=-1.0: .* 0")],
)
def test_a_buffer_outside_the_limit_and_a_penalty_that_would_reward_are_refused(buffer_length, factor, sentence):
    with pytest.raises(ValueError, match=f"overlong_buffer.{sentence}"):
        overlong_penalty(
            batch_of([1], [1], score=[0.0]), max_response_length=8, buffer_length=buffer_length, factor=factor
        )


@given(packs, st.integers(1, 6), st.integers(0, 3))
def test_the_overlong_penalty_agrees_with_the_slow_reference(packed: Packed, buffer_length, spare):
    limit = buffer_length + spare
    expected = []
    row_masks, counts = iter(Packed(packed.batch.by_row()).masks), packed.batch.rows.tolist()
    for count, score in zip(counts, packed.batch.per_sequence["score"].tolist(), strict=True):
        rows = [next(row_masks) for _ in range(count)]
        length = sum(len(mask) - mask.index(True) for mask in rows if any(mask))
        expected.append(score + min(-(length - spare) / buffer_length * 0.5, 0))
    out, _ = overlong_penalty(packed.batch, max_response_length=limit, buffer_length=buffer_length, factor=0.5)
    assert out.per_sequence["score"].dtype == torch.float32
    assert out.per_sequence["score"].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_filter_takes_truncated_samples_out_and_leaves_the_rest_as_it_was():
    batch = batch_of([2, 2, 1], [0, 1, 1, 1, 1], score=[0.0] * 3, truncated=[0.0, 1.0, 0.0])
    out, stats = overlong_filter(batch)
    assert out.columns["keep"].tolist() == [1, 1, 0, 0, 1]
    assert out.columns["response_mask"].tolist() == [0, 1, 1, 1, 1]
    assert stats["reward/overlong_filtered"].result() == pytest.approx(1 / 3)
    again, _ = overlong_filter(batch.with_columns(keep=torch.tensor([1.0, 0, 1, 1, 1])))
    assert again.columns["keep"].tolist() == [1, 0, 0, 0, 1]


def test_the_lengths_of_the_rows_of_a_sample_add_up():
    """Rows "p a a t a" and "p a q b": 4 tokens from the first that it learns, and 1."""
    mask = torch.tensor([0, 1, 1, 0, 1] + [0, 0, 0, 1] + [0, 1], dtype=torch.float32)
    rows = {"score": torch.zeros(2), "truncated": torch.tensor([1.0, 0.0])}
    batch = Batch(torch.arange(11), torch.tensor([5, 4, 2]), {"response_mask": mask}, rows, torch.tensor([2, 1]))
    out, stats = overlong_penalty(batch, max_response_length=4, buffer_length=4)
    assert out.per_sequence["score"].tolist() == [-1.25, -0.25]
    assert stats["reward/overlong_penalty"].result() == -0.75
    out, stats = overlong_filter(batch)
    assert out.columns["keep"].tolist() == [0] * 9 + [1] * 2, "all rows of the sample"
    assert stats["reward/overlong_filtered"].result() == 0.5
