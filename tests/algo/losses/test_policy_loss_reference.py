"""Every policy loss against plain Python per sequence: values, gradients by differences, and the hard places."""

import math

import algo_reference as ref
import pytest
import torch
from algo_reference import Packed, packs, random_packed
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import POLICY_LOSSES
from megarl.algo.hyperparameters import keyword_names
from megarl.algo.segments import clean

D = torch.float64
CASES = [
    ("ppo", {}),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.4, "clip_c": 1.3}),
    ("ppo", {"clip_c": None}),
    ("reinforce", {}),
    ("gpg", {}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.3}),
    ("gmpo", {}),
    ("gmpo", {"clip_low": 0.1, "clip_high": 2.0}),
    ("cispo", {}),
    ("cispo", {"clip_low": 1.0}),
    ("sapo", {}),
    ("sapo", {"tau_pos": 3.0, "tau_neg": 0.5}),
    ("dppo_tv", {}),
    ("dppo_tv", {"clip_low": 0.02, "clip_high": 0.01, "dppo_ratio_cap": 1.1}),
    ("dppo_kl", {}),
    ("dppo_kl", {"clip_low": 0.001, "clip_high": 0.002}),
    ("dro", {"beta": 0.5}),
    ("clip_cov", {}),
    ("kl_cov", {"ppo_kl_coef": 0.7}),
]
IDS = [f"{name}-{'-'.join(hyperparameters)}" for name, hyperparameters in CASES]
NAMES = ("log_probs", "old_log_probs", "advantages")


def run(name, hyperparameters, packed, log_probs=None):
    """(token loss, mask), the columns cleaned as ActorLoss does."""
    batch = packed.batch
    mask = batch.columns["response_mask"] != 0
    col = {n: clean(batch.columns[n], mask) for n in (*NAMES, "selected")}
    if log_probs is not None:
        col["log_probs"] = clean(log_probs, mask)
    extra = {"selected": col["selected"]} if "selected" in keyword_names(POLICY_LOSSES[name].function) else {}
    loss, info = POLICY_LOSSES[name].function(
        *(col[n] for n in NAMES), mask, batch.segment_ids, **extra, **hyperparameters
    )
    assert all(column.shape == mask.shape for column in info.values())
    return loss, mask


def slow_sequences(name, hyperparameters, packed, moved=None):
    """The reference on the trainable tokens of each sequence; `moved`: (sequence, trainable token, change of l)."""
    columns = {n: packed.lists(n) for n in (*NAMES, "selected")}
    out = []
    for b, mask in enumerate(packed.masks):
        new, old, advantages, selected = ([x for x, m in zip(c[b], mask, strict=True) if m] for c in columns.values())
        still = list(new)
        if moved is not None and moved[0] == b:
            new[moved[1]] += moved[2]
        out.append(
            ref.policy_sequence(name, new, old, advantages, selected=selected, constant=still, **hyperparameters)
        )
    return out


@given(packs, st.sampled_from(CASES))
def test_every_loss_agrees_with_the_slow_reference(packed: Packed, case):
    loss, mask = run(*case, packed)
    slow = [x for sequence in slow_sequences(*case, packed) for x in sequence]
    assert loss[mask].tolist() == pytest.approx(slow, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(("name", "hyperparameters"), CASES, ids=IDS)
def test_gradients_agree_with_finite_differences(name, hyperparameters):
    """By differences of the reference with what stands under stop-gradient held still."""
    packed = random_packed([4, 0, 1, 6], 5)
    log_probs = packed.batch.columns["log_probs"].clone().requires_grad_()
    loss, mask = run(name, hyperparameters, packed, log_probs)
    where = clean(loss, mask).sum()
    analytic = torch.autograd.grad(where, log_probs)[0]
    assert analytic[~mask].abs().sum() == 0
    eps, slopes = 1e-6, []
    for b, masks in enumerate(packed.masks):
        for t in range(sum(masks)):
            up, down = (slow_sequences(name, hyperparameters, packed, (b, t, sign * eps)) for sign in (1, -1))
            slopes.append((sum(map(sum, up)) - sum(map(sum, down))) / (2 * eps))
    assert analytic[mask].tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-7)


