import pytest
import torch

from megarl.data.batch import make_batch, mini_batches, sample_names
from megarl.sample import Completion, Prompt, Sample, VersionSpan


def sample(uid, prompt_ids, token_ids, log_probs, reward, *, finish="stop", versions=((0, 0, 9),)):
    spans = tuple(VersionSpan(*span) for span in versions)
    return Sample(Prompt(uid, prompt_ids, "x"), Completion(token_ids, log_probs, finish, spans), reward)


def slow_batch(groups):
    """Token by token: what make_batch does at once."""
    tokens, mask, log_probs = [], [], []
    for group in groups:
        for one in group:
            tokens += one.prompt.token_ids + one.completion.token_ids
            mask += [0.0] * len(one.prompt.token_ids) + [1.0] * len(one.completion.token_ids)
            log_probs += [0.0] * len(one.prompt.token_ids) + one.completion.log_probs
    return tokens, mask, log_probs


def test_two_groups_by_hand():
    batch = make_batch(
        [
            [
                sample("0-0", [5, 6], [7], [-0.5], 1.0),
                sample("0-0", [5, 6], [8, 9], [-0.25, -1.0], 0.0, finish="length", versions=((3, 0, 1), (4, 1, 2))),
            ],
            [sample("0-1", [4], [7, 7, 7], [-1.0, -2.0, -3.0], -1.0, versions=((2, 0, 3),))],
        ]
    )
    assert batch.tokens.tolist() == [5, 6, 7, 5, 6, 8, 9, 4, 7, 7, 7]
    assert batch.lengths.tolist() == [3, 4, 4]
    assert batch.columns["response_mask"].tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1]
    assert batch.columns["rollout_log_probs"].tolist() == [0, 0, -0.5, 0, 0, -0.25, -1, 0, -1, -2, -3]
    assert batch.per_sequence["score"].tolist() == [1, 0, -1]
    assert batch.per_sequence["group"].tolist() == [0, 0, 1]
    assert batch.per_sequence["version_min"].tolist() == [0, 3, 2]
    assert batch.per_sequence["version_max"].tolist() == [0, 4, 2]
    assert batch.per_sequence["truncated"].tolist() == [0, 1, 0]


def scored(reward, extra, greedy=None):
    one = sample("0-7", [5], [7], [-0.5], reward)
    return Sample(one.prompt, one.completion, reward, extra, greedy)


def test_several_rewards_of_a_sample_become_columns_in_the_order_that_is_asked_for():
    groups = [[scored(1.0, {"format": 0.5, "length": 3.0}), scored(2.0, {"length": 4.0, "format": 0.25})]]
    assert "reward_parts" not in make_batch(groups).per_sequence
    batch = make_batch(groups, reward_parts=("length", "reward", "format"))
    assert batch.per_sequence["reward_parts"].tolist() == [[3.0, 1.0, 0.5], [4.0, 2.0, 0.25]]
    assert batch.per_sequence["score"].tolist() == [1.0, 2.0]
    assert batch.select([1]).per_sequence["reward_parts"].tolist() == [[4.0, 2.0, 0.25]]


def test_all_rewards_of_a_sample_are_0_where_the_function_failed():
    batch = make_batch([[scored(0.0, {"reward_error": 1.0}), scored(1.0, {"a": 2.0})]], reward_parts=("a", "reward"))
    assert batch.per_sequence["reward_parts"].tolist() == [[0.0, 0.0], [2.0, 1.0]]


def test_a_missing_reward_is_told_with_the_name_of_the_sample():
    groups = [[scored(1.0, {"a": 2.0})], [scored(1.0, {"a": 2.0}), scored(1.0, {"b": 2.0})]]
    with pytest.raises(ValueError, match=r"^algorithm.reward_weights.a: the reward of sample 0-7#1 has no number") as e:
        make_batch(groups, reward_parts=("a",))
    assert str(e.value).endswith("(here: reward, b)")


def test_the_greedy_reward_is_a_row_where_every_sample_has_one():
    groups = [[scored(1.0, {}, 0.25), scored(2.0, {}, 0.25)], [scored(0.0, {}, -1.0)]]
    assert make_batch(groups).per_sequence["greedy_score"].tolist() == [0.25, 0.25, -1.0]
    assert "greedy_score" not in make_batch([[scored(1.0, {})]]).per_sequence


