import math
import random
from dataclasses import replace

import estimator_reference as ref
import pytest
import torch
from algo_reference import cut_into_rows, missing, random_packed
from hypothesis import given
from hypothesis import strategies as st
from several_rows import groups_of_rows

from megarl.algo.advantages.estimate import check_estimator_args, estimate, score_rewards
from megarl.algo.finite import NonFiniteError
from megarl.algo.hyperparameters import keyword_names
from megarl.algo.registry import ADV_ESTIMATORS, register_adv_est
from megarl.data.batch import make_batch
from megarl.samples.batch import Batch, Stat

BUILT_IN = sorted(ref.ESTIMATORS)
COMPARING = [name for name in BUILT_IN if "group_ids" in keyword_names(ADV_ESTIMATORS[name])]
WEIGHTS = (0.5, 2.0, -1.0)


def batch_of(lengths, mask, score, group, **columns) -> Batch:
    tensors = {"response_mask": torch.tensor(mask, dtype=torch.float32)}
    tensors |= {name: torch.tensor(c, dtype=torch.float32) for name, c in columns.items()}
    rows = {"score": torch.tensor(score, dtype=torch.float32), "group": torch.tensor(group, dtype=torch.int64)}
    lengths = torch.tensor(lengths, dtype=torch.int64)
    return Batch(torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths, tensors, rows)


def test_a_sample_of_which_nothing_is_kept_moves_no_other_in_its_group():
    """Scores 1, 0, 5, 0: with the third in the baseline, the right answer would be made less likely."""
    keep = [1, 1, 0, 1, 0, 0, 1, 1]  # of the second sample a token stays, of the third none
    batch = batch_of([2] * 4, [1] * 8, [1.0, 0.0, 5.0, 0.0], [7] * 4, keep=keep)
    out, stats = estimate(batch, adv_estimator="grpo")
    right, wrong = 2 / math.sqrt(3), -1 / math.sqrt(3)  # (1 - 1/3) / std, of 1, 0, 0 it is 1 / sqrt(3)
    expected = [right, right, wrong, wrong, 0.0, 0.0, wrong, wrong]
    assert out.columns["advantages"].tolist() == pytest.approx(expected, abs=1e-5)
    assert out.columns["token_level_rewards"].tolist() == [0, 1, 0, 0, 0, 5, 0, 0], "the reward itself stays"
    assert stats["algorithm/groups_of_one"].result() == 0
    alone, stats = estimate(batch.with_columns(keep=torch.tensor([1.0] * 2 + [0.0] * 6)), adv_estimator="grpo")
    assert alone.columns["advantages"].tolist() == [0.0] * 8 and stats["algorithm/groups_of_one"].result() == 1
    gae, _ = estimate(batch.with_columns(values=torch.zeros(8)), adv_estimator="gae")
    plain = batch_of([2] * 4, [1] * 8, [1.0, 0.0, 5.0, 0.0], [7] * 4, values=[0] * 8)
    assert torch.equal(gae.columns["advantages"], estimate(plain, adv_estimator="gae")[0].columns["advantages"])


def test_grpo_by_hand_with_the_score_on_the_last_trainable_token():
    batch = batch_of([3, 4, 2], [0, 1, 1, 0, 1, 1, 0, 0, 1], [1.0, 3.0, 5.0], [7, 7, 8])
    out, stats = estimate(batch, adv_estimator="grpo")
    assert out.columns["token_level_rewards"].tolist() == [0, 0, 1, 0, 0, 3, 0, 0, 5]
    a = 1 / math.sqrt(2)
    assert out.columns["advantages"].tolist() == pytest.approx([0, -a, -a, 0, a, a, 0, 0, 0], abs=1e-5)
    assert out.columns["returns"].tolist() == [0, 1, 1, 0, 3, 3, 0, 0, 5]
    assert stats["algorithm/groups_of_one"].result() == 1
    assert stats["algorithm/groups_all_equal"].result() == 0
    assert all(c.dtype == torch.float32 for c in out.columns.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", (-2 / 12**0.5, 4 / 12**0.5)),
        ("grpo_passk", (0, 6 / 12**0.5)),  # the best less the second, in standard deviations
        ("rloo", (-3, 6)),
        ("opo", (-1.5, 4.5)),  # the baseline weighs each score by its tokens: 6 / 4
        ("gpg", (-2, 4)),  # times 1: no group has equal scores
        ("reinforce_plus_plus", (-0.5, 1.5)),  # of tokens 0, 0, 0, 6: mean 1.5, standard deviation 3
        ("reinforce_plus_plus_baseline", (-0.5, 1.5)),  # of tokens -2, -2, -2, 4: mean -0.5, standard deviation 3
    ],
)
def test_one_group_by_hand(name, expected):
    """Scores 0, 0 and 6: the mean is 2, the sample variance 12.  The second sample has two tokens."""
    batch = batch_of([2, 3, 2], [0, 1, 0, 1, 1, 0, 1], [0.0, 0.0, 6.0], [0, 0, 0])
    low, high = expected
    found = estimate(batch, adv_estimator=name)[0].columns["advantages"]
    assert found.tolist() == pytest.approx([0, low, 0, low, low, 0, high], abs=1e-5)


