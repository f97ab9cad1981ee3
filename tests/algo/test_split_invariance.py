"""The columns of a step are made once; then any partition has the same loss, gradient and statistics."""

import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import algo_reference as ref
import pytest
import torch
from algo_reference import cut_into_rows, random_packed
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algo import POLICY_LOSSES, ActorLoss, CriticLoss, step_columns
from megarl.algo.correction import Correction, correct, leave_out_old
from megarl.algo.documented.losses import DocumentedLoss
from megarl.algo.registry import PolicyLoss
from megarl.samples.batch import Batch, Stats, merge_stats

LENGTHS = [5, 0, 1, 9, 3, 7, 2, 4, 6, 1]
GROUPS = [0, 0, 0, 1, 2, 2, 2, 2, 5, 5]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
MODES = sorted(ref.AGG_MODES)
NAMES = sorted(ref.POLICY_LOSSES)
# What has no default, and selections of the few tokens that there are here.
ARGS = {
    "dro": {"beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": -1.0, "clip_cov_ub": 1.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
}
KLS = [f"{name}{plus}" for name in (*ref.KL_ESTIMATORS, "full") for plus in ("", "+")]
OUTPUTS = ("log_probs", "entropy", "full_kl", "values")


def documented(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode="token_level", config=None):
    """The documented form, with a term per sequence: the geometric mean of its ratios."""
    lengths = response_mask.sum(1)
    per_sequence = (((log_probs - old_log_probs) * response_mask).sum(1) / lengths).exp().unsqueeze(1)
    loss = -advantages * per_sequence * response_mask
    if loss_agg_mode == "token_level":
        return loss.sum() / lengths.sum(), {"share": (advantages > 0).double().mean()}
    return (loss.sum(1) / lengths).mean(), {"share": (advantages > 0).double().mean()}


@pytest.fixture(autouse=True)
def documented_loss(monkeypatch):
    """One user's loss of the documented form beside the table."""
    monkeypatch.setitem(
        POLICY_LOSSES, "documented", PolicyLoss(DocumentedLoss("documented", documented), per_sequence=True)
    )


class Loss:
    """Actor and critic together, as a function of columns."""

    def __init__(self, policy: str, **kl) -> None:
        kl = kl or {"kl_loss_type": "low_var_kl"}
        how = {"args": ARGS.get(policy, {}), "entropy_coeff": 0.01, "kl_loss_coef": 0.1}
        self.actor = ActorLoss(policy, use_kl_loss=True, use_rollout_weight=True, **how, **kl)
        self.critic = CriticLoss()

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor], Stats]:
        outputs = {n: batch.columns[n].clone().requires_grad_() for n in OUTPUTS}
        actor, critic = self.actor(batch, outputs), self.critic(batch, {"values": outputs["values"] * 1.1})
        (actor.loss + critic.loss).backward()
        return (
            actor.loss.detach() + critic.loss.detach(),
            [torch.zeros_like(x) if x.grad is None else x.grad for x in outputs.values()],
            actor.stats | critic.stats,
        )


def make_step(fn: Loss, mode: str, dtype: torch.dtype, seed: int) -> Batch:
    """Rejection, normalised weights and selection included; the second group of sequences loses a whole one."""
    batch = cut_into_rows(random_packed(LENGTHS, seed, groups=GROUPS, dtype=dtype).batch, seed)
    keep = (torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.8).to(dtype)
    keep[-7:-1] = 0
    batch = batch.with_columns(keep=keep)
    return step_columns(batch, loss=fn.actor, agg_mode=mode, loss_scale_factor=16.0, seed=seed, normalize=True)


def partition(count: int, num_micro_batches: int, seed: int) -> list[list[int]]:
    """A random order of the samples, cut at random places: micro-batches may be empty."""
    rng = random.Random(seed)
    order = rng.sample(range(count), count)
    cuts = sorted(rng.randint(0, count) for _ in range(num_micro_batches - 1))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, count], strict=True)]


def packed_of(fn: Loss, step: Batch) -> Batch:
    """Rows of a sample may part, if the loss looks at its own token only."""
    return step if fn.actor.per_sequence else step.by_row()


def check_random(fn: Loss, step: Batch, num_micro_batches: int, seed: int, dtype: torch.dtype) -> None:
    check(fn, step, partition(packed_of(fn, step).num_sequences, num_micro_batches, seed), dtype)


def check(fn: Loss, step: Batch, micro_batches: list[list[int]], dtype: torch.dtype) -> None:
    packed, (loss, grads, stats) = packed_of(fn, step), fn(step)
    split_loss, split_grads, parts = torch.zeros((), dtype=dtype), [torch.zeros_like(g) for g in grads], []
    where = list(torch.arange(step.num_tokens).split(packed.sample_lengths.tolist()))
    for indices in micro_batches:
        part_loss, part_grads, part_stats = fn(packed.select(indices))
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
        # A mean near 0 of numbers near 1 keeps their rounding.
        assert merged[name].result() == pytest.approx(stat.result(), rel=1e-6, abs=max(1e-9, TOLERANCE[dtype]))


POLICIES = [*NAMES, "documented"]


def in_turn(count: int, choices: Sequence[str]) -> Iterator[str]:
    return islice(cycle(choices), count)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("policy", "mode"),
    [*zip(POLICIES, in_turn(len(POLICIES), MODES), strict=True), *(("gspo", mode) for mode in MODES)],
)
@settings(max_examples=3)
@given(num_micro_batches=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_any_partition_has_the_same_loss_gradient_and_statistics(policy, mode, dtype, num_micro_batches, seed):
    """Every loss, and every aggregation."""
    fn = Loss(policy)
    check_random(fn, make_step(fn, mode, dtype, seed), num_micro_batches, seed, dtype)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=3)
@given(num_micro_batches=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_tokens_that_are_too_old_count_in_no_denominator_of_any_partition(mode, num_micro_batches, seed):
    """The same loss, gradient and statistics as of a step in which nobody had to learn these tokens."""
    fn, batch = Loss("ppo"), random_packed(LENGTHS, seed, groups=GROUPS, dtype=torch.float64).batch
    g = torch.Generator().manual_seed(seed)
    batch = batch.with_columns(versions=torch.randint(0, 8, (batch.num_tokens,), generator=g, dtype=torch.int32))
    young = (batch.columns["versions"] >= 4).double()
    steps = []
    for each, max_age in ((batch, 3), (batch.with_columns(response_mask=batch.columns["response_mask"] * young), None)):
        corrected, _ = correct(leave_out_old(each, version=7, max_age=max_age)[0], Correction("token"), version=7)
        steps.append(step_columns(corrected, loss=fn.actor, agg_mode=mode, loss_scale_factor=16.0))
    one, other = (fn(step) for step in steps)
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert one[2] == other[2]
    check_random(fn, steps[0], num_micro_batches, seed, torch.float64)


@pytest.mark.parametrize(("policy", "kl"), [*zip(in_turn(len(KLS), POLICIES), KLS, strict=True)])
def test_every_kl(policy, kl):
    fn = Loss(policy, kl_loss_type=kl, kl_importance="full" not in kl)
    for seed, num_micro_batches in enumerate((2, 5)):
        step = make_step(fn, "seq-mean-token-mean", torch.float64, seed)
        check_random(fn, step, num_micro_batches, seed, torch.float64)
    assert step.num_sequences < len(step.lengths)
    check(fn, step, [[i] for i in range(packed_of(fn, step).num_sequences)], torch.float64)