def test_a_sample_is_named_by_its_prompt_and_its_place_in_the_group():
    one, other = sample("0-3", [5], [7], [-0.5], 1.0), sample("1-3", [5], [7], [-0.5], 1.0)
    assert sample_names([[one, one], [other]]) == ["0-3#0", "0-3#1", "1-3#0"]


def test_types_of_the_columns():
    batch = make_batch([[sample("0-0", [5], [7], [-0.5], 1)]])
    assert batch.tokens.dtype == batch.lengths.dtype == torch.int64
    assert {column.dtype for column in batch.columns.values()} == {torch.float32}
    wanted = {"score": torch.float32, "truncated": torch.float32, "group": torch.int64}
    wanted |= {"version_min": torch.int64, "version_max": torch.int64}
    assert {name: row.dtype for name, row in batch.per_sequence.items()} == wanted


def random_groups(num_groups, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def ints(low, high, size):
        return torch.randint(low, high, (size,), generator=draw).tolist()

    groups = []
    for g in range(num_groups):
        prompt, group = ints(0, 50, ints(1, 6, 1)[0]), []
        for _ in range(ints(1, 5, 1)[0]):
            tokens = ints(0, 50, ints(0, 7, 1)[0])
            group.append(sample(f"0-{g}", prompt, tokens, [-0.5 * t for t in tokens], float(g)))
        groups.append(group)
    return groups


def test_many_groups_match_the_slow_reference():
    groups = random_groups(20)
    batch = make_batch(groups)
    tokens, mask, log_probs = slow_batch(groups)
    assert batch.tokens.tolist() == tokens
    assert batch.columns["response_mask"].tolist() == mask
    assert batch.columns["rollout_log_probs"].tolist() == log_probs


def test_a_completion_that_contradicts_itself_is_caught():
    with pytest.raises(AssertionError, match="completion of prompt 0-0 has 1 tokens and 0 log-probs"):
        make_batch([[sample("0-0", [5], [7], [], 1.0)]])
    with pytest.raises(AssertionError, match="completion of prompt 0-0 does not say which weights wrote it"):
        make_batch([[sample("0-0", [5], [7], [-1.0], 1.0, versions=())]])


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_mini_batches_hold_whole_groups_once(seed):
    batch = make_batch(random_groups(12))
    parts = mini_batches(batch, 4, seed=seed)
    groups = [part.per_sequence["group"].unique_consecutive().tolist() for part in parts]
    assert [len(names) for names in groups] == [4, 4, 4]
    assert sorted(sum(groups, [])) == list(range(12))
    assert sum(part.num_sequences for part in parts) == batch.num_sequences
    assert (sum(groups, []) == list(range(12))) == (seed is None)


def test_mini_batches_carry_every_column_and_row_along():
    batch = make_batch(random_groups(6))
    for part in mini_batches(batch, 2, seed=5):
        wanted = batch.select([i for g in part.per_sequence["group"].unique_consecutive() for i in where(batch, g)])
        assert part.tokens.tolist() == wanted.tokens.tolist()
        assert part.columns["rollout_log_probs"].tolist() == wanted.columns["rollout_log_probs"].tolist()
        assert part.per_sequence["score"].tolist() == wanted.per_sequence["score"].tolist()


def where(batch, group):
    return (batch.per_sequence["group"] == group).nonzero().flatten().tolist()


def test_groups_that_do_not_divide_are_spread_evenly():
    batch = make_batch(random_groups(33))
    sizes = [len(part.per_sequence["group"].unique()) for part in mini_batches(batch, 16, seed=None)]
    assert sizes == [11, 11, 11]
    assert len(mini_batches(batch, 64, seed=None)) == 1


def test_the_same_seed_gives_the_same_steps():
    batch = make_batch(random_groups(9))
    first, again = (mini_batches(batch, 3, seed=7) for _ in range(2))
    assert [part.tokens.tolist() for part in first] == [part.tokens.tolist() for part in again]