def test_columns_that_no_estimator_reads_stay_as_they_are():
    """Of any dtype and shape; a NaN of theirs means nothing here."""
    batch = batch_of([2, 2], [0, 1, 0, 1], [0.0, 4.0], [0, 0])
    others = {
        "support": torch.full((4, 3, 2), math.nan, dtype=torch.float16),
        "routes": torch.arange(8).view(4, 2).to(torch.uint8),
        "versions": torch.tensor([-1, 3, -1, 4], dtype=torch.int32),
    }
    out, _ = estimate(batch.with_columns(**others), adv_estimator="grpo")
    assert all(out.columns[name] is column for name, column in others.items())
    assert out.columns["advantages"].tolist() == estimate(batch, adv_estimator="grpo")[0].columns["advantages"].tolist()


def test_every_estimator_has_a_reference():
    assert missing(ADV_ESTIMATORS, ref.ESTIMATORS) == ""


def test_kl_in_the_reward_by_hand():
    batch = batch_of(
        [3, 3],
        [0, 1, 1, 0, 0, 1],
        [1.0, 0.0],
        [0, 1],
        old_log_probs=[math.nan, -1.0, -2.0, 0.0, 0.0, -1.0],
        ref_log_probs=[math.nan, -1.5, -1.0, 0.0, 9.0, -1.25],
    )
    out, stats = estimate(batch, adv_estimator="grpo", use_kl_in_reward=True, kl_coef=0.1)
    # KL 0.5, -1.0 | 0.25
    assert out.columns["token_level_rewards"].tolist() == pytest.approx([0, -0.05, 1.1, 0, 0, -0.025])
    assert stats["actor/reward_kl_penalty"] == Stat("mean", pytest.approx(-0.25 + 0.25), 2)
    assert stats["actor/reward_kl_penalty_coeff"].result() == 0.1


def test_the_current_kl_counts_only_sequences_that_have_one():
    old, base = [0.0, -1.0, 0.0, 0.0], [0.0, -1.5, 0.0, 0.0]
    batch = batch_of([2, 2], [0, 1, 0, 0], [1.0, 0.0], [0, 0], old_log_probs=old, ref_log_probs=base)
    _, stats = estimate(batch, adv_estimator="grpo", use_kl_in_reward=True, kl_coef=0.1)
    assert stats["actor/reward_kl_penalty"] == Stat("mean", 0.5, 1)


def test_groups_without_a_difference_are_counted():
    """Groups 0 (equal), 1, 2 (one sample), and 3, which has no trainable token and is no group."""
    batch = batch_of([1] * 6, [1] * 5 + [0], [0.3, 0.3, 1.0, 0.0, 2.0, 7.0], [0, 0, 1, 1, 2, 3])
    _, stats = estimate(batch, adv_estimator="grpo")
    assert stats["algorithm/groups_all_equal"].result() == pytest.approx(1 / 3)
    assert stats["algorithm/sequences_without_trainable_token"].result() == 1


