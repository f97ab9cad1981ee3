import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from several_rows import groups_of_rows

from megarl.batch import Batch
from megarl.data.batch import make_batch
from megarl.data.packing import RankPlan, plan, unpack

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


def check(lengths, plans, num_ranks, fits):
    """What every plan promises."""
    assert len(plans) == num_ranks
    assert sorted(index for rank in plans for index in rank.indices) == list(range(len(lengths)))
    assert len({len(rank.micro_sizes) for rank in plans}) == 1
    for rank in plans:
        assert sum(rank.micro_sizes) == len(rank.indices)
        assert [index for members in rank.micro_batches for index in members] == rank.indices
        assert all(fits(members) for members in rank.micro_batches)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), slack=st.integers(0, 200))
def test_a_plan_by_tokens_keeps_its_promises(lengths, num_ranks, slack):
    cap = max(lengths, default=1) + slack
    plans = plan(lengths, num_ranks, max_tokens=cap)
    check(lengths, plans, num_ranks, lambda members: sum(lengths[i] for i in members) <= cap)
    assert plans == plan(lengths, num_ranks, max_tokens=cap)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 5), cap=st.integers(1, 9))
def test_a_plan_by_count_keeps_its_promises_with_the_fewest_micro_batches(lengths, num_ranks, cap):
    plans = plan(lengths, num_ranks, max_sequences=cap)
    check(lengths, plans, num_ranks, lambda members: len(members) <= cap)
    assert len(plans[0].micro_sizes) == -(-len(lengths) // (cap * num_ranks))


def fewest_bins(lengths, cap):
    """Slow reference: try every placement."""
    best = len(lengths)

    def place(rest, bins):
        nonlocal best
        if len(bins) >= best and rest:
            return
        if not rest:
            best = min(best, len(bins))
            return
        for i, used in enumerate(bins):
            if used + rest[0] <= cap:
                place(rest[1:], [*bins[:i], used + rest[0], *bins[i + 1 :]])
        place(rest[1:], [*bins, rest[0]])

    place(sorted(lengths, reverse=True), [])
    return best


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=8), slack=st.integers(0, 10))
def test_the_number_of_micro_batches_is_within_best_fit_decreasings_bound(lengths, slack):
    cap = max(lengths) + slack
    optimum = fewest_bins(lengths, cap)
    assert len(plan(lengths, 1, max_tokens=cap)[0].micro_sizes) <= 11 * optimum / 9 + 1


def test_small_plans_by_hand():
    assert plan([5, 4, 3, 3], 1, max_tokens=8) == [RankPlan([0, 3, 1, 2], [2, 2])]
    assert plan([5, 4, 3, 3], 2, max_tokens=8) == [RankPlan([0, 3], [2]), RankPlan([1, 2], [2])]
    assert plan([5], 2, max_tokens=8) == [RankPlan([0], [1]), RankPlan([], [0])]
    assert plan([7, 1, 1, 1], 1, max_sequences=2) == [RankPlan([0, 3, 1, 2], [2, 2])]
    assert plan([], 2, max_tokens=8) == [RankPlan([], []), RankPlan([], [])]


def test_the_tight_packing_is_kept_where_an_even_one_needs_more():
    # Evenly placed, 3+2 and 3+2 leave no room for the last 2; best fit fills both micro-batches.
    assert plan([3, 3, 2, 2, 2], 1, max_tokens=6) == [RankPlan([0, 1, 2, 3, 4], [2, 3])]


def evenly(lengths, cap, num_bins):
    """Slow reference: longest first into the cheapest bin with room; None where there is none."""
    bins = [[] for _ in range(num_bins)]
    tokens, spent = [0] * num_bins, [0] * num_bins
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = [b for b in range(num_bins) if tokens[b] + lengths[i] <= cap]
        if not fit:
            return None
        target = min(fit, key=lambda b: spent[b])
        bins[target].append(i)
        tokens[target] += lengths[i]
        spent[target] += lengths[i] * (12 * 1024 + lengths[i])
    return bins


