from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from several_rows import groups_of_rows

from megarl.algo import CriticLoss, step_columns
from megarl.data.batch import make_batch, mini_batches, sample_names
from megarl.rewards.result import RewardResult, joined
from megarl.samples.sample import Completion, Prompt, Row, Sample, TurnSpan, VersionSpan


def sample(uid, prompt_ids, token_ids, log_probs, reward, *, versions=None, columns=None):
    versions = ((0, 0, len(token_ids)),) if versions is None else versions
    spans = tuple(VersionSpan(*span) for span in versions)
    completion = Completion(token_ids, log_probs, "stop", spans, columns=columns or {})
    return Sample.of(Prompt(uid, prompt_ids, "x"), completion, reward)


def slow_batch(groups):
    """Token by token: what make_batch does at once."""
    tokens, mask, log_probs, versions = [], [], [], []
    for row in (row for group in groups for one in group for row in one.rows):
        written = iter(
            zip(row.log_probs, [s.version for s in row.versions for _ in range(s.start, s.end)], strict=True)
        )
        for place, token in enumerate(row.token_ids):
            is_learnt = any(span.start <= place < span.end for span in row.learnt)
            log_prob, version = next(written) if is_learnt else (0.0, -1)
            tokens.append(token)
            mask.append(float(is_learnt))
            log_probs.append(log_prob)
            versions.append(version)
    return tokens, mask, log_probs, versions


def test_turns_are_told_where_those_of_several_rows_alternate():
    def row(*turns, begin):
        spans = tuple(TurnSpan(turn, start, end) for turn, start, end in turns)
        num = sum(span.end - span.start for span in spans)
        return Row(list(range(begin, begin + 6)), spans, [-1.0] * num, (VersionSpan(0, 0, num),), "stop")

    prompt = Prompt("0-0", [0], "x")
    one_after_the_other = Sample(prompt, (row((0, 1, 2), (1, 3, 4), begin=0), row((2, 4, 6), begin=0)), 1.0)
    assert "turn" not in make_batch([[one_after_the_other]]).columns
    alternating = Sample(prompt, (row((0, 1, 2), (2, 3, 4), begin=0), row((1, 4, 6), begin=9)), 1.0)
    batch = make_batch([[one_after_the_other, alternating]])
    assert batch.columns["turn"].tolist() == [-1, 0, -1, 1, -1, -1, *[-1] * 4, 2, 2] + [
        *(-1, 0, -1, 2, -1, -1),
        *(-1, -1, -1, -1, 1, 1),
    ]


def test_columns_and_numbers_of_samples_have_their_types():
    batch = make_batch([[sample("0-0", [5, 6], [7], [-0.5], 1.0)]])
    types = {"response_mask": torch.float32, "rollout_log_probs": torch.float32, "versions": torch.int32}
    assert {name: column.dtype for name, column in batch.columns.items()} == types
    types = {"score": torch.float32, "truncated": torch.float32, "group": torch.int64}
    types |= {"version_min": torch.int64, "version_max": torch.int64}
    assert {name: row.dtype for name, row in batch.per_sequence.items()} == types
    assert batch.tokens.dtype == batch.lengths.dtype == torch.int64


def scored(reward, extra, greedy=None):
    one = sample("0-7", [5], [7], [-0.5], reward)
    return Sample(one.prompt, one.rows, reward, extra, greedy)


def test_several_rewards_of_a_sample_become_columns_in_the_order_that_is_asked_for():
    groups = [[scored(1.0, {"format": 0.5, "length": 3.0}), scored(2.0, {"length": 4.0, "format": 0.25})]]
    assert "reward_parts" not in make_batch(groups).per_sequence
    batch = make_batch(groups, reward_parts=("length", "reward", "format"))
    assert batch.per_sequence["reward_parts"].tolist() == [[3.0, 1.0, 0.5], [4.0, 2.0, 0.25]]
    assert batch.per_sequence["score"].tolist() == [1.0, 2.0]
    assert batch.select([1]).per_sequence["reward_parts"].tolist() == [[4.0, 2.0, 0.25]]
    failed = make_batch([[scored(0.0, {"reward_error": 1.0}), *groups[0]]], reward_parts=("length", "reward"))
    assert failed.per_sequence["reward_parts"].tolist() == [[0.0, 0.0], [3.0, 1.0], [4.0, 2.0]], "all 0 where it failed"


