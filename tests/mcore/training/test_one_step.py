"""What the tests of a step on a GPU compare, on a CPU: bfloat16 against float32, and AdamW's formula."""

from __future__ import annotations

from typing import Any

import pytest
from spawn import run_ranks
from step_cases import (
    FAMILIES,
    GRADIENT_ERROR,
    LOG_PROB_ERROR,
    assert_steps_by_its_gradient,
    gradient_error,
    log_prob_error,
    steps_of,
    write_families,
)

WAYS = (("float32", "local"), ("bfloat16", "local"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folders = write_families(tmp_path_factory.mktemp("families"))
    return {family: run_ranks(1, steps_of, folder, *WAYS)[0] for family, folder in folders.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near_float32_and_steps_by_its_gradient(found: Any, family: str) -> None:
    exact, rounded = found[family]
    assert 0 < gradient_error(rounded, exact) < GRADIENT_ERROR
    assert 0 < log_prob_error(rounded, exact) < LOG_PROB_ERROR
    assert_steps_by_its_gradient(exact, "float32")
    assert_steps_by_its_gradient(rounded, "bfloat16")


def test_a_step_by_another_gradient_is_noticed(found: Any) -> None:
    exact, rounded = found["qwen3"]
    with pytest.raises(AssertionError):
        assert_steps_by_its_gradient(rounded | {"gradient": exact["gradient"], "norm": exact["norm"]}, "float32")
