"""What the tests of a step on a GPU compare, on a CPU: bfloat16 against float32, and AdamW's formula."""

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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_families(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(family, marks=pytest.mark.full) for family in FAMILIES if family != "qwen3")]
)
def test_bfloat16_is_near_float32_and_steps_by_its_gradient(folders: dict[str, str], family: str) -> None:
    """And a step by another gradient is noticed."""
    exact, rounded = run_ranks(1, steps_of, folders[family], *WAYS)[0]
    assert 0 < gradient_error(rounded, exact) < GRADIENT_ERROR
    assert 0 < log_prob_error(rounded, exact) < LOG_PROB_ERROR
    assert_steps_by_its_gradient(exact, "float32")
    assert_steps_by_its_gradient(rounded, "bfloat16")
    with pytest.raises(AssertionError):
        assert_steps_by_its_gradient(rounded | {"gradient": exact["gradient"], "norm": exact["norm"]}, "float32")