def test_a_part_called_reward_is_the_reward_of_that_name_and_without_one_the_whole():
    results = [joined({"reward": RewardResult(0.25), "format": RewardResult(form)}, {}) for form in (1.0, 0.5)]
    groups = [[scored(result.reward, result.extra) for result in results]]
    batch = make_batch(groups, reward_parts=("reward", "format"))
    assert batch.per_sequence["score"].tolist() == [1.25, 0.75]
    assert batch.per_sequence["reward_parts"].tolist() == [[0.25, 1.0], [0.25, 0.5]]


def test_a_missing_reward_is_told_with_the_name_of_the_sample():
    groups = [[scored(1.0, {"a": 2.0})], [scored(1.0, {"a": 2.0}), scored(1.0, {"b": 2.0})]]
    with pytest.raises(ValueError, match=r"^algorithm.reward_weights.a: the reward of sample 0-7#1 has no number") as e:
        make_batch(groups, reward_parts=("a",))
    assert str(e.value).endswith("(here: reward, b)")


def test_the_greedy_reward_is_a_row_where_every_sample_has_one():
    groups = [[scored(1.0, {}, 0.25), scored(2.0, {}, 0.25)], [scored(0.0, {}, -1.0)]]
    assert make_batch(groups).per_sequence["greedy_score"].tolist() == [0.25, 0.25, -1.0]
    assert "greedy_score" not in make_batch([[scored(1.0, {})]]).per_sequence
    assert sample_names(groups) == ["0-7#0", "0-7#1", "0-7#0"]


@given(st.integers(0, 10**6), st.booleans())
def test_samples_of_several_rows_match_the_slow_reference(seed, rewards):
    groups = groups_of_rows(seed, 3, rewards=rewards)
    batch = make_batch(groups)
    tokens, mask, log_probs, versions = slow_batch(groups)
    assert batch.tokens.tolist() == tokens
    assert batch.columns["response_mask"].tolist() == mask
    assert batch.columns["rollout_log_probs"].tolist() == pytest.approx(log_probs, rel=1e-6)
    assert batch.columns["versions"].tolist() == versions
    samples = [one for group in groups for one in group]
    assert batch.rows.tolist() == [len(one.rows) for one in samples]
    assert batch.lengths.tolist() == [len(row.token_ids) for one in samples for row in one.rows]
    spans = [[span.version for row in one.rows for span in row.versions] for one in samples]
    numbers = {"score": [one.reward for one in samples], "truncated": [float(one.truncated) for one in samples]}
    numbers["group"] = [number for number, group in enumerate(groups) for _ in group]
    numbers |= {"version_min": list(map(min, spans)), "version_max": list(map(max, spans))}
    found = {name: batch.per_sequence[name].tolist() for name in numbers}
    assert found == {name: pytest.approx(row, rel=1e-6) for name, row in numbers.items()}
    parts = zip(batch.split(batch.tokens), batch.split(batch.columns["response_mask"]), samples, strict=True)
    assert all(tokens[mask == 1].tolist() == one.learnt_ids for tokens, mask, one in parts)
    assert ("turn_rewards" in batch.columns) == rewards
    if rewards:
        for column, one in zip(batch.split(batch.columns["turn_rewards"]), samples, strict=True):
            assert column[column != 0].tolist() == [r for row in one.rows for r in row.rewards if r]
            assert not column[torch.cat([torch.tensor(last_of_turns(row)) for row in one.rows]) == 0].any()


def last_of_turns(row):
    ends = [span.end - 1 for span in row.learnt]
    return [float(place in ends) for place in range(len(row.token_ids))]


