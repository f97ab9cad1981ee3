"""Every shim and fix is still needed with the installed Megatron, and helps.

Where one of these fails because stock Megatron now does the thing itself, the shim or fix has had its day: remove it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from shim_cases import FIXES, SHIMS

import megarl
from megarl.mcore import cpu, fixes

SHIM_NAMES = [case.__name__ for case in SHIMS]
FIX_NAMES = [case.__name__ for case in FIXES]
NO_CUDA = "CUDA|NVIDIA"  # of a build for CUDA: that there is no driver
WITHOUT = {
    "current_device": NO_CUDA,
    "device_named_cuda": NO_CUDA,
    "type_names": "AssertionError",
    "tensor_cuda": NO_CUDA,
    "pin_memory": "pin|NVIDIA",
    "synchronize": NO_CUDA,
    "generator": NO_CUDA,
    "streams": NO_CUDA,
    "splits_as_numbers": "AssertionError: gloo's all-to-all takes no tensor for its splits",
    "mesh_of_cuda": NO_CUDA,
    "number_of_the_device": NO_CUDA,
    "moe_router": "NameError: name 'te_general_gemm' is not defined",
    "latent_attention": "TypeError: isinstance() arg 2 must be a type",
    "fsdp_linears": "TypeError: isinstance() arg 2 must be a type",
    "adam_state_to_load_into": "AssertionError",
    "adam_state_without_a_step": "KeyError: 'step'",
    "adam_state_outside_no_grad": "a view of a leaf Variable that requires grad",
    "adam_counts_for_each_parameter": "AssertionError: 2 parameters share 1 counter",
    "rope_of_many_sequences": "slices for 16 sequences",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A process of its own: what is done to torch.cuda stays there."""
    out, here = tmp_path_factory.mktemp("shims") / "found.json", Path(__file__).parent
    path = os.pathsep.join([str(Path(megarl.__file__).parents[1]), str(here.parent / "helpers")])
    env = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    env |= {"CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, str(here / "shim_cases.py"), str(out)], env=env, check=True, timeout=120)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", SHIM_NAMES)
def test_a_shim_is_needed_and_helps(found: dict[str, Any], name: str) -> None:
    assert found["without shims"][name], "stock Megatron does this now: remove the shim"
    assert re.search(WITHOUT[name], found["without shims"][name])
    assert found["with shims"][name] == ""


@pytest.mark.parametrize("name", FIX_NAMES)
def test_a_fix_is_needed_and_helps(found: dict[str, Any], name: str) -> None:
    assert found["without fixes"][name], "upstream has mended this: remove the fix"
    assert WITHOUT[name] in found["without fixes"][name]
    assert found["with fixes"][name] == ""


def test_the_presence_checks_see_the_defects(found: dict[str, Any]) -> None:
    assert found["present"] == {check.__name__: True for check, _ in fixes.FIXES}


def test_activating_twice_is_harmless(found: dict[str, Any]) -> None:
    assert found["twice"]


def test_nothing_is_touched_where_there_is_cuda() -> None:
    modes = torch.overrides._get_current_function_mode_stack  # another test of this process may have left one
    before = torch.cuda.current_device, torch.cuda.Stream, modes()
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        cpu.activate()
    assert (torch.cuda.current_device, torch.cuda.Stream, modes()) == before


def test_without_cuda_a_rank_starts_without_torchs_compiler() -> None:
    """Megatron loads it when it is imported: half of the seconds that a rank takes to start."""
    script = """
        import sys, torch
        compiles = torch.compile
        import megarl.roles.worker
        assert torch.compile is compiles
        print(*[name for name in ("torch._inductor.compile_fx", "wandb") if name in sys.modules])
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    assert not subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()
