"""Divergences from teachers, and the distillation term of the actor's loss with its statistics."""

import math

import pytest
import torch
from divergence_plain import of_probabilities
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo import ActorLoss, NonFiniteError
from megarl.algo.distillation import Distillation
from megarl.algo.divergences import DIVERGENCES, TAIL, make_divergence, with_tail
from megarl.samples.batch import Batch

D = torch.float64
NAMES = tuple(DIVERGENCES)  # of_probabilities has a definition of each
seeds, betas = st.integers(0, 999), st.sampled_from([0.1, 0.5, 0.9])


def logs(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q of two random distributions."""
    g = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(*shape, generator=g, dtype=D) for _ in range(2))
    return p.log_softmax(-1), q.log_softmax(-1)


def value(name: str, log_p: torch.Tensor, log_q: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    return make_divergence(name, beta)(log_p, log_q)[0].sum(-1)


@pytest.mark.parametrize("name", NAMES)
@given(seeds, betas)
def test_values_are_those_of_the_definition_and_never_below_zero(name, seed, beta):
    log_p, log_q = logs(3, 7, seed=seed)
    found = value(name, log_p, log_q, beta)
    torch.testing.assert_close(found, of_probabilities(name, beta, log_p.exp(), log_q.exp()), atol=1e-12, rtol=1e-12)
    assert (found >= 0).all()
    assert value(name, log_p, log_p, beta).abs().max() < 1e-15


@pytest.mark.parametrize("name", NAMES)
@given(seeds, betas)
def test_pulls_give_the_gradient_of_the_logits(name, seed, beta):
    _, log_q = logs(3, 7, seed=seed)
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed), dtype=D, requires_grad=True)
    log_p = logits.log_softmax(-1)
    values, pulls = make_divergence(name, beta)(log_p, log_q)
    (by_autograd,) = torch.autograd.grad(values.sum(), logits)
    by_pulls = (pulls - log_p.exp() * pulls.sum(-1, keepdim=True)).detach()
    torch.testing.assert_close(by_pulls, by_autograd, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@given(seeds, betas, st.integers(1, 9))
def test_top_tokens_and_a_tail_are_a_lower_bound(name, seed, beta, k):
    log_p, log_q = logs(5, 9, seed=seed)
    ids = log_q.topk(k).indices
    found = with_tail(make_divergence(name, beta), log_p.gather(-1, ids), log_q.gather(-1, ids))
    whole = value(name, log_p, log_q, beta)
    assert (found <= whole + 1e-12).all()
    assert (found >= -1e-12).all()
    if k == 9:  # nothing is in the tail
        torch.testing.assert_close(found, whole, atol=1e-12, rtol=1e-9)


def test_a_tail_by_hand():
    log_p, log_q = torch.tensor([[0.5]], dtype=D).log(), torch.tensor([[0.75]], dtype=D).log()
    found = with_tail(make_divergence("reverse_kl", 0.5), log_p, log_q).item()
    tail = (0.5 + TAIL) * math.log((0.5 + TAIL) / (0.25 + TAIL))
    assert found == pytest.approx(0.5 * math.log(0.5 / 0.75) + tail, abs=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_in_an_empty_tail_moves_nothing(name):
    """Float32's sum of these probabilities is 1 up to a few roundings, above it or below."""
    g = torch.Generator().manual_seed(0)
    log_q = torch.randn(64, 8, generator=g).log_softmax(-1)
    log_p = log_q.clone().requires_grad_()
    found = with_tail(make_divergence(name, 0.5), log_p, log_q)
    assert found.abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(found.sum(), log_p)
    # With respect to log p of all tokens, so that the part which a softmax projects out is left out of the comparison.
    moved = gradient - log_p.exp() * gradient.sum(-1, keepdim=True)
    assert moved.abs().max() < 1e-2


TEACHERS = ("math", "code")


def batch(**columns) -> Batch:
    """A prompt's token, three that learn from math, code and nobody, and a masked one."""
    base = {
        "weight": [0.0, 0.2, 0.3, 0.5, 0.0],
        "response_mask": [0.0, 1.0, 1.0, 1.0, 0.0],
        "old_log_probs": [0.0, -1.0, -1.0, -1.0, 0.0],
        "advantages": [0.0, 1.0, -1.0, 2.0, 0.0],
        "distill_weight": [math.nan, 0.5, 2.0, 0.0, math.nan],
    }
    tensors = {name: torch.tensor(c, dtype=D) for name, c in (base | columns).items()}
    tensors["teacher"] = torch.tensor([1, 1, 2, 0, 2])
    return Batch(torch.zeros(5, dtype=torch.int64), torch.tensor([5]), tensors)


def outputs(**columns) -> dict[str, torch.Tensor]:
    log_probs = torch.tensor([0.0, -1.0, -1.0, -1.0, 0.0], dtype=D)
    return {"log_probs": log_probs, "entropy": torch.ones(5, dtype=D)} | columns


def test_the_divergence_counts_with_its_weight_beside_the_policy_loss():
    divergence = torch.tensor([math.nan, 0.4, 0.1, 0.0, math.nan], dtype=D, requires_grad=True)
    loss_fn = ActorLoss("reinforce", distillation=Distillation(teachers=TEACHERS))
    assert loss_fn.outputs == ("log_probs", "entropy", "divergence")
    assert set(loss_fn.columns) >= {"teacher", "distill_weight", "teacher_hidden"}
    out = loss_fn(batch(), outputs(divergence=divergence))
    policy = -(0.2 * 1.0 * -1.0 + 0.3 * -1.0 * -1.0 + 0.5 * 2.0 * -1.0)
    assert out.loss.item() == pytest.approx(policy + 0.2 * 0.5 * 0.4 + 0.3 * 2.0 * 0.1)
    out.loss.backward()
    assert divergence.grad.tolist() == pytest.approx([0.0, 0.2 * 0.5, 0.3 * 2.0, 0.0, 0.0])
    assert out.stats["distill/divergence"].result() == pytest.approx((0.2 * 0.4 + 0.3 * 0.1) / 0.5)
    assert out.stats["distill/math/divergence"].result() == pytest.approx(0.4)
    assert out.stats["distill/code/divergence"].result() == pytest.approx(0.1)
    assert out.stats["distill/code/divergence"].weight == pytest.approx(0.3)
    assert out.stats["actor/pg_loss"].result() == pytest.approx(policy)


def test_over_top_tokens_it_is_the_bound_with_a_tail():
    ours = torch.tensor([[0.0, 0.0], [0.5, 0.25], [0.1, 0.8], [0.0, 0.0], [0.0, 0.0]], dtype=D).log()
    ours[[0, 3, 4]] = 0.0
    theirs = torch.tensor([[1.0, 1.0], [0.5, 0.375], [0.2, 0.8], [1.0, 1.0], [1.0, 1.0]], dtype=D).log()
    ours.requires_grad_()
    loss_fn = ActorLoss("reinforce", distillation=Distillation(top_k=True, teachers=TEACHERS))
    assert loss_fn.outputs[-1] == "log_probs_of_ids"
    assert set(loss_fn.columns) >= {"teacher", "teacher_ids", "teacher_top_log_probs"}
    given = batch()
    given = given.with_columns(teacher_top_log_probs=theirs, advantages=torch.zeros(5, dtype=D))
    out = loss_fn(given, outputs(log_probs_of_ids=ours))
    first = 0.25 * math.log(0.25 / 0.375) + 0.25 * math.log(0.25 / 0.125)
    second = 0.1 * math.log(0.5) + 0.1 * math.log(0.1 / 1e-6)
    assert out.loss.item() == pytest.approx(0.2 * 0.5 * first + 0.3 * 2.0 * second, rel=1e-4)
    (gradient,) = torch.autograd.grad(out.loss, ours)
    assert gradient.isfinite().all()
    assert not gradient[[0, 3, 4]].any()


def test_a_teacher_without_a_token_has_no_statistic():
    given = batch()
    given = given.with_columns(teacher=torch.tensor([1, 1, 0, 0, 2]))
    loss_fn = ActorLoss("reinforce", distillation=Distillation(teachers=TEACHERS))
    out = loss_fn(given, outputs(divergence=torch.ones(5, dtype=D)))
    assert out.stats["distill/math/divergence"].result() == 1.0
    assert "distill/code/divergence" not in out.stats


def test_a_divergence_that_is_not_finite_is_an_error():
    divergence = torch.tensor([0.0, math.inf, 0.1, 0.0, 0.0], dtype=D)
    with pytest.raises(NonFiniteError, match="divergence reverse_kl is inf at token 1"):
        loss_fn = ActorLoss("reinforce", distillation=Distillation(teachers=TEACHERS))
        _ = loss_fn(batch(), outputs(divergence=divergence)).stats


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"divergence": "kl"}, "distill.divergence=kl: expected one of reverse_kl"),
        ({"beta": 0.0}, "distill.beta=0.0: expected a number between 0 and 1"),
        ({"beta": 1.0}, "distill.beta=1.0: expected a number between 0 and 1"),
    ],
)
def test_what_no_divergence_can_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Distillation(**settings)
