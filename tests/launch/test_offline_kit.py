"""The kit for a machine without an index: what it holds, and that it installs from its own wheels alone."""

from pathlib import Path

import offline_kit
import pytest

# As a machine for GPUs comes: torch, and most of what goes with it.
HAVE = (
    "torch,triton,transformers,tokenizers,safetensors,pyarrow,aiohttp,httpx,rich,matplotlib,psutil,einops,pytest,numpy"
)
PINS = """\
datasets==5.2.0           # via -r -
dill==0.4.1               # via datasets, multiprocess
filelock==4.2             # via datasets, torch
multiprocess==0.70        # via datasets
nvidia-nccl-cu13==2.29    # via torch
numpy==2.4.6              # via -r -, datasets, torch
torch==2.13.0             # via -r -
"""


def test_what_only_packages_need_that_are_there_is_left_out() -> None:
    assert offline_kit.lacking(PINS, ["torch", "NumPy"]) == {
        "datasets": "datasets==5.2.0",
        "dill": "dill==0.4.1",
        "filelock": "filelock==4.2",
        "multiprocess": "multiprocess==0.70",
    }
    assert "nvidia-nccl-cu13" in offline_kit.lacking(PINS, [])


@pytest.mark.full
@pytest.mark.parametrize("python", [pytest.param("3.11", marks=pytest.mark.full), "3.12"])
def test_a_kit_names_what_a_machine_with_torch_lacks(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert offline_kit.main(["kit", "--python", python, "--have", HAVE, "--list"]) == 0
    names = {line.partition("==")[0] for line in capsys.readouterr().out.split()}
    assert {"megatron-core", "hydra-core", "omegaconf", "antlr4-python3-runtime", "datasets", "pebble"} <= names
    assert {"math-verify", "latex2sympy2-extended", "dill", "multiprocess"} <= names
    assert not names & set(HAVE.split(",")) and not any(name.startswith("nvidia") for name in names)


def test_a_machine_is_told_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = tmp_path / "requirements.txt"
    asked.write_text("\n".join(offline_kit.requirements([])))
    assert offline_kit.main(["--check", str(asked)]) == 0
    assert capsys.readouterr().out == "megarl has what it needs\n"
    asked.write_text("torch>=99\nno-such-package>=1\nneither>=1; platform_system == 'Windows'\n")
    assert offline_kit.main(["--check", str(asked)]) == 1
    old, missing = capsys.readouterr().out.splitlines()
    assert old.startswith("torch 2.") and old.endswith("is installed; expected torch>=99")
    assert missing == "no-such-package is not installed; expected no-such-package>=1"


@pytest.mark.full
def test_the_wheels_of_a_kit_are_few_and_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offline_kit.main([str(tmp_path / "kit"), "--python", "3.12", "--have", HAVE]) == 0
    wheels = list((tmp_path / "kit").glob("*.whl"))
    listed = (tmp_path / "kit" / offline_kit.LISTING).read_text().splitlines()
    assert listed[0] == "python 3.12" and len(listed) == len(wheels) + 1
    assert sum(wheel.stat().st_size for wheel in wheels) < 60 * 2**20
    assert f"{len(wheels)} wheels" in capsys.readouterr().out
