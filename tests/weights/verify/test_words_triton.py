"""The kernel that hashes words, without a GPU: by Triton's interpreter, and compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def run(interpret: str, cache: Path) -> Any:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(ROOT / "tests/helpers/words_cases.py")]
    env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_kernel_hashes_as_torchs_operations_do(tmp_path: Path) -> None:
    cases = run("1", tmp_path)
    assert len(cases) == 8
    for sizes, (by_kernel, by_torch) in cases.items():
        assert by_kernel == by_torch, sizes


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    assert run("0", tmp_path) > 1000
