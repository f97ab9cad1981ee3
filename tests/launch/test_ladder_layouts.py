"""Each layout of the ladder for eight GPUs is one that Megatron's configuration takes where there are GPUs."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from tiny_models import tiny_model

from megarl.layout import Layout
from megarl.mcore.models.model import transformer_config
from megarl.mcore.training.execution import ExecutionOptions

TESTS = Path(__file__).parents[1]


def module(file: str) -> ModuleType:
    """A file of tests, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"ladder_{Path(file).stem}", TESTS / file)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str((TESTS / file).parent), *sys.path]):
        spec.loader.exec_module(found)
    return found


def layouts() -> dict[str, tuple[str, Layout, ExecutionOptions]]:
    """Name -> the family, the layout and how it is computed."""
    parity, engine = module("dist/test_parity.py"), module("dist/test_engine.py")
    found = {
        f"parity/{name}": ("qwen3", layout, ExecutionOptions())
        for sizes in (parity.SHALLOW, parity.UNTIED, parity.DEEP, parity.NARROWED)
        for of_size in sizes.values()
        for name, layout in of_size.items()
    }
    for file in ("dist/test_expert_parity.py", "gpu/test_layouts_gpu.py"):
        for family, sizes in module(file).LAYOUTS.items():
            for of_size in sizes.values():
                found |= {
                    f"{file}/{family}/{name}": (family, layout, ExecutionOptions()) for name, layout in of_size.items()
                }
    return found | {
        f"engine/{name}": ("qwen3_moe" if "experts" in case.folder else "qwen3", case.layout, case.engine)
        for name, case in (engine.ON_TWO | engine.ON_FOUR).items()
    }


LAYOUTS = layouts()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_layout_can_be_built_where_there_are_gpus(name: str, dtype: torch.dtype) -> None:
    family, layout, engine = LAYOUTS[name]
    sizes = {"num_hidden_layers": 8} if family == "qwen3" else {}
    hf = tiny_model(family, tied=False, **sizes).config.to_dict()
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        config = transformer_config(hf, layout, dtype, engine)
    assert config.context_parallel_size == layout.cp
