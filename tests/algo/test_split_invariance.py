"""The weights are made once; then any partition into micro-batches has the same loss, gradient and statistics."""

import random

import pytest
import torch
from algo_reference import random_packed
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algo import AGG_MODES, POLICY_LOSSES, ActorLoss, CriticLoss, token_weights
from megarl.sample import Batch, Stats, merge_stats

LENGTHS = [5, 0, 1, 9, 3, 7, 2, 4, 6, 1]
GROUPS = [0, 0, 0, 1, 2, 2, 2, 2, 5, 5]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


class Loss:
    """Actor and critic together, as a function of columns."""

    def __init__(self, policy: str) -> None:
        self.actor = ActorLoss(policy, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
        self.critic = CriticLoss()

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor], Stats]:
        outputs = {n: batch.columns[n].clone().requires_grad_() for n in ("log_probs", "entropy", "values")}
        actor, critic = self.actor(batch, outputs), self.critic(batch, {"values": outputs["values"] * 1.1})
        (actor.loss + critic.loss).backward()
        return (
            actor.loss.detach() + critic.loss.detach(),
            [x.grad for x in outputs.values()],
            actor.stats | critic.stats,
        )


def make_step(mode: str, dtype: torch.dtype, seed: int) -> Batch:
    batch = random_packed(LENGTHS, seed, groups=GROUPS, dtype=dtype).batch
    mask = batch.columns["response_mask"]
    weight = token_weights(mode, mask, batch.segment_ids, group_ids=batch.rows["group"], loss_scale_factor=16.0)
    return batch.with_columns(weight=weight)


def partition(num_micro_batches: int, seed: int) -> list[list[int]]:
    """A random order of the sequences, cut at random places: micro-batches may be empty."""
    rng = random.Random(seed)
    order = rng.sample(range(len(LENGTHS)), len(LENGTHS))
    cuts = sorted(rng.randint(0, len(LENGTHS)) for _ in range(num_micro_batches - 1))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(LENGTHS)], strict=True)]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("mode", AGG_MODES)
@pytest.mark.parametrize("policy", sorted(POLICY_LOSSES))
@settings(max_examples=5)
@given(st.integers(1, 8), st.integers(0, 10**6))
def test_any_partition_has_the_same_loss_gradient_and_statistics(policy, mode, dtype, num_micro_batches, seed):
    fn, step = Loss(policy), make_step(mode, dtype, seed)
    loss, grads, stats = fn(step)

    split_loss, split_grads, parts = torch.zeros((), dtype=dtype), [torch.zeros_like(g) for g in grads], []
    where = list(torch.arange(step.num_tokens).split(LENGTHS))
    for indices in partition(num_micro_batches, seed):
        part_loss, part_grads, part_stats = fn(step.select(indices))
        split_loss += part_loss
        parts.append(part_stats)
        if indices:
            places = torch.cat([where[i] for i in indices])
            for total, g in zip(split_grads, part_grads, strict=True):
                total[places] += g

    tolerance = TOLERANCE[dtype] * max(1.0, float(step.columns["weight"].sum()))
    assert float(split_loss) == pytest.approx(float(loss), abs=tolerance)
    for a, b in zip(split_grads, grads, strict=True):
        assert torch.allclose(a, b, rtol=TOLERANCE[dtype], atol=tolerance)
    merged = merge_stats(parts)
    assert merged.keys() == stats.keys()
    for name, stat in stats.items():
        assert merged[name].kind == stat.kind
        assert merged[name].result() == pytest.approx(stat.result(), rel=1e-6, abs=1e-9)


def test_the_documented_way_of_dividing_inside_each_micro_batch_would_not_pass():
    """What the weights are for: token-mean made anew in every micro-batch is another objective."""
    fn, step = Loss("ppo"), make_step("token-mean", torch.float64, 3)
    loss = float(fn(step)[0])
    halves = []
    for indices in ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9]):
        half = step.select(indices)
        mask = half.columns["response_mask"]
        halves.append(float(fn(half.with_columns(weight=token_weights("token-mean", mask, half.segment_ids)))[0]))
    assert abs(sum(halves) / 2 - loss) > 1e-3
