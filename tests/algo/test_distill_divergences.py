import math

import pytest
import torch
from divergence_plain import of_probabilities
from hypothesis import given
from hypothesis import strategies as st

from megarl.algo.divergences import DIVERGENCES, TAIL, make_divergence, with_tail

D = torch.float64
NAMES = ("reverse_kl", "forward_kl", "jsd")
seeds, betas = st.integers(0, 999), st.sampled_from([0.1, 0.5, 0.9])


def logs(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log p and log q of two random distributions."""
    g = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(*shape, generator=g, dtype=D) for _ in range(2))
    return p.log_softmax(-1), q.log_softmax(-1)


def value(name: str, log_p: torch.Tensor, log_q: torch.Tensor, beta: float = 0.5) -> torch.Tensor:
    return make_divergence(name, beta)(log_p, log_q)[0].sum(-1)


def test_every_divergence_is_tested():
    assert tuple(DIVERGENCES) == NAMES


def test_two_tokens_by_hand():
    log_p, log_q = torch.tensor([0.75, 0.25], dtype=D).log(), torch.tensor([0.5, 0.5], dtype=D).log()
    assert value("reverse_kl", log_p, log_q).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert value("forward_kl", log_p, log_q).item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    # beta = 0.2: m = 0.2 q + 0.8 p = (0.7, 0.3)
    teachers = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    policys = 0.75 * math.log(0.75 / 0.7) + 0.25 * math.log(0.25 / 0.3)
    assert value("jsd", log_p, log_q, 0.2).item() == pytest.approx(0.2 * teachers + 0.8 * policys)


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


@given(seeds)
def test_jsd_approaches_the_two_kls_and_is_symmetric_and_bounded_in_the_middle(seed):
    log_p, log_q = logs(4, 9, seed=seed)
    for beta, share, name in ((1e-8, 1e-8, "forward_kl"), (1 - 1e-8, 1e-8, "reverse_kl")):
        torch.testing.assert_close(
            value("jsd", log_p, log_q, beta) / share, value(name, log_p, log_q), rtol=1e-2, atol=1e-6
        )
    torch.testing.assert_close(value("jsd", log_p, log_q), value("jsd", log_q, log_p))
    assert (value("jsd", log_p, log_q) <= math.log(2)).all()


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
