"""The layouts of the ladder for eight GPUs, from the files of tests that its rungs run."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tiny_models import tiny_model

from megarl.arch.hf_config import completed
from megarl.arch.layout import Layout
from megarl.mcore.models.execution import ExecutionOptions

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
        f"parity/{kind}/{name}": ("qwen3", layout, ExecutionOptions())
        for kind in ("SHALLOW", "DEEP", "SHARDED")  # other tables have the same layouts
        for of_size in getattr(parity, kind).values()
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
        if "untied" not in name  # nor does a head change what is built
    }


def config_of(family: str) -> dict[str, Any]:
    """The config.json of a tiny model that each of its layouts divides."""
    sizes = {"num_hidden_layers": 8} if family == "qwen3" else {}
    return completed(tiny_model(family, tied=False, **sizes).config.to_dict())
