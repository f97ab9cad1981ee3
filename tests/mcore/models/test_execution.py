"""Engines that contradict themselves are refused, and the others say what Megatron is told."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.mcore.models import execution as engine_module
from megarl.mcore.models.execution import ExecutionOptions

LAYERS = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"strategy": "ddp"}, "strategy=ddp: expected one of megatron, fsdp, none"),
        ({"transformer_impl": "te"}, "transformer_impl=te: expected one of auto, local, transformer_engine"),
        ({"moe_token_dispatcher_type": "allgather"}, "=allgather: expected one of auto, alltoall, flex"),
        ({"recompute_granularity": "all"}, "recompute_granularity=all: expected one of null, selective, full"),
        ({"recompute_method": "first"}, "recompute_method=first: expected one of null, uniform, block"),
        ({"recompute_granularity": "full"}, "recompute_granularity=full: expected recompute_method uniform or block"),
        (LAYERS | {"recompute_num_layers": 0}, "at least 1, has block and 0"),
        ({"recompute_method": "block"}, "recompute_granularity=None: recompute_method=block and .*expected"),
        (LAYERS | {"recompute_granularity": "selective"}, "belong to full; expected null for both"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ExecutionOptions(**settings)


def test_layers_of_this_room_are_the_choice_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "has_transformer_engine", lambda: False)
    off = dict.fromkeys(LAYERS)
    assert ExecutionOptions().transformer_settings() == {"transformer_impl": "local", "moe_grouped_gemm": False} | off
    with pytest.raises(
        ValueError, match="transformer_impl=transformer_engine: there is no GPU; expected auto or local"
    ):
        ExecutionOptions(transformer_impl="transformer_engine").transformer_settings()


def test_why_transformer_engine_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where its compiled part was built for another torch: the package itself is there, and swallows the error."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("try:\n    from . import pytorch\nexcept ImportError:\n    pass\n")
    (package / "pytorch.py").write_text("raise ImportError('undefined symbol:\\n_ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    why = "it cannot be imported (ImportError: undefined symbol: _ZN3c10)"
    assert ExecutionOptions().lacks_transformer_engine == why
    assert not ExecutionOptions(transformer_impl="local").lacks_transformer_engine
    with pytest.raises(ValueError, match=re.escape(f"=transformer_engine: {why}; expected auto or local")):
        ExecutionOptions(transformer_impl="transformer_engine").transformer_settings()
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules.pop(name, None)


def test_float32_is_computed_by_local_layers() -> None:
    """Transformer-Engine's products would round it to 10 bits of fraction."""
    assert ExecutionOptions().for_dtype("float32") == ExecutionOptions(transformer_impl="local")
    assert ExecutionOptions().for_dtype("bfloat16") == ExecutionOptions()
    asked = ExecutionOptions(transformer_impl="transformer_engine")
    assert asked.for_dtype("bfloat16") == asked
    with pytest.raises(ValueError, match="^transformer_impl=transformer_engine: .* TF32, .*; expected dtype=bfloat16"):
        asked.for_dtype("float32")


def test_transformer_engine_is_the_choice_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "has_transformer_engine", lambda: True)
    for engine in (ExecutionOptions(**LAYERS), ExecutionOptions(transformer_impl="transformer_engine", **LAYERS)):
        found = engine.transformer_settings()
        assert found == {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True, **LAYERS}
    assert not ExecutionOptions(transformer_impl="local").uses_transformer_engine


@pytest.mark.parametrize(
    ("ranks", "dtype", "chosen"),
    [
        (1, torch.bfloat16, "alltoall"),  # Megatron's flex dispatcher asserts that there are several
        (8, torch.bfloat16, "flex"),
        (6, torch.bfloat16, "alltoall"),  # DeepEP has no kernels for 6 ranks
        (8, torch.float32, "alltoall"),
    ],
)
def test_tokens_are_dispatched_by_deepep_where_it_fits(ranks, dtype, chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ExecutionOptions().dispatcher(ranks, dtype) == "alltoall"
    monkeypatch.setattr(engine_module, "has_deep_ep", lambda: True)
    assert ExecutionOptions().dispatcher(ranks, dtype) == chosen
    assert ExecutionOptions(moe_token_dispatcher_type="alltoall").dispatcher(ranks, dtype) == "alltoall"
    assert ExecutionOptions(moe_token_dispatcher_type="flex").dispatcher(ranks, dtype) == "flex"


def test_deepep_is_refused_where_it_is_not() -> None:
    with pytest.raises(ValueError, match="moe_token_dispatcher_type=flex: the package deep_ep cannot be imported"):
        ExecutionOptions(moe_token_dispatcher_type="flex").dispatcher(8, torch.bfloat16)


@pytest.mark.parametrize(
    ("size", "gpu", "has_te", "refused"),
    [(2, True, False, True), (2, True, True, False), (2, False, False, False), (1, True, False, False)],
)
def test_context_parallel_on_a_gpu_needs_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, size: int, gpu: bool, has_te: bool, refused: bool
) -> None:
    monkeypatch.setattr(engine_module, "has_transformer_engine", lambda: has_te)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    says = pytest.raises(ValueError, match=r"^context_parallel_size=2: on GPUs it needs") if refused else nullcontext()
    with says:
        ExecutionOptions().check_context_parallel(size)


def test_adapters_get_the_layers_that_they_are_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "has_transformer_engine", lambda: True)
    assert ExecutionOptions(**LAYERS).for_adapters() == ExecutionOptions(transformer_impl="local", **LAYERS)
    with pytest.raises(ValueError, match="adapters need transformer_impl auto or local"):
        ExecutionOptions(transformer_impl="transformer_engine").for_adapters()