def test_what_penalties_add_makes_no_difference_between_the_rewards_of_a_group():
    """Both groups differ in KL and in length; the reward function said the same of both samples of the first."""
    old, base = [-1.0, -1.0, -1.0, -1.0], [-1.5, -1.0, -0.5, -2.0]
    batch = batch_of([1] * 4, [1] * 4, [1.0, 0.5, 1.0, 1.0], [0, 0, 1, 1], old_log_probs=old, ref_log_probs=base)
    batch = batch.with_per_sequence(raw_score=torch.tensor([1.0, 1.0, 1.0, 2.0]))
    out, stats = estimate(batch, adv_estimator="grpo", use_kl_in_reward=True, kl_coef=0.1)
    assert out.columns["token_level_rewards"].tolist() == pytest.approx([0.95, 0.5, 1.05, 0.9])
    assert stats["algorithm/groups_all_equal"] == Stat("mean", 1, 2)
    plain = batch_of([1] * 2, [1] * 2, [1.0, 1.0], [0, 0], old_log_probs=old[:2], ref_log_probs=base[:2])
    _, stats = estimate(plain, adv_estimator="rloo", use_kl_in_reward=True, kl_coef=0.1)
    assert stats["algorithm/groups_all_equal"] == Stat("mean", 1, 1)


def test_advantage_clip():
    batch = batch_of([1] * 3, [1] * 3, [0.0, 0.0, 30.0], [0, 0, 0])
    out, _ = estimate(batch, adv_estimator="grpo", norm_adv_by_std_in_grpo=False, advantage_clip=12.0)
    assert out.columns["advantages"].tolist() == [-10, -10, 12]
    out, _ = estimate(batch, adv_estimator="grpo", norm_adv_by_std_in_grpo=False, advantage_clip=4.0)
    assert out.columns["advantages"].tolist() == [-4, -4, 4]


def complete(batch: Batch, seed: int) -> Batch:
    """The same batch with all that any estimator asks for; trash at masked places."""
    g = torch.Generator().manual_seed(seed)
    mask = batch.columns["response_mask"] != 0
    p = batch.columns["old_log_probs"].exp()
    squares = torch.where(mask, p.square() + (1 - p).square() * torch.rand(len(p), generator=g), torch.nan)
    full_kl = torch.where(mask, torch.rand(len(p), generator=g, dtype=torch.float64), torch.inf)
    rows = {
        "greedy_score": torch.randn(batch.num_sequences, generator=g),
        "reward_parts": torch.randint(0, 3, (batch.num_sequences, 3), generator=g).float(),
        "raw_score": batch.per_sequence["score"] + torch.randint(0, 2, (batch.num_sequences,), generator=g),
    }
    return batch.with_columns(sum_pi_squared=squares, full_kl=full_kl).with_per_sequence(**rows)


