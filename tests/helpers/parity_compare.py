"""When the results of two layouts count as the same: float32 sums in another order, and nothing else.

On a GPU the backward pass of attention adds in no fixed order, and matrix products of other sizes have other kernels.
"""

from typing import Any

import pytest
import torch
from spawn import DEVICE
from torch import Tensor

from megarl.samples.batch import merge_stats

LOOSER = 10.0 if DEVICE == "cuda" else 1.0  # a guess: not run on a GPU
# Relative to the largest entry of a tensor: some twenty roundings.
TOLERANCE = 2e-6 * LOOSER
# An entry of a gradient is a sum of products of numbers that are each off by a few roundings.
GRADIENT_TOLERANCE = 2e-5 * LOOSER
Ranks = list[dict[str, Any]]  # what each rank returned


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    wrong = [n for n in expected if got[n].dtype != expected[n].dtype or not torch.equal(got[n], expected[n])]
    assert not wrong, f"{len(wrong)} of {len(expected)} differ: {wrong[:3]}"


def assert_same_gradient(
    got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = GRADIENT_TOLERANCE
) -> None:
    """Of a tensor whose gradient is small, relative to a hundredth of the largest of all.  NaN is never the same."""
    assert sorted(got) == sorted(expected)
    scale = max(t.abs().max().item() for t in expected.values())
    assert scale > 1e-3, "there is something to compare"
    errors = {name: relative(got[name], t, 1e-2 * scale) for name, t in expected.items()}
    assert not {name: f"{e:.1e}" for name, e in errors.items() if not e < tolerance}


def assert_same_stats(got: Ranks, expected: Ranks) -> None:
    parts, whole = (merge_stats([rank["stats"] for rank in ranks]) for ranks in (got, expected))
    assert sorted(parts) == sorted(whole)
    for name, stat in whole.items():
        assert parts[name].result() == pytest.approx(stat.result(), rel=1e-5 * LOOSER, abs=1e-6), name


def assert_same_after(
    got: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE, *, of_norms: float = 1e-5 * LOOSER
) -> None:
    """Weights after the same number of steps, and the norms of the gradients on the way, before they were clipped."""
    assert got["grad_norms"] == pytest.approx(expected["grad_norms"], rel=of_norms)
    assert len(set(expected["grad_norms"])) == len(expected["grad_norms"]) > 0, "each step is of another gradient"
    assert sorted(got["after"]) == sorted(expected["after"])
    errors = {name: relative(got["after"][name], t) for name, t in expected["after"].items()}
    assert not {name: f"{e:.1e}" for name, e in errors.items() if not e < tolerance}


def assert_same_columns(
    got: Ranks, expected: Ranks, lengths: Tensor, tolerance: float = TOLERANCE, *, of_after: float | None = None
) -> None:
    """`lengths`: of the rows of the batch.  One rank has them all where they are expected.  `of_after`: of "after"."""
    (reporter,) = [rank for rank in expected if rank["columns"]]
    for name in reporter["columns"]:
        whole, found = by_row(expected, name, lengths), by_row(got, name, lengths)
        assert sorted(found) == sorted(whole) == list(range(len(lengths)))
        for row, column in whole.items():
            error = (found[row] - column).abs().max().item()
            limit = of_after if of_after and name == "after" else tolerance
            assert error < limit * max(1.0, column.abs().max().item()), f"{name} of row {row}: {error:.1e}"


def by_row(ranks: Ranks, name: str, lengths: Tensor) -> dict[int, Tensor]:
    """A column, from all ranks that have it: of each row of the batch."""
    return {
        row: part
        for rank in ranks
        if rank["columns"]
        for row, part in zip(
            rank["indices"], rank["columns"][name].split(lengths[rank["indices"]].tolist()), strict=True
        )
    }


def relative(got: Tensor, expected: Tensor, scale: float = 1e-8) -> float:
    return (got - expected).abs().max().item() / max(expected.abs().max().item(), scale)
