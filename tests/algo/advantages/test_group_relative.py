import pytest
import torch

from megarl.algo.advantages.group_relative import gdpo, gpg, grpo, grpo_passk, opo, reinforce_plus_plus_baseline, rloo
from megarl.algo.advantages.groups import Groups

# Six samples with 2, 1, 1, 2, 0 and 1 trainable tokens; group 7 = {0, 1, 3, 4}, of which 4 takes no part; 5 is alone.
LENGTHS = [3, 1, 2, 2, 1, 1]
SEGMENTS = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1, 0, 1]) != 0
ENDS = [2, 3, 5, 7, None, 9]
GROUPS = torch.tensor([7, 7, 2, 7, 7, 9])
DATA = {"group_ids": GROUPS}
BY_STD = DATA | {"norm_adv_by_std_in_grpo": True}
CENTRED = DATA | {"norm_adv_by_std_in_grpo": False}


def rewards_of(scores: list[float]) -> torch.Tensor:
    rewards = torch.zeros(len(SEGMENTS))
    for end, score in zip(ENDS, scores, strict=True):
        if end is not None:
            rewards[end] = score
    return rewards


def per_sample(column: torch.Tensor) -> list[float | None]:
    """The one number that all trainable tokens of a sample carry; masked places have to be 0."""
    assert column.dtype == torch.float32
    assert not column[~MASK].any()
    out = []
    for b in range(6):
        found = column[MASK & SEGMENTS.eq(b)].unique().tolist()
        assert len(found) <= 1
        out.append(found[0] if found else None)
    return out


def run(estimator, scores, **data):
    advantages, returns = estimator(rewards_of(scores), MASK, SEGMENTS, **data)
    assert per_sample(returns) == [None if end is None else s for s, end in zip(scores, ENDS, strict=True)]
    return per_sample(advantages)


def near(*numbers):
    return [None if x is None else pytest.approx(x, abs=1e-6) for x in numbers]


SCORES = [1.0, 0.0, 5.0, 5.0, 100.0, 8.0]  # group 7 has the rewards 1, 0, 5: mean 2, variance (1 + 4 + 9) / 2 = 7


def test_grpo_by_hand():
    # sqrt(7) = 2.6457513:  -1/2.6457523, -2/..., 3/...;  groups 2 and 9 have nobody to compare with
    assert run(grpo, SCORES, **BY_STD) == near(-0.3779643, -0.7559286, 0, 1.1338929, None, 0)
    assert run(grpo, SCORES, **CENTRED) == near(-1, -2, 0, 3, None, 0)


def test_grpo_passk_by_hand_gives_the_best_its_lead_over_the_second():
    assert run(grpo_passk, SCORES, **CENTRED) == near(0, 0, 0, 4, None, 0)  # 5 - 1
    assert run(grpo_passk, SCORES, **BY_STD) == near(0, 0, 0, 1.5118573, None, 0)  # 4 / 2.6457523


def test_two_best_samples_have_no_lead():
    assert run(grpo_passk, [5.0, 1.0, 0.0, 5.0, 0.0, 0.0], **BY_STD) == near(0, 0, 0, 0, None, 0)


def test_the_best_leads_also_where_all_rewards_are_negative():
    assert run(grpo_passk, [-3.0, -1.0, 0.0, -2.5, 0.0, -7.0], **CENTRED) == near(0, 1.5, 0, 0, None, 0)


def test_rloo_by_hand_is_the_distance_to_the_mean_of_the_others():
    # 1 - 5/2 = -1.5;  0 - 6/2 = -3;  5 - 1/2 = 4.5
    assert run(rloo, SCORES, **DATA) == near(-1.5, -3, 0, 4.5, None, 0)


def test_opo_by_hand_weighs_the_baseline_by_length():
    # lengths 2, 1, 2: (2*1 + 1*0 + 2*5) / 5 = 2.4
    assert run(opo, SCORES, **DATA) == near(-1.4, -2.4, 0, 2.6, None, 0)


def test_reinforce_plus_plus_baseline_by_hand_whitens_over_tokens_and_leaves_the_lonely_at_zero():
    # centred tokens -1, -1, -2, 3, 3: mean .4, variance (1.96 + 1.96 + 5.76 + 6.76 + 6.76) / 4 = 5.8, std 2.4083189
    expected = near(-0.5813183, -0.9965457, 0, 1.0795912, None, 0)
    assert run(reinforce_plus_plus_baseline, SCORES, **DATA) == expected


def test_gpg_by_hand_scales_by_the_samples_that_teach():
    # 5 samples take part, 3 of them in a group with unequal rewards: alpha = 5/3
    assert run(gpg, SCORES, **DATA) == near(-5 / 3, -10 / 3, 0, 5, None, 0)
    assert run(gpg, [4.0, 4.0, 1.0, 4.0, 0.0, 9.0], **DATA) == near(0, 0, 0, 0, None, 0)
    # two groups of two, one of them all equal, and one alone: alpha = 5/2
    data = {"group_ids": torch.tensor([1, 1, 2, 2, 2, 3])}
    assert run(gpg, [0.0, 4.0, 1.0, 1.0, 0.0, 9.0], **data) == near(-5, 5, 0, 0, None, 0)


