"""Every shim and fix is still needed with the installed Megatron, and helps.

Where one of these fails because stock Megatron now does the thing itself, the shim or fix has had its day: remove it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import package_info
from shim_cases import FIXES, SHIMS

import megarl
from megarl.mcore import cpu, fixes

# Defects of 0.16.1 that 0.19.2 no longer has, and their presence checks.
MENDED = {
    "moe_router": "moe_needs_te_gemm",
    "latent_attention": "mla_sees_te_that_is_not_there",
    "fsdp_linears": "fsdp_asks_for_te_that_is_not_there",
}
if package_info.__version__.startswith("0.16.1"):
    MENDED = {}
# What a rank imports, and then the cases.
START = """
import runpy, sys, torch
compiles = torch.compile
import megarl.roles.worker
print(*[name for name in ("torch._inductor.compile_fx", "wandb") if name in sys.modules], torch.compile is compiles)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process of its own: what is done to torch.cuda stays there."""
    out, here = tmp_path_factory.mktemp("shims") / "found.json", Path(__file__).parent
    path = os.pathsep.join([str(Path(megarl.__file__).parents[1]), str(here.parent / "helpers")])
    env = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", START, str(here / "shim_cases.py"), str(out)]
    done = subprocess.run(command, env=env, check=True, timeout=120, stdout=subprocess.PIPE, text=True)
    return json.loads(out.read_text()) | {"started": done.stdout.splitlines()[0]}


@pytest.mark.parametrize(
    ("name", "kind", "error"),
    [(name, kind, error) for kind, table in (("shims", SHIMS), ("fixes", FIXES)) for name, (_, error) in table.items()],
)
def test_a_shim_or_fix_is_needed_where_stock_megatron_is_not_mended_and_helps(
    found: dict[str, Any], name: str, kind: str, error: str
) -> None:
    assert found[f"with {kind}"][name] == ""
    if name in MENDED:
        assert found[f"without {kind}"][name] == ""
        return
    assert found[f"without {kind}"][name], f"stock Megatron does this now: remove it from the {kind}"
    assert re.search(error, found[f"without {kind}"][name])


def test_the_presence_checks_see_the_defects(found: dict[str, Any]) -> None:
    names = [check.__name__ for check, _ in fixes.FIXES]
    assert found["present"] == {name: name not in MENDED.values() for name in names}


def test_activating_twice_is_harmless(found: dict[str, Any]) -> None:
    assert found["twice"]


def test_nothing_is_touched_where_there_is_cuda() -> None:
    modes = torch.overrides._get_current_function_mode_stack  # another test of this process may have left one
    before = torch.cuda.current_device, torch.cuda.Stream, modes()
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        cpu.activate()
    assert (torch.cuda.current_device, torch.cuda.Stream, modes()) == before


def test_without_cuda_a_rank_starts_without_torchs_compiler(found: dict[str, Any]) -> None:
    """Megatron loads it when it is imported: half of the seconds that a rank takes to start."""
    assert found["started"] == "True", "nothing of these is loaded, and torch.compile is torch's"