@st.composite
def batches(draw):
    """Ragged samples, masks with holes, groups of any size in any order."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    groups = draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    seed = draw(st.integers(0, 10**6))
    batch = random_packed(lengths, seed, groups=groups).batch
    return complete(cut_into_rows(batch, seed) if draw(st.booleans()) else batch, seed)


def lists(batch: Batch, name: str) -> list[list[float]]:
    return [column.tolist() for column in batch.split(batch.columns[name])]


def by_the_reference(batch: Batch, name: str, kl_penalty: str | None, kl_coef: float, **settings):
    masks = [[m != 0 for m in row] for row in lists(batch, "response_mask")]
    kl = {
        None: lambda old, base, full: 0.0,
        "kl": lambda old, base, full: old - base,
        "abs": lambda old, base, full: abs(old - base),
        "full": lambda old, base, full: full,
    }[kl_penalty]
    columns = [lists(batch, name) for name in ("old_log_probs", "ref_log_probs", "full_kl")]
    rewards = []
    for mask, score, *of_row in zip(masks, batch.per_sequence["score"].tolist(), *columns, strict=True):
        row = [-kl_coef * kl(*token) if m else 0.0 for m, *token in zip(mask, *of_row, strict=True)]
        if any(mask):
            row[max(t for t, m in enumerate(mask) if m)] += score
        rewards.append(row)
    data = ref.Data(
        values=lists(batch, "values"),
        old=lists(batch, "old_log_probs"),
        squares=lists(batch, "sum_pi_squared"),
        greedy=batch.per_sequence["greedy_score"].tolist(),
        raw=batch.per_sequence["raw_score"].tolist(),
        parts=batch.per_sequence["reward_parts"].tolist(),
        part_weights=WEIGHTS,
        **settings,
    )
    groups = batch.per_sequence["group"].tolist()
    return rewards, *ref.ESTIMATORS[name](rewards, masks, groups, data)


@given(
    batches(),
    st.sampled_from(BUILT_IN),
    st.sampled_from([None, "kl", "abs", "full"]),
    st.booleans(),
    st.sampled_from([0.9, 1.0]),
)
def test_every_estimator_agrees_with_the_slow_reference(batch, name, kl_penalty, by_std, gamma):
    out, _ = estimate(
        batch,
        adv_estimator=name,
        gamma=gamma,
        lam=0.9,
        norm_adv_by_std_in_grpo=by_std,
        reward_weights=WEIGHTS,
        use_kl_in_reward=kl_penalty is not None,
        kl_penalty=kl_penalty or "kl",
        kl_coef=0.3,
    )
    slow = by_the_reference(batch, name, kl_penalty, 0.3, gamma=gamma, lam=0.9, by_std=by_std)
    for column, expected, slack in zip(
        ("token_level_rewards", "advantages", "returns"), slow, (1e-6, 1e-4, 1e-5), strict=True
    ):
        assert out.columns[column].dtype == torch.float32
        assert out.columns[column].tolist() == pytest.approx(sum(expected, []), rel=1e-4, abs=slack)


@given(batches(), st.sampled_from(BUILT_IN), st.randoms(use_true_random=False))
def test_the_order_of_the_samples_means_nothing(batch, name, random):
    def advantages(batch):
        out, _ = estimate(batch, adv_estimator=name, lam=0.9, reward_weights=WEIGHTS)
        return [a.tolist() for a in out.split(out.columns["advantages"])]

    order = list(range(batch.num_sequences))
    random.shuffle(order)
    plain, shuffled = advantages(batch), advantages(batch.select(order))
    for place, sample in enumerate(order):
        assert shuffled[place] == pytest.approx(plain[sample], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("lengths", [[], [2, 0]])
def test_nothing_to_train_on_gives_zeros(name, lengths):
    n = sum(lengths)
    nothing = {c: [math.nan] * n for c in ("values", "old_log_probs", "sum_pi_squared")}
    batch = batch_of(lengths, [0] * n, [1.0] * len(lengths), [0] * len(lengths), **nothing)
    batch = batch.with_per_sequence(greedy_score=batch.per_sequence["score"], reward_parts=torch.zeros(len(lengths), 1))
    out, _ = estimate(batch, adv_estimator=name, reward_weights=(1.0,))
    assert all(out.columns[name].tolist() == [0.0] * n for name in ("advantages", "returns", "token_level_rewards"))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("name", [name for name in COMPARING if name != "optimal_token_baseline"])
def test_equal_rewards_give_exactly_nothing(name, value):
    batch = batch_of([2, 1, 2, 1], [0, 1, 1, 1, 1, 1], [value] * 4, [0, 0, 0, 1])
    batch = batch.with_per_sequence(reward_parts=torch.full((4, 1), value))
    out, _ = estimate(batch, adv_estimator=name, reward_weights=(1.0,))
    assert out.columns["advantages"].tolist() == [0.0] * 6


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_one_gives_zero_and_is_counted(name):
    # the first prompt has one sample, the second one sample with a token and one without, the third two
    batch = batch_of(
        [2, 1, 1, 1, 2],
        [1, 1, 1, 0, 1, 0, 1],
        [7.0, 3.0, 9.0, 1.0, 2.0],
        [0, 1, 1, 2, 2],
        old_log_probs=[-1.0] * 7,
        sum_pi_squared=[0.5] * 7,
    ).with_per_sequence(reward_parts=torch.tensor([[7.0], [3], [9], [1], [2]]))
    out, stats = estimate(batch, adv_estimator=name, reward_weights=(1.0,))
    advantages = out.columns["advantages"].tolist()
    assert advantages[:4] == [0, 0, 0, 0]
    assert advantages[6] > 0
    assert stats["algorithm/groups_of_one"].result() == 2
    assert stats["algorithm/groups_all_equal"] == Stat("mean", 0, 3)


def test_a_users_estimator_gets_its_own_arguments(tables):
    def scaled_return(rewards, mask, segment_ids, *, group_ids, scale, shift=0.0):
        return rewards * scale + shift, rewards

    register_adv_est("scaled_return")(scaled_return)
    batch = batch_of([1, 1], [1, 1], [1.0, 3.0], [0, 0])
    out, stats = estimate(batch, adv_estimator="scaled_return", adv_estimator_args={"scale": 2.0})
    assert out.columns["advantages"].tolist() == [2, 6]
    assert "algorithm/groups_of_one" in stats
    needs = "adv_estimator=scaled_return: expected a value in algorithm.adv_estimator_args.scale, it has no default"
    with pytest.raises(ValueError, match=needs):
        estimate(batch, adv_estimator="scaled_return")
    with pytest.raises(ValueError, match=needs):
        check_estimator_args("scaled_return", {"shift": 1})
    with pytest.raises(ValueError, match=r"adv_estimator_args.beta=1: .*scaled_return takes scale, shift$"):
        check_estimator_args("scaled_return", {"beta": 1})
    check_estimator_args("scaled_return", {"scale": 1})


def test_arguments_that_an_estimator_has_not_are_refused():
    for name in BUILT_IN:
        check_estimator_args(name, {})
    for name in ("beta", "gamma", "group_ids"):  # gamma has a key of its own, group_ids is data
        with pytest.raises(ValueError, match=rf"adv_estimator_args.{name}=0.5: .*=grpo takes no values of its own$"):
            check_estimator_args("grpo", {name: 0.5})
    with pytest.raises(ValueError, match="adv_estimator='rlo': expected one of grpo, "):
        check_estimator_args("rlo", {})


GDPO = {"adv_estimator": "gdpo"}


@pytest.mark.parametrize(
    ("rows", "settings", "sentence"),
    [
        ({}, {"adv_estimator": "rlo"}, "adv_estimator='rlo': expected one of grpo, "),
        ({}, {"adv_estimator": "gae"}, "adv_estimator=gae needs values"),
        ({}, {"adv_estimator": "remax"}, "adv_estimator=remax needs greedy_score"),
        ({"greedy_score": [math.inf]}, {"adv_estimator": "remax"}, "greedy_score is inf for sequence 0"),
        ({"reward_parts": [[1.0, math.nan]]}, GDPO, "reward_parts is nan for sequence 0"),
        ({"reward_parts": [[1.0, 2.0]]}, GDPO | {"reward_weights": (1.0,)}, "reward_weights has 1 weights .* needs"),
        ({"reward_parts": [1.0]}, GDPO | {"reward_weights": (1.0,)}, "reward_weights has 1 weights .* needs"),
        ({"reward_parts": [[]]}, GDPO, "reward_weights has 0 weights .* needs"),
        ({"score": [math.nan]}, {}, "score is nan for sequence 0"),
        ({}, {"use_kl_in_reward": True}, "needs the column old_log_probs"),
        ({}, {"use_kl_in_reward": True, "kl_penalty": "k3+"}, "kl_penalty='k3[+]': .* a reward has none"),
        ({}, {"use_kl_in_reward": True, "kl_penalty": "full"}, "kl_penalty=full needs the column full_kl"),
    ],
)
def test_what_an_estimate_needs(rows, settings, sentence):
    batch = batch_of([1], [1], [0.0], [0]).with_per_sequence(**{name: torch.tensor(x) for name, x in rows.items()})
    with pytest.raises((ValueError, NonFiniteError), match=sentence):
        estimate(batch, **{"adv_estimator": "grpo"} | settings)


def test_the_reward_of_a_turn_is_on_its_last_token_and_the_rest_on_the_samples_last():
    batch = batch_of([7, 2], [0, 1, 1, 0, 1, 0, 1, 0, 1], [2.0, -1.0], [0, 0])
    batch = replace(batch, lengths=torch.tensor([3, 4, 2]), rows=torch.tensor([2, 1]))
    turns = torch.tensor([0, 0, 0.5, 0, 0.25, 0, -0.25, 0, -0.75])
    out, _ = estimate(batch.with_columns(turn_rewards=turns), adv_estimator="reinforce_plus_plus", gamma=1.0)
    assert out.columns["token_level_rewards"].tolist() == [0, 0, 0.5, 0, 0.25, 0, 1.25, 0, -1]
    assert out.columns["returns"].tolist() == [0, 2, 2, 0, 1.5, 0, 1.25, 0, -1]
    out, _ = estimate(batch, adv_estimator="reinforce_plus_plus", gamma=1.0)
    assert out.columns["token_level_rewards"].tolist() == [0, 0, 0, 0, 0, 0, 2, 0, -1]


@pytest.mark.parametrize("seed", range(6))
def test_gae_in_the_order_of_turns_equals_samples_laid_out_in_that_order(seed):
    """The slow way: each sample's learnt tokens in a list, sorted by turn, as one row without any context."""
    rng = random.Random(seed)
    batch = make_batch(groups_of_rows(seed, 3, rewards=True))
    turn = torch.full((batch.num_tokens,), -1, dtype=torch.int32)
    learnt = [place for place in range(batch.num_tokens) if batch.columns["response_mask"][place]]
    turn[learnt] = torch.tensor([rng.randrange(4) for _ in learnt], dtype=torch.int32)
    values = torch.tensor([rng.gauss(0, 1) for _ in range(batch.num_tokens)])
    batch = batch.with_columns(turn=turn, values=values)
    out, _ = estimate(batch, adv_estimator="gae", gamma=0.9, lam=0.7)

    sample = batch.segment_ids.tolist()
    order = sorted(learnt, key=lambda place: (sample[place], int(turn[place]), place))
    lengths = torch.tensor([sum(sample[place] == each for place in order) for each in range(batch.num_sequences)])
    columns = {name: batch.columns[name][order] for name in ("response_mask", "values", "turn_rewards")}
    laid_out = Batch(batch.tokens[order], lengths, columns, batch.per_sequence)
    wanted, _ = estimate(laid_out, adv_estimator="gae", gamma=0.9, lam=0.7)
    for name in ("token_level_rewards", "advantages", "returns"):
        assert torch.equal(out.columns[name][order], wanted.columns[name])
        assert not out.columns[name][batch.columns["response_mask"] == 0].any()


