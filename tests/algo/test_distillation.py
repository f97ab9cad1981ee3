"""The distillation term of the actor's loss and its statistics, by hand."""

import math

import pytest
import torch

from megarl.algo import ActorLoss, NonFiniteError
from megarl.algo.distillation import Distillation
from megarl.batch import Batch

D = torch.float64
NAMES = ("math", "code")


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
    loss_fn = ActorLoss("reinforce", distillation=Distillation(teachers=NAMES))
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
    loss_fn = ActorLoss("reinforce", distillation=Distillation(top_k=True, teachers=NAMES))
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
    out = ActorLoss("reinforce", distillation=Distillation(teachers=NAMES))(
        given, outputs(divergence=torch.ones(5, dtype=D))
    )
    assert out.stats["distill/math/divergence"].result() == 1.0
    assert "distill/code/divergence" not in out.stats


def test_a_divergence_that_is_not_finite_is_an_error():
    divergence = torch.tensor([0.0, math.inf, 0.1, 0.0, 0.0], dtype=D)
    with pytest.raises(NonFiniteError, match="divergence reverse_kl is inf at token 1"):
        ActorLoss("reinforce", distillation=Distillation(teachers=NAMES))(batch(), outputs(divergence=divergence))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"divergence": "kl"}, "distill.divergence=kl: expected one of reverse_kl, forward_kl, jsd"),
        ({"beta": 0.0}, "distill.beta=0.0: expected a number between 0 and 1, both excluded"),
        ({"beta": 1.0}, "distill.beta=1.0: expected a number between 0 and 1, both excluded"),
    ],
)
def test_what_no_divergence_can_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Distillation(**settings)