@given(lengths=LENGTHS.filter(bool), slack=st.integers(0, 300))
def test_the_fewest_micro_batches_are_placed_evenly_where_that_fits(lengths, slack):
    cap = max(lengths) + slack
    expected = evenly(lengths, cap, -(-sum(lengths) // cap))
    if expected is not None:
        (only,) = plan(lengths, 1, max_tokens=cap)
        assert sorted(only.micro_batches) == sorted(sorted(members) for members in expected)


def test_where_only_a_tight_packing_fits_its_micro_batches_share_out():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 8000, (1000,), generator=draw).tolist()
    cap = -(-sum(lengths) // 248) + 60  # of 248 micro-batches, each has so many tokens to spare
    assert evenly(lengths, cap, 248) is None
    plans = plan(lengths, 8, max_tokens=cap)
    check(lengths, plans, 8, lambda members: sum(lengths[i] for i in members) <= cap)
    assert len(plans[0].micro_sizes) == 31
    sums = [sum(lengths[i] * (12288 + lengths[i]) for i in rank.indices) for rank in plans]
    assert max(sums) < 1.0015 * sum(sums) / len(sums)


def test_long_sequences_count_for_their_attention():
    # Equal tokens, but one sequence of 4000 attends over ten times as much as ten of 400.
    lengths = [4000] + [400] * 20
    plans = plan(lengths, 2, max_tokens=8000, hidden_size=16)
    with_long = next(rank for rank in plans if 0 in rank.indices)
    assert len(with_long.indices) == 1


def test_ranks_and_simultaneous_micro_batches_cost_alike():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 4000, (512,), generator=draw).tolist()
    plans = plan(lengths, 4, max_tokens=16384)
    cost = [[sum(n * (12288 + n) for n in (lengths[i] for i in m)) for m in rank.micro_batches] for rank in plans]
    sums = [sum(rank) for rank in cost]
    assert max(sums) < 1.01 * sum(sums) / len(sums)
    waiting = sum(max(together) for together in zip(*cost, strict=True))
    assert waiting < 1.03 * sum(sums) / len(sums)


@given(lengths=LENGTHS.filter(bool), num_ranks=st.integers(1, 4))
def test_unpack_undoes_a_plan(lengths, num_ranks):
    tokens = torch.arange(sum(lengths))
    batch = Batch(tokens, torch.tensor(lengths))
    plans = plan(lengths, num_ranks, max_tokens=150)
    parts = [batch.select(rank.indices).tokens for rank in plans]
    assert torch.equal(unpack(plans, parts, lengths), tokens)
    assert torch.equal(unpack(plans, parts, batch.lengths), tokens)
    for dtype in (torch.int16, torch.uint16):  # of the second torch has few operations
        wide = [torch.stack([part, 3 * part], 1).to(dtype) for part in parts]
        found = unpack(plans, wide, lengths)
        assert found.dtype == dtype
        assert torch.equal(found, torch.stack([tokens, 3 * tokens], 1).to(dtype))


@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans())
def test_rows_and_samples_are_packed_whole_and_come_back(seed, num_ranks, together):
    """A plan of samples keeps their rows in one micro-batch; both plans hold every row once, within the limit."""
    batch = make_batch(groups_of_rows(seed, 3))
    whole = batch if together else batch.by_row()
    limit = int(whole.sample_lengths.max()) + 10
    lengths = whole.sample_lengths.tolist()
    plans = plan(lengths, num_ranks, max_tokens=limit)
    named = whole.with_columns(place=torch.arange(whole.num_tokens))
    parts = [named.select(rank.indices) for rank in plans]
    assert torch.equal(unpack(plans, [part.tokens for part in parts], lengths), batch.tokens)
    for rank, part in zip(plans, parts, strict=True):
        for members in rank.micro_batches:
            micro = named.select(members)
            assert micro.num_tokens <= limit
            assert torch.equal(
                micro.lengths, torch.cat([named.select([i]).lengths for i in members] or [micro.lengths])
            )
            held = batch.segment_ids[micro.columns["place"]].bincount(minlength=batch.num_sequences)
            assert not together or ((held == 0) | (held == batch.sample_lengths)).all()
        assert part.num_sequences == len(rank.indices)


def test_unpack_refuses_parts_that_do_not_fit():
    with pytest.raises(AssertionError, match="parts hold 3 tokens, the batch 5"):
        unpack([RankPlan([1, 0], [2])], [torch.zeros(3)], [2, 3])
    with pytest.raises(AssertionError, match="plans hold 1 sequences, the batch 2"):
        unpack([RankPlan([1], [1])], [torch.zeros(5)], [2, 3])


def test_a_sequence_longer_than_a_micro_batch_is_refused():
    with pytest.raises(
        ValueError, match="ppo_max_token_len_per_gpu=8: sequence 1 has 9 tokens; expected a limit of at le"
    ):
        plan([3, 9], 1, max_tokens=8)
    with pytest.raises(AssertionError, match="give max_tokens or max_sequences, not both"):
        plan([3], 1, max_tokens=8, max_sequences=1)
    with pytest.raises(AssertionError, match="give max_tokens or max_sequences"):
        plan([3], 1)


def test_ten_thousand_sequences_are_all_planned_within_the_limit():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, 8000, (10_000,), generator=draw).tolist()
    plans = plan(lengths, 8, max_tokens=16384)
    assert sorted(index for part in plans for index in part.indices) == list(range(10_000))
    assert len({len(part.micro_sizes) for part in plans}) == 1
    assert max(sum(lengths[i] for i in row) for part in plans for row in part.micro_batches) <= 16384