SMOOTH = [case for case in CASES if case[0] not in ("gspo", "cispo", "dppo_tv", "dppo_kl")]  # no stop-gradient


@pytest.mark.parametrize(("name", "hyperparameters"), SMOOTH, ids=[f"{n}-{'-'.join(k)}" for n, k in SMOOTH])
def test_gradcheck(name, hyperparameters):
    packed = random_packed([4, 3, 6], 8, poison=False)
    log_probs = packed.batch.columns["log_probs"].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clean(*run(name, hyperparameters, packed, x)), (log_probs,))


def test_gspo_has_the_gradient_of_the_sequence_ratio():
    """With one advantage a sequence, GSPO-token is GSPO: the mean over tokens of A exp(mean(l - l_old))."""
    packed = random_packed([5, 3], 2, poison=False)
    advantages = torch.tensor([0.5] * 5 + [-2] * 3, dtype=D)
    batch = packed.batch.with_columns(response_mask=torch.ones(8, dtype=D), advantages=advantages)
    old, new = batch.columns["old_log_probs"], batch.columns["log_probs"].clone().requires_grad_()
    loss, _ = run("gspo", {"clip_low": 1.0, "clip_high": 100.0}, Packed(batch), new)
    means = [part.mean() for part in (new - old).split([5, 3])]
    sequence_level = -0.5 * means[0].exp() + 2 * means[1].exp()
    per_sequence = sum(part.mean() for part in loss.split([5, 3]))
    assert per_sequence.item() == pytest.approx(sequence_level.item())
    ours, theirs = (torch.autograd.grad(x, new, retain_graph=True)[0] for x in (per_sequence, sequence_level))
    assert torch.allclose(ours, theirs)


FAR = [45.0, -45.0, 45.0, -45.0, 0.0]
BOUND = {"ppo": 3.0, "gspo": math.exp(10), "sapo": 4.0, "dro": 1e3}  # else e^20 at most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "hyperparameters"), CASES, ids=IDS)
def test_ratios_up_to_e45_stay_finite(name, hyperparameters, dtype):
    old = torch.tensor([-46.0, -0.5, -46.0, -0.5, -1.0], dtype=dtype)
    log_probs = (old + torch.tensor(FAR, dtype=dtype)).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0], dtype=dtype)
    mask = torch.ones(5, dtype=torch.bool)
    extra = {"selected": mask} if "selected" in keyword_names(POLICY_LOSSES[name].function) else {}
    for segment_ids in (torch.arange(5), torch.zeros(5, dtype=torch.int64)):
        loss, _ = POLICY_LOSSES[name].function(
            log_probs, old, advantages, mask, segment_ids, **extra, **hyperparameters
        )
        (slope,) = torch.autograd.grad(loss.sum(), log_probs)
        assert loss.isfinite().all()
        assert slope.isfinite().all()
        slow = [
            ref.policy_sequence(name, *([x] for x in token), selected=[1.0], **hyperparameters)[0]
            for token in zip(log_probs.tolist(), old.tolist(), advantages.tolist(), strict=True)
        ]
        if segment_ids[-1] == 4:  # each token a sequence
            assert loss.tolist() == pytest.approx(slow, rel=1e-4, abs=1e-5)
            assert loss.abs().max().item() <= max(BOUND.get(name, 0.0), math.exp(20)) * 1.01


@pytest.mark.parametrize(("name", "hyperparameters"), CASES, ids=IDS)
@pytest.mark.parametrize("lengths", [[], [0], [3], [2, 0, 3]])
def test_no_trainable_token_at_all_is_no_trouble(name, hyperparameters, lengths):
    packed = random_packed(lengths, 4)
    batch = packed.batch.with_columns(response_mask=torch.zeros(sum(lengths), dtype=D))
    log_probs = batch.columns["log_probs"].clone().requires_grad_()
    loss, mask = run(name, hyperparameters, Packed(batch), log_probs)
    total = clean(loss, mask).sum()
    total.backward()
    assert total.item() == 0.0
    assert log_probs.grad.tolist() == [0.0] * sum(lengths)
