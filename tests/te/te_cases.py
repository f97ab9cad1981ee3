"""Optimizer steps by Transformer-Engine's layers, on ranks that have imported `te_on_cpu`."""

import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from parity_cases import Case, run_case
from saved_tensors import kept_by_a_layer

from megarl.mcore import fixes
from megarl.mcore.models import execution, model
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.models.fusions import fusions


def run_te_cases(cases: Mapping[str, tuple[str, Case]]) -> dict[str, Any]:
    """Name -> (folder, case); in float32, whatever layers a case has."""
    return {name: _run(case.engine, run_case, folder, case) for name, (folder, case) in cases.items()}


def kept_by_te_layers(cases: Mapping[str, tuple[dict[str, Any], ExecutionOptions]]) -> dict[str, float]:
    """Name -> (a model's numbers, engine), and the numbers that a layer keeps of a token."""
    return {name: _run(engine, kept_by_a_layer, hf, engine) for name, (hf, engine) in cases.items()}


def _run(engine: ExecutionOptions, work: Callable[..., Any], *args: Any) -> Any:
    import te_on_cpu  # loaded before Megatron; the tests' own process has Megatron without it

    te_on_cpu.activate()
    with ExitStack() as patches:
        if engine.transformer_impl == "transformer_engine":
            patches.enter_context(te_on_cpu.fused_in_float32())
            patches.enter_context(mock.patch.object(execution, "has_transformer_engine", lambda: True))
            patches.enter_context(mock.patch.object(ExecutionOptions, "for_dtype", lambda self, dtype: self))
            patches.enter_context(mock.patch.object(model, "available_fusions", fusions_of_gpu))
        found = work(*args)
    _free_experts()
    return found


def _free_experts() -> None:
    """A dispatcher holds probabilities, and through their graph Transformer-Engine's functions hold its own model.

    Python cannot collect that circle, and each group of such a model keeps three threads of gloo, which spin.
    """
    for held in gc.get_objects():
        if isinstance(held, MoETokenDispatcher):
            held.probs = None
    gc.collect()


def fixed() -> dict[str, tuple[bool, bool]]:
    """Of each fix for Transformer-Engine: whether its defect is there before, and after."""
    before = {check.__name__: check() for check, _ in fixes.TE_FIXES}
    fixes.apply()
    return {check.__name__: (before[check.__name__], check()) for check, _ in fixes.TE_FIXES}


def fusions_of_gpu(
    *, uses_transformer_engine: bool, latent_attention: bool, fsdp: bool, biases: bool = False, gated: bool = True
) -> dict[str, bool]:
    """Those of a GPU without Apex, but for the sorting of tokens: it is written in Triton."""
    return fusions(
        gpu=True,
        transformer_engine=uses_transformer_engine,
        permutation=False,
        accumulation=False,
        latent_attention=latent_attention,
        biases=biases,
        gated=gated,
    )
