"""The edge of float32's range, where rounding decides."""

import math
from typing import Any

import pytest
import torch

from megarl.samples.float32 import is_finite

LARGEST = torch.finfo(torch.float32).max
HALF_A_STEP = 2.0**103  # numbers that are closer to LARGEST than this round to it


@pytest.mark.parametrize(
    "number", [0.0, -1.5, 3.4e38, LARGEST, -LARGEST, LARGEST + 0.5 * HALF_A_STEP, LARGEST + HALF_A_STEP, 1e300, 5e-324]
)
def test_a_number_is_finite_if_torch_rounds_it_to_one(number: float) -> None:
    for sign in (1.0, -1.0):
        assert is_finite(sign * number) == bool(torch.tensor(sign * number, dtype=torch.float32).isfinite())


def test_what_is_not_finite_stays_so_and_both_kinds_are_among_the_numbers_near_the_edge() -> None:
    assert not any(map(is_finite, (math.nan, math.inf, -math.inf)))
    assert is_finite(LARGEST + 0.5 * HALF_A_STEP) and not is_finite(LARGEST + HALF_A_STEP)


@pytest.mark.parametrize("value", [10**400, -(10**400), "1", None, []])
def test_what_no_float_holds_and_what_is_no_number_is_not_finite(value: Any) -> None:
    assert not is_finite(value)
