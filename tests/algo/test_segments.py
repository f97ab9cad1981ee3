import torch
from algo_reference import Packed, packs
from hypothesis import given

from megarl.algo.segments import (
    clean,
    count_segments,
    last_unmasked,
    masked_moments,
    previous_unmasked,
    segment_count,
    segment_mean,
    segment_sum,
)

SEGMENTS = torch.tensor([0, 0, 0, 2, 2])  # sequence 1 is empty
MASK = torch.tensor([False, True, True, False, True])
X = torch.tensor([torch.nan, 1.0, 3.0, torch.inf, 5.0])


def test_sums_counts_and_means_by_hand():
    assert segment_sum(torch.tensor([1.0, 2, 3, 4, 5]), SEGMENTS, 3).tolist() == [6.0, 0.0, 9.0]
    assert segment_count(MASK, SEGMENTS, 3).tolist() == [2, 0, 1]
    assert segment_mean(X, MASK, SEGMENTS, 3).tolist() == [2.0, 0.0, 5.0]
    assert count_segments(SEGMENTS) == 3
    assert count_segments(SEGMENTS[:0]) == 0


def test_clean_keeps_nan_out_of_the_gradient_and_widens_half_precision():
    x = X.clone().requires_grad_()
    clean(x, MASK).square().sum().backward()
    assert x.grad.tolist() == [0.0, 2.0, 6.0, 0.0, 10.0]
    assert clean(X.bfloat16(), MASK).dtype == torch.float32
    assert clean(X.double(), MASK).dtype == torch.float64


def test_moments_of_none_and_one():
    mean, variance, count = masked_moments(X, torch.zeros(5, dtype=torch.bool))
    assert (float(mean), float(variance), count) == (0.0, 0.0, 0)
    mean, variance, count = masked_moments(X, MASK)
    assert (float(mean), float(variance), count) == (3.0, 4.0, 3)


@given(packs)
def test_ends_agree_with_a_walk_over_the_tokens(packed: Packed):
    last, previous, place = [], [], 0
    for mask in packed.masks:
        seen = -1
        for m in mask:
            seen = place if m else seen
            previous.append(seen)
            place += 1
        last.append(seen)
    batch = packed.batch
    mask = batch.columns["response_mask"] != 0
    assert last_unmasked(mask, batch.segment_ids, batch.num_sequences).tolist() == last
    assert previous_unmasked(mask, batch.segment_ids).tolist() == previous