@given(st.integers(0, 10**6))
def test_a_selection_takes_samples_with_all_their_rows_and_rows_alone_keep_the_tokens(seed):
    batch = make_batch(groups_of_rows(seed, 3))
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed)).tolist()[:5]
    picked = batch.select(order)
    for name in ("response_mask", "versions"):
        parts, found = batch.split(batch.columns[name]), picked.split(picked.columns[name])
        assert [part.tolist() for part in found] == [parts[i].tolist() for i in order]
    assert picked.rows.tolist() == batch.rows[order].tolist()
    assert picked.per_sequence["score"].tolist() == batch.per_sequence["score"][order].tolist()
    alone = picked.by_row()
    assert torch.equal(alone.tokens, picked.tokens) and torch.equal(alone.lengths, picked.lengths)
    assert torch.equal(alone.segment_ids, picked.row_ids) and torch.equal(alone.row_ids, picked.row_ids)
    of_rows = torch.repeat_interleave(picked.per_sequence["score"], picked.rows)
    assert torch.equal(alone.per_sequence["score"], of_rows)
    places = (torch.arange(picked.num_tokens) - picked.row_starts[picked.row_ids]) == 0
    assert places.sum() == len(picked.lengths)


def test_an_answer_that_two_rows_hold_is_learnt_in_one_of_them():
    """Turn 0 is asked "5 6" and says 7 8; turn 1 goes on from it; turn 2, a sub-agent, too, and is asked 9."""
    spans, prompt = (VersionSpan(0, 0, 3),), Prompt("0-0", [5, 6], "x")
    first = Row(
        [5, 6, 7, 8, 4, 3], (TurnSpan(0, 2, 4), TurnSpan(1, 5, 6)), [-1.0, -2.0, -3.0], spans, "stop", (0.5, 0.0)
    )
    other = Row([5, 6, 7, 8, 9, 2], (TurnSpan(2, 5, 6),), [-4.0], (VersionSpan(1, 0, 1),), "length", (0.25,))
    batch = make_batch([[Sample(prompt, (first, other), 1.0, truncated=True)]])
    assert batch.columns["response_mask"].tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1]
    assert batch.columns["rollout_log_probs"].tolist() == [0, 0, -1, -2, 0, -3, 0, 0, 0, 0, 0, -4]
    assert batch.columns["turn_rewards"].tolist() == [0, 0, 0, 0.5, 0, 0, 0, 0, 0, 0, 0, 0.25]
    assert (batch.lengths.tolist(), batch.rows.tolist()) == ([6, 6], [2])
    assert batch.segment_ids.tolist() == [0] * 12 and batch.row_ids.tolist() == [0] * 6 + [1] * 6
    numbers = {name: row.tolist() for name, row in batch.per_sequence.items()}
    assert numbers == {"score": [1], "group": [0], "version_min": [0], "version_max": [1], "truncated": [1]}
    step = step_columns(batch, loss=CriticLoss(), agg_mode="seq-mean-token-sum")
    assert step.columns["weight"].tolist() == batch.columns["response_mask"].tolist()


def test_a_sample_that_contradicts_itself_is_caught():
    (first,) = sample("0-0", [5], [7], [-0.5], 1.0).rows
    prompt, second = Prompt("0-0", [5], "x"), replace(first, learnt=(TurnSpan(1, 1, 2),))
    assert Sample(prompt, (first, second), 1.0).num_turns == 2
    for rows, message in (
        ((), "has no row"),
        ((first, first), "learns a turn twice"),
        ((second, first), "not in the order of time"),
        ((first, replace(second, rewards=(1.0,))), "some turns of the sample of prompt 0-0 have no reward"),
    ):
        with pytest.raises(AssertionError, match=message):
            Sample(prompt, rows, 1.0)


def with_columns(uid, num_prompt, num_new, **columns):
    return sample(uid, [5] * num_prompt, [7] * num_new, [-0.5] * num_new, 1.0, columns=columns)


def test_the_columns_of_completions_become_columns_of_the_batch():
    """A column of a dtype and a shape that nothing here knows: tokens' numbers 0 .. 2 and 10 .. 14."""
    routes = [np.arange(n, dtype=np.uint16)[:, None, None] + np.zeros((1, 3, 2), np.uint16) for n in (3, 5)]
    groups = [[with_columns("0-0", 2, 1, routes=routes[0])], [with_columns("0-1", 1, 4, routes=routes[1] + 10)]]
    batch = make_batch(groups)
    found = batch.columns["routes"]
    (row,) = groups[0][0].rows
    assert row == replace(row, columns={}), "rows are compared without their columns"
    assert (found.dtype, found.shape) == (torch.uint16, (8, 3, 2))
    assert found[:, 0, 0].tolist() == [0, 1, 2, 10, 11, 12, 13, 14]
    assert torch.equal(found, batch.columns["routes"][:, :1, :1].expand(8, 3, 2))
    (_, second) = steps_of(batch, 1, seed=None)
    assert second.columns["routes"][:, 2, 1].tolist() == [10, 11, 12, 13, 14]


