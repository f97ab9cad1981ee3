"""The Triton kernels without a GPU: Triton's interpreter runs them as torch's operations would, and they compile."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def run(interpret: str, cache: Path) -> dict[str, Any]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TRITON_INTERPRET": interpret, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(ROOT / "tests/helpers/triton_cases.py")]
    env["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    return run("1", tmp_path_factory.mktemp("triton"))


@pytest.mark.full
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter takes more than the compiler does."""
    sizes = run("0", tmp_path)
    assert len(sizes) == 8
    assert min(sizes.values()) > 1000


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_give_what_torch_gives(cases: dict[str, dict[str, float]], dtype: str) -> None:
    mine = {name: case for name, case in cases.items() if name.startswith(dtype)}
    assert len(mine) == 8
    for name, case in mine.items():
        assert case["statistics"] < 2e-6, name
        # A gradient in bf16 may fall to the other side of a rounding, which is 2^-7 of it at most.
        assert case["gradient"] < (2e-6 if dtype == "float32" else 1e-2), name
        assert case["padding"] == 0, name


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_logit_that_is_not_finite_shows_in_its_token(cases: dict[str, dict[str, float]], bad: str) -> None:
    assert cases[f"not finite {bad}"] == {"0": 1, "1": 0, "2": 1}


def test_sums_that_nobody_asked_for_are_left_out(cases: dict[str, dict[str, float]]) -> None:
    assert cases["few"] == {"unwanted": 0}