PARTS = torch.tensor([[1.0, 0], [0, 1], [5, 5], [5, 1], [9, 9], [8, 8]])  # group 7: 1, 0, 5 and 0, 1, 1
GDPO = {"reward_parts": PARTS, "score": torch.tensor(SCORES)}


def test_gdpo_by_hand_normalises_each_reward_before_the_sum():
    # 2nd part 0, 1, 1: mean 2/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3, std .5773503: -1.1546985, .5773493, .5773493
    # sum with weights 1, 2 over tokens: -2.6873613 twice, .3987700, 2.2885915 twice
    # mean (2*-2.6873613 + .3987700 + 2*2.2885914) / 5 = -.0797540, deviations -2.6076073, .4785240, 2.3683454
    # variance (2*6.7996160 + .2289852 + 2*5.6090599) / 4 = 6.2615843, std 2.5023158
    expected = near(-1.0420776, 0.1912325, 0, 0.9464615, None, 0)
    assert run(gdpo, SCORES, **BY_STD, **GDPO, reward_weights=(1.0, 2.0)) == expected


def test_what_comes_on_top_of_the_rewards_of_gdpo_is_centred_and_keeps_its_scale():
    parts = torch.tensor([[1.0], [1], [1], [1], [1], [1]])  # teach nothing by themselves
    raw = torch.tensor([1.0, 1, 5, 3, 100, 8])  # R - raw = 0, -1, 0, 2 in group 7 after samples 0, 1, -, 3: mean 1/3
    advantages = {}
    for part_weight in (1.0, 50.0):
        data = BY_STD | {"reward_parts": parts, "reward_weights": (part_weight,), "score": torch.tensor(SCORES)}
        advantages[part_weight] = run(gdpo, SCORES, **data, raw_score=raw)
    # tokens -1/3 twice, -4/3, 5/3 twice: mean .2666667, variance (2*.36 + 2.56 + 2*1.96) / 4 = 1.8, std 1.3416408
    assert advantages[1.0] == near(-0.4472136, -1.1925696, 0, 1.0434984, None, 0)
    assert advantages[50.0] == advantages[1.0]


def test_gdpo_wants_a_weight_for_each_reward():
    for weights, parts in (((), PARTS), ((1.0,), PARTS), ((1.0,), PARTS[:, 0])):
        with pytest.raises(ValueError, match=f"reward_weights has {len(weights)} weights .* needs"):
            run(gdpo, SCORES, **BY_STD, reward_parts=parts, reward_weights=weights, score=torch.tensor(SCORES))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_nothing(value):
    scores = [value] * 6
    exact = [float(torch.tensor(value))] * 6
    for estimator, data in ((grpo, BY_STD), (grpo_passk, BY_STD), (rloo, DATA), (opo, DATA), (gpg, DATA)):
        assert run(estimator, exact, **data) == [0, 0, 0, 0, None, 0]
    assert run(reinforce_plus_plus_baseline, exact, **DATA) == [0, 0, 0, 0, None, 0]
    data = BY_STD | {"reward_parts": torch.tensor([[s] for s in scores]), "score": torch.tensor(exact)}
    assert run(gdpo, exact, **data, reward_weights=(1.0,)) == [0, 0, 0, 0, None, 0]


def test_groups_by_hand():
    groups = Groups.of(torch.tensor([3, -1, 3, 3, 8]), torch.tensor([True, True, True, False, False]))
    x = torch.tensor([1.0, 2.0, 5.0, torch.nan, torch.inf])
    assert groups.total(x).tolist() == [6, 2, 6, 6, 0]
    assert groups.size.tolist() == [2, 1, 2, 2, 0]
    assert groups.compares.tolist() == [True, False, True, False, False]
    assert groups.centred(x).tolist() == [-2, 0, 2, 0, 0]
    assert groups.std(x).tolist() == pytest.approx([8**0.5, 0, 8**0.5, 8**0.5, 0])
    assert groups.highest(x).tolist() == [5, 2, 5, 5, -torch.inf]
    assert groups.differ(x).tolist() == [True, False, True, False, False]
    assert groups.without(torch.tensor([False, False, True, False, False])).highest(x).tolist()[:3] == [1, 2, 1]


@pytest.mark.parametrize("estimator", [grpo, grpo_passk, rloo, opo, gpg, reinforce_plus_plus_baseline])
def test_no_samples_at_all(estimator):
    empty = torch.zeros(0)
    data = CENTRED if estimator in (grpo, grpo_passk) else DATA
    advantages, returns = estimator(empty, empty.bool(), empty.long(), **data | {"group_ids": empty.long()})
    assert (advantages.tolist(), returns.tolist()) == ([], [])
