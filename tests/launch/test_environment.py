"""The scripts that make environments, with a stand-in for Python: what is installed, shown and kept."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOISE = "WARNING: a mirror has not got it"

# `FAILS`: a word of the installation that fails.
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    --version) echo Python 3.12.0 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/activate" ;;
    "-m pip install "*)
        echo "{NOISE}" >&2
        case " $* " in *" ${{FAILS:-nothing}} "*) echo "ERROR: no matching distribution"; exit 1 ;; esac ;;
esac
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    shutil.copy(ROOT / "setup.py", tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(repository: Path, command: str, fails: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": str(repository / "python"), "FAILS": fails}
    return subprocess.run(["bash", "-c", command], cwd=repository, env=env, capture_output=True, text=True, timeout=60)


COMMANDS = {
    ".venv": ". launch/environment.sh; make_environment",
    ".venv-sglang": "bash launch/sglang_cpu.sh",
    ".venv-sglang-0.5.17": "bash launch/sglang_cpu.sh 0.5.17",
}


@pytest.mark.parametrize("folder", COMMANDS)
def test_an_installation_that_works_shows_no_word_of_pip(repository: Path, folder: str) -> None:
    done = make(repository, COMMANDS[folder])
    assert (done.returncode, done.stderr) == (0, "")
    assert f"installing into {folder} with Python 3.12.0" in done.stdout
    assert NOISE not in done.stdout
    assert NOISE in (repository / folder / "install.log").read_text()
    again = make(repository, COMMANDS[folder], fails="torch")
    assert again.returncode == 0
    assert f"{folder} is ready" in again.stdout


@pytest.mark.parametrize(
    ("folder", "word"), [(".venv", "torch"), (".venv", "--editable"), (".venv-sglang", "--no-deps")]
)
def test_one_that_fails_shows_the_end_of_its_log_and_is_done_again(repository: Path, folder: str, word: str) -> None:
    failed = make(repository, COMMANDS[folder], fails=word)
    assert failed.returncode == 1
    assert "ERROR: no matching distribution" in failed.stderr
    assert failed.stderr.splitlines()[-1].endswith(f"failed; all that it said is in {repository}/{folder}/install.log")
    assert "ready" not in failed.stdout
    again = make(repository, COMMANDS[folder])
    assert again.returncode == 0
    assert "installing" in again.stdout


def test_torch_comes_first_and_every_package_under_the_pins(repository: Path) -> None:
    make(repository, COMMANDS[".venv"])
    said = [line for line in (repository / ".venv/install.log").read_text().splitlines() if line.startswith("==")]
    under = "== pip install --constraint launch/constraints.txt"
    assert said == ["== pip install --upgrade pip", f"{under} torch", f"{under} --editable .[dev]"]
