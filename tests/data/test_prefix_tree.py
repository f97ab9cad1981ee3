"""Common prefixes by hand and against a slow reference; families of what is packed together."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.batch import Batch
from megarl.data.packing import plan
from megarl.data.prefix_tree import CommonPrefixes, PrefixTree, families
from megarl.layout import MIN_SHARED
from megarl.sample import TEACHER_IDS

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


def test_branches_have_branches() -> None:
    assert nodes_of(words("abcdefghX", "abcdefghY", "abcdZ")) == ["abcd", "dZ", "defgh", "hX", "hY"]


def test_an_equal_row_and_one_inside_another_need_no_place() -> None:
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
    made = families(batch, 1, max_tokens=None, max_sequences=None, hidden_size=4)
    assert sorted(i for family in made for i in family.members) == list(range(len(rows)))
    for family in made:
        assert tree_of(batch.select(family.members)).num_places <= family.size
    assert sum(family.cost for family in made) <= sum(n * (48 + n) for n in map(len, rows))


@given(rows=ROWS, ranks=st.integers(1, 3), slack=st.integers(0, 20), count=st.none() | st.integers(1, 4))
def test_a_plan_of_families_keeps_its_limits(rows: list[list[int]], ranks: int, slack: int, count: int | None) -> None:
    batch, lengths = batch_of(rows), [len(row) for row in rows]
    tokens = max(lengths) + slack if count is None else None
    how = {"max_tokens": tokens, "max_sequences": count}
    plans = plan(lengths, ranks, hidden_size=4, families=families(batch, ranks, hidden_size=4, **how), **how)
    assert sorted(i for rank in plans for i in rank.indices) == list(range(len(rows)))
    for members in (members for rank in plans for members in rank.micro_batches if members):
        assert count is None or len(members) <= count
        assert tokens is None or tree_of(batch.select(members)).num_places <= tokens


def test_the_answers_to_a_prompt_are_packed_together_and_cut_only_for_balance() -> None:
    batch = words(*(f"{prompt * 8}{answer}" for answer in "wxyz" for prompt in "ab"))

    def members(max_tokens: int | None, num_ranks: int) -> list[list[int]]:
        made = families(batch, num_ranks, max_tokens=max_tokens, max_sequences=None, hidden_size=64)
        return [family.members for family in made]

    assert members(None, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert members(12, 1) == [[0, 2], [4, 6], [1, 3], [5, 7]], "9 places, and 3 more for each further answer"
    assert members(None, 4) == [[0, 2], [4, 6], [1, 3], [5, 7]], "for four ranks"


def test_samples_of_several_rows_stay_whole() -> None:
    batch = Batch(torch.tensor([1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 9]), torch.tensor([5, 5, 1]), rows=torch.tensor([2, 1]))
    made = families(batch, 1, max_tokens=None, max_sequences=None, hidden_size=4)
    assert [(family.members, family.size) for family in made] == [([0], 8), ([1], 1)]


def test_the_order_of_rows_is_that_of_their_tokens() -> None:
    prefixes = CommonPrefixes.of(batch_of([[300, 1, 1, 1, 1], [2], [300, 1, 1, 1, 2], [70000]]))
    assert prefixes.order.tolist() == [1, 0, 2, 3]
    assert prefixes.common.tolist() == [0, 0, 4, 0]


def test_an_empty_batch_has_no_family() -> None:
    empty = Batch(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert families(empty, 2, max_tokens=9, max_sequences=None, hidden_size=4) == []
