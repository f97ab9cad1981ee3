"""Learning rates by hand, and Megatron's optimizers against their formulas."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizer_cases import all_steps
from spawn import run_ranks

from megarl.mcore.training.optimizer import OptimSettings, learning_rate

NEVER = 1e9  # a norm at which nothing is clipped
ADAM = OptimSettings("adamw", lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5, max_grad_norm=NEVER)
SGD = OptimSettings("sgd", lr=0.1, weight_decay=0.5, momentum=0.9, max_grad_norm=NEVER)
START, IS_MATRIX = [1.0, -2.0, 3.0], [True, True, False]
GRADIENTS = [[0.3, -4.0, 1.0], [-0.2, -1.0, 0.5], [0.1, 2.0, 0.0]]
CASES: dict[str, Any] = {
    "adamw": (ADAM, GRADIENTS, "float32", False),
    "adamw, sharded": (ADAM, GRADIENTS, "float32", True),
    "sgd": (SGD, [[0.3, -4.0, 1.0]] * 2, "float32", False),
    "clipped": (replace(SGD, lr=1.0, weight_decay=0.0, max_grad_norm=1.0), [[3.0, 0.0, 4.0]], "float32", False),
    "not clipped": (replace(SGD, lr=1.0, weight_decay=0.0, max_grad_norm=6.0), [[3.0, 0.0, 4.0]], "float32", False),
    "warm-up": (replace(SGD, lr=1.0, weight_decay=0.0, momentum=0.0, lr_warmup_steps=2), [[1.0, 0.0, 0.0]] * 3,
                "float32", False),
    "bf16": (replace(SGD, lr=1e-4, weight_decay=0.0, momentum=0.0), [[1.0, 1.0, 1.0]] * 40, "bfloat16", False),
    "bf16, sharded": (replace(ADAM, lr=1e-4, weight_decay=0.0), [[1.0, 1.0, 1.0]] * 40, "bfloat16", True),
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return run_ranks(1, all_steps, CASES)[0]


def rates(num_steps: int, **settings: Any) -> list[float]:
    return [learning_rate(OptimSettings(lr=1.0, **settings), step) for step in range(num_steps)]


def test_learning_rates_by_hand() -> None:
    assert rates(3) == [1, 1, 1]
    assert rates(5, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1]
    assert rates(6, lr_warmup_steps=2, lr_decay_style="linear", lr_decay_steps=4) == [0.5, 1, 1, 0.5, 0, 0]
    assert rates(4, lr_decay_style="linear", lr_decay_steps=2, min_lr=0.2) == pytest.approx([1, 0.6, 0.2, 0.2])
    half = math.sqrt(0.5)
    cosine = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0]
    assert rates(6, lr_decay_style="cosine", lr_decay_steps=4) == pytest.approx(cosine)
    assert rates(6, lr_decay_style="cosine", lr_decay_steps=4, min_lr=0.5)[2] == pytest.approx(0.75)


@given(
    st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 5), st.integers(1, 20), st.floats(0, 1),
)  # fmt: skip
def test_a_rate_climbs_to_its_peak_and_never_leaves_its_bounds(
    style: str, warmup: int, decay: int, min_lr: float
) -> None:
    found = rates(30, lr_warmup_steps=warmup, lr_decay_style=style, lr_decay_steps=warmup + decay, min_lr=min_lr)
    assert found[warmup] == pytest.approx(1.0)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    assert all(min_lr - 1e-12 <= rate <= 1 for rate in found[warmup:])
    if style != "constant":
        assert found[-1] == pytest.approx(min_lr)


def adamw(gradients: list[list[float]], s: OptimSettings) -> list[list[float]]:
    """Loshchilov and Hutter (arXiv:1711.05101), algorithm 2, number by number; scales and biases do not decay."""
    w, m, v, out = list(START), [0.0] * 3, [0.0] * 3, []
    for t, gradient in enumerate(gradients, start=1):
        for i, g in enumerate(gradient):
            m[i] = s.betas[0] * m[i] + (1 - s.betas[0]) * g
            v[i] = s.betas[1] * v[i] + (1 - s.betas[1]) * g * g
            step = m[i] / (1 - s.betas[0] ** t) / (math.sqrt(v[i] / (1 - s.betas[1] ** t)) + s.eps)
            w[i] -= s.lr * (step + (s.weight_decay * w[i] if IS_MATRIX[i] else 0.0))
        out.append(list(w))
    return out


@pytest.mark.parametrize("case", ["adamw", "adamw, sharded"])
def test_adamw_is_its_formula(found: dict[str, Any], case: str) -> None:
    for got, expected in zip(found[case]["weights"], adamw(GRADIENTS, ADAM), strict=True):
        assert got == pytest.approx(expected, rel=2e-6)


def test_sgd_with_momentum_by_hand(found: dict[str, Any]) -> None:
    first, second = found["sgd"]["weights"]
    # d = 0.3 + 0.5 * 1 = 0.8, and -4 + 0.5 * -2 = -5; the scale does not decay.
    assert first == pytest.approx([1 - 0.08, -2 + 0.5, 3 - 0.1])
    # d = 0.3 + 0.46 = 0.76 and -4.75; the buffer 0.9 * 0.8 + 0.76 = 1.48 and -9.25; of the scale 1.9.
    assert second == pytest.approx([0.92 - 0.148, -1.5 + 0.925, 2.9 - 0.19])


def test_a_gradient_is_clipped_to_the_norm_of_all_parameters(found: dict[str, Any]) -> None:
    assert found["clipped"]["norms"] == pytest.approx([5.0]), "what is returned is the norm before clipping"
    assert found["clipped"]["weights"][0] == pytest.approx([1 - 0.6, -2, 3 - 0.8])
    assert found["not clipped"]["norms"] == pytest.approx([5.0])
    assert found["not clipped"]["weights"][0] == pytest.approx([1 - 3, -2, 3 - 4])


def test_the_schedule_drives_the_steps(found: dict[str, Any]) -> None:
    assert found["warm-up"]["rates"] == [0.5, 1.0, 1.0]
    assert [w[0] for w in found["warm-up"]["weights"]] == pytest.approx([0.5, -0.5, -1.5])


@pytest.mark.parametrize("case", ["bf16", "bf16, sharded"])
def test_bf16_weights_move_by_steps_smaller_than_their_spacing(found: dict[str, Any], case: str) -> None:
    weights = [w[0] for w in found[case]["weights"]]
    # Below 1, bf16 numbers are 1/256 apart: 40 steps of 1e-4 make one, because float32 copies hold the sum.
    assert weights[0] == 1.0
    assert weights[-1] == 1 - 1 / 256