COLUMN = np.zeros((3, 2), np.uint8)
KEEPS = r"sample 0-0#0 uint8 \['N', 2\]"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (({"a": COLUMN}, {}), rf"^column a: sample 0-0#1 has no such column, {KEEPS}$"),
        (({}, {"a": COLUMN}), r"sample 0-0#1 has uint8 \['N', 2\], sample 0-0#0 no such column"),
        (({"a": COLUMN}, {"a": COLUMN.astype(np.uint16)}), rf"sample 0-0#1 has uint16 .*, {KEEPS}"),
        (({"a": COLUMN}, {"a": np.zeros((3, 4), np.uint8)}), rf"sample 0-0#1 has uint8 .*4\], {KEEPS}"),
        (({"a": COLUMN}, {"a": np.zeros(3, np.uint8)}), rf"sample 0-0#1 has uint8 \['N'\], {KEEPS}"),
    ],
)
def test_a_column_is_asked_of_every_sample_and_is_of_one_kind(columns, words):
    with pytest.raises(AssertionError, match=words):
        make_batch([[with_columns("0-0", 2, 1, **of_sample) for of_sample in columns]])


def test_a_row_that_contradicts_itself_is_caught():
    with pytest.raises(AssertionError, match="0 log-probs of 1 learnt tokens"):
        sample("0-0", [5], [7], [], 1.0)
    with pytest.raises(AssertionError, match="no token of the row is learnt"):
        sample("0-0", [5], [], [], 1.0)
    for versions in ((), ((0, 0, 2),), ((0, 1, 1),), ((0, 0, 1), (1, 2, 1))):
        with pytest.raises(AssertionError, match="do not cover 1 learnt tokens"):
            sample("0-0", [5], [7], [-1.0], 1.0, versions=versions)
    with pytest.raises(AssertionError, match="column a: 2 of 3 tokens"):
        with_columns("0-0", 2, 1, a=np.zeros((2, 4)))
    for learnt in ((TurnSpan(0, 1, 3), TurnSpan(1, 2, 4)), (TurnSpan(0, 3, 5),)):
        with pytest.raises(AssertionError, match="overlap, or are outside the 4 tokens"):
            Row([1, 2, 3, 4], learnt, [-1.0] * 4, (VersionSpan(0, 0, 4),), "stop")
    with pytest.raises(AssertionError, match="2 rewards of 1 answers"):
        Row([1, 2], (TurnSpan(0, 1, 2),), [-1.0], (VersionSpan(0, 0, 1),), "stop", (1.0, 2.0))


def unequal_groups(count):
    return [group[: 1 + number % 4] for number, group in enumerate(groups_of_rows(0, count))]


def steps_of(batch, prompts_per_step, *, seed):
    return [batch.select(members) for members in mini_batches(batch, prompts_per_step, seed=seed)]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_mini_batches_hold_whole_groups_once(seed):
    batch = make_batch(unequal_groups(12))
    parts = steps_of(batch, 4, seed=seed)
    assert mini_batches(batch, 4, seed=seed) == mini_batches(batch, 4, seed=seed)
    groups = [part.per_sequence["group"].unique_consecutive().tolist() for part in parts]
    assert [len(names) for names in groups] == [4, 4, 4]
    assert sorted(sum(groups, [])) == list(range(12))
    assert sum(part.num_sequences for part in parts) == batch.num_sequences
    assert (sum(groups, []) == list(range(12))) == (seed is None)


def test_groups_that_do_not_divide_are_spread_evenly():
    batch = make_batch(unequal_groups(33))
    sizes = [len(part.per_sequence["group"].unique()) for part in steps_of(batch, 16, seed=None)]
    assert sizes == [11, 11, 11]
    assert mini_batches(batch, 64, seed=1) == [list(range(batch.num_sequences))], "a single step is in its order"
