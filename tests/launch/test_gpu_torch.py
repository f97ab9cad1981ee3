"""The torch that users of GPUs install: the CPU tests run with another one, whose build for CPUs is small."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(5400)  # some gigabytes are installed
def test_the_fast_tests_pass_with_the_torch_of_the_gpu_lock(tmp_path: Path) -> None:
    (locked,) = re.findall(r"^torch==\S+", (ROOT / "launch/gpu/trainer.txt").read_text(), re.MULTILINE)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "megarl")], check=True)
    constraints = tmp_path / "megarl/launch/constraints.txt"
    constraints.write_text(re.sub(r"^torch==\S+", locked, constraints.read_text(), flags=re.MULTILINE))
    done = subprocess.run(["bash", "launch/test.sh"], cwd=constraints.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    found = subprocess.run(
        [".venv/bin/python", "-c", "import torch; print(torch.__version__.partition('+')[0])"],
        cwd=constraints.parents[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"torch=={found.stdout.strip()}" == locked
