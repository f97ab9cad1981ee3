"""Plans of micro-batches; common prefixes by hand and against a slow reference, and groups that share them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from several_rows import groups_of_rows

from megarl.data.batch import make_batch
from megarl.data.packing import RankPlan, plan, unpack
from megarl.data.prefix_tree import MIN_SHARED, CommonPrefixes, PrefixTree, prefix_groups
from megarl.samples.batch import Batch
from megarl.samples.sample import TEACHER_IDS

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


def test_small_plans_by_hand():
    assert plan([5, 4, 3, 3], 1, max_tokens=8) == [RankPlan([0, 3, 1, 2], [2, 2])]
    assert plan([5, 4, 3, 3], 2, max_tokens=8) == [RankPlan([0, 3], [2]), RankPlan([1, 2], [2])]
    assert plan([5], 2, max_tokens=8) == [RankPlan([0], [1]), RankPlan([], [0])]
    assert plan([7, 1, 1, 1], 1, max_sequences=2) == [RankPlan([0, 3, 1, 2], [2, 2])]
    assert plan([], 2, max_tokens=8) == [RankPlan([], []), RankPlan([], [])]
    # Evenly placed, 3+2 and 3+2 leave no room for the last 2; best fit fills both micro-batches.
    assert plan([3, 3, 2, 2, 2], 1, max_tokens=6) == [RankPlan([0, 1, 2, 3, 4], [2, 3])]
    # Equal tokens, but one sequence of 4000 attends over ten times as much as ten of 400.
    plans = plan([4000] + [400] * 20, 2, max_tokens=8000, hidden_size=16)
    assert [rank.indices for rank in plans if 0 in rank.indices] == [[0]]


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


@pytest.mark.parametrize(
    ("count", "longest", "num_ranks", "cap", "above_mean", "waiting"),
    [
        (512, 4000, 4, 16384, 1.01, 1.03),
        (1000, 8000, 8, None, 1.0015, None),  # only a tight packing fits; then its micro-batches share out
    ],
)
def test_ranks_and_simultaneous_micro_batches_cost_alike(count, longest, num_ranks, cap, above_mean, waiting):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(50, longest, (count,), generator=draw).tolist()
    if cap is None:
        cap = -(-sum(lengths) // 248) + 60  # of 248 micro-batches, each has so many tokens to spare
        assert evenly(lengths, cap, 248) is None
    plans = plan(lengths, num_ranks, max_tokens=cap)
    check(lengths, plans, num_ranks, lambda members: sum(lengths[i] for i in members) <= cap)
    cost = [[sum(lengths[i] * (12288 + lengths[i]) for i in m) for m in rank.micro_batches] for rank in plans]
    mean = sum(map(sum, cost)) / num_ranks
    assert max(map(sum, cost)) < above_mean * mean
    if waiting is None:
        assert {len(rank) for rank in cost} == {31}
    else:
        assert sum(max(together) for together in zip(*cost, strict=True)) < waiting * mean


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


# Few tokens and short rows, so that many begin alike, end inside of others, or are equal.
ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=12)


def batch_of(rows: list[list[int]], **columns: list[float]) -> Batch:
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    return Batch(torch.tensor(sum(rows, [])), torch.tensor([len(row) for row in rows]), tensors)


def words(*rows: str) -> Batch:
    return batch_of([[ord(letter) for letter in row] for row in rows])


def tree_of(batch: Batch) -> PrefixTree:
    return PrefixTree.of(batch, CommonPrefixes.of(batch))


def nodes_of(batch: Batch) -> list[str]:
    tree = tree_of(batch)
    text = "".join(chr(token) for token in batch.tokens[tree.sources])
    return [text[a : a + n] for a, n in zip(tree.places, tree.lengths, strict=True)]


def test_a_prompt_stands_once_and_each_answer_repeats_its_last_token() -> None:
    tree = tree_of(batch := words("abcdx", "zz", "abcdyz"))
    assert nodes_of(batch) == ["abcd", "dx", "dyz", "zz"]
    assert tree.parents.tolist() == [-1, 0, 0, -1]
    assert tree.positions.tolist() == [0, 3, 3, 0]
    assert tree.place_positions.tolist() == [0, 1, 2, 3, 3, 4, 3, 4, 5, 0, 1]
    # abcdx: b, c, d by the places of a, b, c, x by the repeated d.
    assert tree.predicts.tolist() == [-1, 0, 1, 2, 4, -1, 9, -1, 0, 1, 2, 6, 7]
    assert tree.targets.tolist() == [1, 2, 3, -1, 4, -1, 11, 12, -1, 6, -1]


def test_branches_have_branches_and_equal_rows_and_those_inside_another_need_no_place() -> None:
    assert nodes_of(words("abcdefghX", "abcdefghY", "abcdZ")) == ["abcd", "dZ", "defgh", "hX", "hY"]
    assert nodes_of(words("abcdef", "abcdef", "abcd")) == ["abcd", "def"]


def test_less_than_a_few_common_tokens_are_not_shared() -> None:
    assert MIN_SHARED == 4
    assert nodes_of(words("abcX", "abcY")) == ["abcX", "abcY"]
    assert nodes_of(words("abcdeX", "abcdeY", "abcdZ")) == ["abcd", "dZ", "de", "eX", "eY"], "below that any"


def test_rows_with_columns_of_their_own_share_only_the_context_before_what_they_learn() -> None:
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]]
    learnt = [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0] * 2
    ids = {TEACHER_IDS: [[0]] * 14}
    assert tree_of(batch_of(rows)).lengths.tolist() == [6, 2, 2]
    assert tree_of(batch_of(rows, response_mask=learnt, **ids)).lengths.tolist() == [4, 4, 4]
    assert tree_of(batch_of(rows, **ids)).lengths.tolist() == [7, 7], "what is learnt is not known"


def path(tree: PrefixTree, place: int) -> list[int]:
    """Slow reference: the places that this one attends to, itself last."""
    node = int(np.searchsorted(tree.places, place, side="right")) - 1
    seen, places = list(range(tree.places[node], place + 1)), tree.places
    while (node := int(tree.parents[node])) >= 0:
        seen = [*range(places[node], places[node] + tree.lengths[node] - 1), *seen]
    return seen


@given(rows=ROWS)
def test_each_token_is_predicted_by_a_place_that_sees_what_stands_before_it(rows: list[list[int]]) -> None:
    batch = batch_of(rows)
    tree, starts = tree_of(batch), batch.row_starts.tolist()
    for row, start in zip(rows, starts, strict=True):
        assert tree.predicts[start] == -1
        for at in range(1, len(row)):
            place = int(tree.predicts[start + at])
            seen = path(tree, place)
            assert batch.tokens[tree.sources[seen]].tolist() == row[:at]
            assert tree.place_positions[seen].tolist() == list(range(at))
            assert batch.tokens[tree.targets[place]] == row[at]


@given(rows=ROWS)
def test_a_tree_needs_no_more_places_than_families_say(rows: list[list[int]]) -> None:
    batch = batch_of(rows)
    made = prefix_groups(batch, 1, max_tokens=None, max_sequences=None, hidden_size=4)
    assert sorted(i for group in made for i in group.members) == list(range(len(rows)))
    for group in made:
        assert tree_of(batch.select(group.members)).num_places <= group.size
    assert sum(group.cost for group in made) <= sum(n * (48 + n) for n in map(len, rows))


@given(rows=ROWS, ranks=st.integers(1, 3), slack=st.integers(0, 20), count=st.none() | st.integers(1, 4))
def test_a_plan_of_families_keeps_its_limits(rows: list[list[int]], ranks: int, slack: int, count: int | None) -> None:
    batch, lengths = batch_of(rows), [len(row) for row in rows]
    tokens = max(lengths) + slack if count is None else None
    how = {"max_tokens": tokens, "max_sequences": count}
    plans = plan(lengths, ranks, hidden_size=4, groups=prefix_groups(batch, ranks, hidden_size=4, **how), **how)
    assert sorted(i for rank in plans for i in rank.indices) == list(range(len(rows)))
    for members in (members for rank in plans for members in rank.micro_batches if members):
        assert count is None or len(members) <= count
        assert tokens is None or tree_of(batch.select(members)).num_places <= tokens


def test_the_answers_to_a_prompt_are_packed_together_and_cut_only_for_balance() -> None:
    batch = words(*(f"{prompt * 8}{answer}" for answer in "wxyz" for prompt in "ab"))

    def members(max_tokens: int | None, num_ranks: int) -> list[list[int]]:
        made = prefix_groups(batch, num_ranks, max_tokens=max_tokens, max_sequences=None, hidden_size=64)
        return [group.members for group in made]

    assert members(None, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert members(12, 1) == [[0, 2], [4, 6], [1, 3], [5, 7]], "9 places, and 3 more for each further answer"
    assert members(None, 4) == [[0, 2], [4, 6], [1, 3], [5, 7]], "for four ranks"


def test_samples_of_several_rows_stay_whole() -> None:
    batch = Batch(torch.tensor([1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 9]), torch.tensor([5, 5, 1]), rows=torch.tensor([2, 1]))
    made = prefix_groups(batch, 1, max_tokens=None, max_sequences=None, hidden_size=4)
    assert [(group.members, group.size) for group in made] == [([0], 8), ([1], 1)]


def test_the_order_of_rows_is_that_of_their_tokens() -> None:
    prefixes = CommonPrefixes.of(batch_of([[300, 1, 1, 1, 1], [2], [300, 1, 1, 1, 2], [70000]]))
    assert prefixes.order.tolist() == [1, 0, 2, 3]
    assert prefixes.common.tolist() == [0, 0, 4, 0]
