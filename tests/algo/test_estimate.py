import math

import algo_reference as ref
import pytest
import torch
from algo_reference import Packed, packs, random_packed
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import NonFiniteError, estimate
from megarl.sample import Batch


def batch_of(lengths, mask, score, group, **columns) -> Batch:
    tensors = {"response_mask": torch.tensor(mask, dtype=torch.float32)}
    tensors |= {name: torch.tensor(c, dtype=torch.float32) for name, c in columns.items()}
    rows = {"score": torch.tensor(score, dtype=torch.float32), "group": torch.tensor(group, dtype=torch.int64)}
    lengths = torch.tensor(lengths, dtype=torch.int64)
    return Batch(torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths, tensors, rows)


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


def test_dr_grpo_leaves_the_std_out():
    batch = batch_of([2, 2], [0, 1, 0, 1], [0.0, 4.0], [0, 0])
    out, _ = estimate(batch, adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    assert out.columns["advantages"].tolist() == [0, -2, 0, 2]


def test_gae_by_hand_whitens_advantages_and_not_returns():
    batch = batch_of([3, 2], [0, 1, 1, 0, 1], [2.0, 4.0], [0, 1], values=[9.0, 1.0, 1.0, 9.0, 1.0])
    out, stats = estimate(batch, adv_estimator="gae")
    assert out.columns["returns"].tolist() == [0, 2, 2, 0, 4]
    # raw advantages 1, 1, 3: mean 5/3, unbiased variance 4/3
    z = [(x - 5 / 3) / math.sqrt(4 / 3) for x in (1, 1, 3)]
    assert out.columns["advantages"].tolist() == pytest.approx([0, z[0], z[1], 0, z[2]], abs=1e-6)
    assert "algorithm/groups_of_one" not in stats


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
    current = stats["actor/reward_kl_penalty"]
    assert (current.result(), current.weight) == (pytest.approx((-0.25 + 0.25) / 2), 2)
    assert stats["actor/reward_kl_penalty_coeff"].result() == 0.1
    out, _ = estimate(batch, adv_estimator="grpo", use_kl_in_reward=True, kl_coef=0.1, kl_penalty="abs")
    assert out.columns["token_level_rewards"].tolist() == pytest.approx([0, -0.05, 0.9, 0, 0, -0.025])


def test_the_current_kl_counts_only_sequences_that_have_one():
    old, base = [0.0, -1.0, 0.0, 0.0], [0.0, -1.5, 0.0, 0.0]
    batch = batch_of([2, 2], [0, 1, 0, 0], [1.0, 0.0], [0, 0], old_log_probs=old, ref_log_probs=base)
    _, stats = estimate(batch, adv_estimator="grpo", use_kl_in_reward=True, kl_coef=0.1)
    current = stats["actor/reward_kl_penalty"]
    assert (current.result(), current.weight) == (0.5, 1)


def test_a_sample_without_a_trainable_token_is_counted_and_left_out_of_its_group():
    batch = batch_of([2, 2, 3], [0, 1, 0, 0, 0, 1, 1], [0.0, 50.0, 4.0], [0, 0, 0])
    out, stats = estimate(batch, adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    assert out.columns["advantages"].tolist() == [0, -2, 0, 0, 0, 2, 2]
    assert stats["algorithm/sequences_without_trainable_token"].result() == 1


def test_groups_without_a_difference_are_counted():
    batch = batch_of([1] * 5, [1] * 5, [0.3, 0.3, 1.0, 0.0, 2.0], [0, 0, 1, 1, 2])
    _, stats = estimate(batch, adv_estimator="grpo")
    assert stats["algorithm/groups_all_equal"].result() == pytest.approx(1 / 3)


def test_advantage_clip():
    batch = batch_of([1] * 3, [1] * 3, [0.0, 0.0, 30.0], [0, 0, 0])
    out, _ = estimate(batch, adv_estimator="grpo", norm_adv_by_std_in_grpo=False, advantage_clip=12.0)
    assert out.columns["advantages"].tolist() == [-10, -10, 12]


@pytest.mark.parametrize("adv_estimator", ["gae", "grpo"])
@pytest.mark.parametrize("lengths", [[], [0], [1], [2, 0]])
def test_nothing_to_train_on_gives_zeros(adv_estimator, lengths):
    n = sum(lengths)
    batch = batch_of(lengths, [0] * n, [1.0] * len(lengths), [0] * len(lengths), values=[math.nan] * n)
    out, _ = estimate(batch, adv_estimator=adv_estimator)
    assert all(out.columns[name].tolist() == [0.0] * n for name in ("advantages", "returns", "token_level_rewards"))


@given(packs, st.sampled_from(["gae", "grpo"]), st.booleans(), st.sampled_from([0.9, 1.0]))
def test_agrees_with_the_slow_reference(packed: Packed, adv_estimator, use_kl, gamma):
    out, _ = estimate(
        packed.batch, adv_estimator=adv_estimator, gamma=gamma, lam=0.9, use_kl_in_reward=use_kl, kl_coef=0.3
    )
    score, groups = (packed.batch.rows[name].tolist() for name in ("score", "group"))
    rewards, advantages, masks = [], [], packed.masks
    for b, mask in enumerate(masks):
        old, base = packed.lists("old_log_probs")[b], packed.lists("ref_log_probs")[b]
        last = max((t for t, m in enumerate(mask) if m), default=None)
        row = [-0.3 * (old[t] - base[t]) if use_kl and m else 0.0 for t, m in enumerate(mask)]
        if last is not None:
            row[last] += score[b]
        rewards.append(row)
    if adv_estimator == "gae":
        for row, v, mask in zip(rewards, packed.lists("values"), masks, strict=True):
            a, _ = ref.gae_sequence(row, v, mask, gamma, 0.9)
            advantages += [x for x, m in zip(a, mask, strict=True) if m]
        advantages = ref.whiten(advantages)
    else:
        part = [b for b, mask in enumerate(masks) if any(mask)]
        relative = ref.grpo_samples([sum(rewards[b]) for b in part], [groups[b] for b in part])
        advantages = [a for a, b in zip(relative, part, strict=True) for _ in range(sum(masks[b]))]
    mask = packed.batch.columns["response_mask"] != 0
    assert out.columns["token_level_rewards"].tolist() == pytest.approx(sum(rewards, []), abs=1e-6)
    # equal rewards up to float32 rounding stand above a std of 1e-6: compare where the groups differ at all
    assert out.columns["advantages"][mask].tolist() == pytest.approx(advantages, rel=1e-4, abs=1e-3)
    assert float(out.columns["advantages"][~mask].abs().sum()) == 0


def test_refusals_are_one_sentence():
    batch = batch_of([1], [1], [0.0], [0])
    with pytest.raises(ValueError, match="adv_estimator='rlo': want one of gae, grpo"):
        estimate(batch, adv_estimator="rlo")
    with pytest.raises(ValueError, match="adv_estimator=gae needs values"):
        estimate(batch, adv_estimator="gae")
    with pytest.raises(ValueError, match="needs the column old_log_probs"):
        estimate(batch, adv_estimator="grpo", use_kl_in_reward=True)
    with pytest.raises(ValueError, match="a reward has none"):
        estimate(batch, adv_estimator="grpo", use_kl_in_reward=True, kl_penalty="k3+")
    with pytest.raises(ValueError, match="score of sequence 0 is nan"):
        estimate(batch.with_rows(score=torch.tensor([math.nan])), adv_estimator="grpo")


def test_a_number_that_is_not_finite_names_its_sequence():
    batch = random_packed([3, 4], 0, poison=False).batch
    broken = batch.columns["values"].clone()
    broken[4] = math.inf
    batch = batch.with_columns(values=broken, response_mask=torch.ones(7))
    with pytest.raises(NonFiniteError, match="values is inf at token 1 of sequence 1"):
        estimate(batch, adv_estimator="gae")
