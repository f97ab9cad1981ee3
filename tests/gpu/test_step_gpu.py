"""On a real GPU: gradients and an optimizer step in bfloat16 against float32, local layers and Transformer-Engine's."""

from dataclasses import replace
from typing import Any

import pytest
from step_cases import (
    ADAMW,
    FAMILIES,
    GRADIENT_ERROR,
    LOG_PROB_ERROR,
    assert_steps_by_its_gradient,
    gradient_error,
    log_prob_error,
    one_step,
)

from megarl.arch.layout import Layout
from megarl.mcore.models.execution import has_transformer_engine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]
NEEDS_TE = pytest.mark.skipif(not has_transformer_engine(), reason="Transformer-Engine is not installed")


@pytest.fixture(scope="module")
def exact(one_gpu: None, folders: dict[str, str]) -> dict[str, dict[str, Any]]:  # noqa: ARG001
    """Float32 and local layers."""
    return {family: one_step(folder) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def rounded(one_gpu: None, folders: dict[str, str]) -> dict[str, dict[str, Any]]:  # noqa: ARG001
    """Bfloat16 and local layers."""
    return {family: one_step(folder, "bfloat16") for family, folder in folders.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near_float32(exact: Any, rounded: Any, family: str) -> None:
    assert gradient_error(rounded[family], exact[family]) < GRADIENT_ERROR
    assert log_prob_error(rounded[family], exact[family]) < LOG_PROB_ERROR


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_is_the_formula_of_its_gradient(exact: Any, rounded: Any, family: str, dtype: str) -> None:
    assert_steps_by_its_gradient((exact if dtype == "float32" else rounded)[family], dtype)


@NEEDS_TE
@pytest.mark.parametrize("family", FAMILIES)
def test_transformer_engine_is_as_near_to_float32_as_local_layers(
    folders: dict[str, str], exact: Any, rounded: Any, family: str
) -> None:
    """In bfloat16: its attention over packed rows takes no float32."""
    got = one_step(folders[family], "bfloat16", "transformer_engine")
    assert gradient_error(got, exact[family]) < 1.5 * gradient_error(rounded[family], exact[family])
    assert log_prob_error(got, exact[family]) < 1.5 * log_prob_error(rounded[family], exact[family])
    assert_steps_by_its_gradient(got, "bfloat16")


@pytest.mark.parametrize(("dtype", "is_distributed"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_megatrons_adam_on_the_host_makes_the_same_step(
    folders: dict[str, str], dtype: str, *, is_distributed: bool
) -> None:
    on_host = replace(
        ADAMW, override_optimizer_config={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    )
    layout = Layout(use_distributed_optimizer=is_distributed)
    assert_steps_by_its_gradient(one_step(folders["qwen3"], dtype, settings=on_host, layout=layout), dtype)