def test_equal_scores_with_different_rewards_of_turns_are_equal_for_every_comparison():
    """Float32 rests added up to 0.70000005 and 0.6999999: gpg's alpha was 1, and grpo learnt from the noise."""
    batch = batch_of([5, 5, 2, 2], [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1], [0.7, 0.7, 1.0, 0.0], [0, 0, 1, 1])
    turns = torch.tensor([0, 0.1, 0.1, 0.3, 0.2, 0, 7.3, -0.9, 1e-3, -5.0, 0, 1.0, 0, 0.0])
    batch = batch.with_columns(turn_rewards=turns)
    rewards, _ = score_rewards(
        batch.per_sequence["score"], batch.columns["response_mask"] != 0, batch.segment_ids, turn_rewards=turns
    )
    assert [sum(part) for part in rewards.split([5, 5, 2, 2])] == batch.per_sequence["score"].tolist()
    for name in ("grpo", "gpg"):
        out, _ = estimate(batch, adv_estimator=name)
        assert out.columns["advantages"][:10].tolist() == [0] * 10
        assert {column.dtype for column in out.columns.values()} == {torch.float32}
    assert out.columns["advantages"][10:].tolist() == [0, 1, 0, -1], "alpha is 4 / 2"


@given(st.integers(0, 10**6))
def test_token_rewards_with_those_of_turns_add_up_to_the_score(seed):
    g = torch.Generator().manual_seed(seed)
    batch = complete(random_packed([3, 0, 6, 9], seed).batch, seed)
    mask, scores = batch.columns["response_mask"] != 0, torch.randn(4, generator=g)
    turns = torch.randn(batch.num_tokens, generator=g) * (torch.rand(batch.num_tokens, generator=g) < 0.7)
    rewards, _ = score_rewards(scores, mask, batch.segment_ids, turn_rewards=turns)
    for part, has, score in zip(batch.split(rewards), batch.split(mask), scores.tolist(), strict=True):
        assert sum(part.tolist()) == (score if has.any() else 0)


@pytest.mark.parametrize(
    ("name", "value", "adv_estimator"),
    [("values", math.inf, "gae"), ("turn_rewards", math.nan, "grpo"), ("turn_rewards", math.inf, "grpo")],
)
def test_a_number_that_is_not_finite_names_its_sequence(name, value, adv_estimator):
    batch = batch_of([3, 4], [1] * 7, [0.0, 0.0], [0, 0]).with_columns(
        **{name: torch.tensor([0.0] * 4 + [value, 0, 0])}
    )
    with pytest.raises(NonFiniteError, match=f"{name} is {value} at token 1 of sequence 1"):
        estimate(batch, adv_estimator=adv_estimator)
