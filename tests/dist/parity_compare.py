"""When the results of two layouts count as the same: float32 sums in another order, and nothing else.

On a GPU the backward pass of attention adds in no fixed order, and matrix products of other sizes have other kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
from spawn import DEVICE
from torch import Tensor

from megarl.batch import merge_stats

LOOSER = 10.0 if DEVICE == "cuda" else 1.0  # a guess: not run on a GPU
# Relative to the largest entry of a tensor: some twenty roundings.
TOLERANCE = 2e-6 * LOOSER
# An entry of a gradient is a sum of products of numbers that are each off by a few roundings.
GRADIENT_TOLERANCE = 2e-5 * LOOSER


def assert_same_gradient(
    got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = GRADIENT_TOLERANCE
) -> None:
    """Of a tensor whose gradient is small, relative to a hundredth of the largest of all."""
    assert sorted(got) == sorted(expected)
    scale = max(t.abs().max().item() for t in expected.values())
    assert scale > 1e-3, "there is something to compare"
    errors = {name: relative(got[name], t, 1e-2 * scale) for name, t in expected.items()}
    assert not {name: f"{e:.1e}" for name, e in errors.items() if e >= tolerance}


def assert_same_stats(got: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """`got`, `want`: what each rank returned."""
    parts, whole = (merge_stats([rank["stats"] for rank in ranks]) for ranks in (got, expected))
    assert sorted(parts) == sorted(whole)
    for name, stat in whole.items():
        assert parts[name].result() == pytest.approx(stat.result(), rel=1e-5 * LOOSER, abs=1e-6), name


def assert_same_after(got: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Weights after the same number of steps, and the norms of the gradients on the way, before they were clipped."""
    assert got["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5 * LOOSER)
    assert len(set(expected["grad_norms"])) == len(expected["grad_norms"]) > 0, "each step is of another gradient"
    assert sorted(got["after"]) == sorted(expected["after"])
    errors = {name: relative(got["after"][name], t) for name, t in expected["after"].items()}
    assert not {name: f"{e:.1e}" for name, e in errors.items() if e >= tolerance}


def relative(got: Tensor, expected: Tensor, scale: float = 1e-8) -> float:
    return (got - expected).abs().max().item() / max(expected.abs().max().item(), scale)
