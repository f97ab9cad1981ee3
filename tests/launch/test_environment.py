"""The scripts that make environments, with a stand-in for Python: what is installed, shown and kept."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOISE = "WARNING: a mirror has not got it"

# `FAILS`: a word of the installation that fails.  `MINOR`: the version that it says it is.
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    --version) echo Python 3.12.0 ;;
    *version_info.minor*) echo "${{MINOR:-}}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/activate" ;;
    "-m pip install "*)
        echo "{NOISE}" >&2
        case " $* " in *" ${{FAILS:-nothing}} "*) echo "ERROR: no matching distribution"; exit 1 ;; esac ;;
esac
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return clone(tmp_path / "clone")


def clone(folder: Path) -> Path:
    shutil.copytree(ROOT / "launch", folder / "launch")
    shutil.copy(ROOT / "setup.py", folder)
    (folder / "launch/agents_npm.sh").write_text("")  # test_agents_npm.py is of it
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return folder


def make(repository: Path, command: str, fails: str = "") -> subprocess.CompletedProcess[str]:
    return finished(begun(repository, command, fails))


def begun(repository: Path, command: str, fails: str = "") -> subprocess.Popen[str]:
    own = {"PYTHON": str(repository / "python"), "FAILS": fails, "XDG_CACHE_HOME": str(repository.parent / "cache")}
    out = subprocess.PIPE
    return subprocess.Popen(
        ["bash", "-c", command], cwd=repository, env=os.environ | own, stdout=out, stderr=out, text=True
    )


def finished(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    said, complained = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, said, complained)


COMMANDS = {
    ".venv": ". launch/environment.sh; make_environment",
    ".venv-3.12": "MINOR=12 bash launch/environment.sh",
    ".venv-te": ". launch/environment.sh; make_te_python",
    ".venv-sglang": "bash launch/sglang_cpu.sh",
    ".venv-sglang-0.5.17": "bash launch/sglang_cpu.sh 0.5.17",
    ".venv-environments": "bash launch/environments.sh",
    ".venv-verifiers": "bash launch/verifiers.sh",
    # as on a machine with GPUs
    ".venv ": "bash launch/gpu/install.sh trainer",
    ".venv-sglang ": "bash launch/gpu/install.sh server",
}


@pytest.mark.parametrize("folder", COMMANDS)
def test_an_installation_that_works_shows_no_word_of_pip(repository: Path, folder: str) -> None:
    done, command, folder = make(repository, COMMANDS[folder]), COMMANDS[folder], folder.strip()
    assert (done.returncode, done.stderr) == (0, "")
    assert f"installing into {folder} with Python 3.12.0" in done.stdout
    assert NOISE not in done.stdout
    assert NOISE in (repository / folder / "install.log").read_text()
    again = make(repository, command, fails="install")
    assert again.returncode == 0
    assert f"{folder} is ready" in again.stdout


def test_a_python_that_cannot_be_used_is_not_replaced_by_another(repository: Path) -> None:
    assert make(repository, COMMANDS[".venv"]).returncode == 0  # there is one that could
    (repository / "python").write_text("#!/bin/sh\nexit 1\n")
    done = make(repository, COMMANDS[".venv"])
    assert done.returncode != 0 and "ready" not in done.stdout
    assert done.stderr.splitlines()[-1].startswith(
        f"launch: {repository}/python: expected Python 3.11 or 3.12 with venv"
    )


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


AGENTS = "bash launch/agents.sh"
LINKS = (".venv-agents", ".venv-agents-instructor")


def test_agents_are_installed_once_for_all_clones(repository: Path) -> None:
    (repository / LINKS[0]).mkdir()  # as earlier versions made it
    failed = make(repository, AGENTS, fails="launch/agents_instructor.txt")
    assert failed.returncode == 1
    assert "all that it said is in " in failed.stderr.splitlines()[-1]
    assert make(repository, AGENTS, fails="launch/agents.txt").returncode == 0, "the first was finished"
    other = clone(repository.parent / "other")
    done = make(other, AGENTS, fails="install")
    assert (done.returncode, done.stderr, done.stdout.count("is ready")) == (0, "", 2)
    for name in LINKS:
        assert (repository / name).readlink() == (other / name).readlink()
        assert (repository / name).resolve().parent == repository.parent / "cache/megarl/environments"
    with (other / "launch/agents.txt").open("a") as pins:
        pins.write("another==1\n")
    make(other, AGENTS)
    assert [(repository / name).resolve() == (other / name).resolve() for name in LINKS] == [False, True]


def test_of_two_installations_at_once_one_waits(repository: Path) -> None:
    for process in [begun(repository, AGENTS), begun(repository, AGENTS)]:
        assert finished(process).returncode == 0
    for name in LINKS:
        assert len(said_to_pip(repository, name)) == 1


def said_to_pip(repository: Path, folder: str) -> list[str]:
    lines = (repository / folder / "install.log").read_text().splitlines()
    said = [line.removeprefix("== pip install ") for line in lines if line.startswith("==")]
    assert re.fullmatch(r"--require-hashes --requirement /dev/fd/\d+", said[0]), "pip itself, by its hash"
    return said[1:]


def test_torch_comes_first_and_every_package_under_the_pins(repository: Path) -> None:
    make(repository, COMMANDS[".venv"])
    under = "--constraint launch/constraints.txt"
    assert said_to_pip(repository, ".venv") == [f"{under} torch", f"{under} --editable .[dev]"]


def test_environments_for_gpus_come_from_the_locks_and_stay(repository: Path) -> None:
    make(repository, "bash launch/gpu/install.sh trainer megarl server")
    locked = "--require-hashes --requirement launch/gpu"
    editable = "--no-deps --no-build-isolation --editable ."
    assert said_to_pip(repository, ".venv") == [f"{locked}/trainer.txt", editable]
    assert said_to_pip(repository, ".venv-sglang") == [f"{locked}/server.txt"]
    done = make(repository, COMMANDS[".venv"], fails="install")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "the versions for CPUs do not replace them"


def test_transformer_engine_is_built_from_its_lock_where_there_is_a_compiler(repository: Path) -> None:
    lacking = make(repository, f"CUDA_HOME={repository} bash launch/gpu/install.sh trainer transformer_engine")
    assert lacking.returncode == 2
    assert "bin/nvcc: install CUDA's toolkit 13.0, or name the other parts: trainer megarl server" in lacking.stderr
    (repository / "bin").mkdir()
    shutil.copy(repository / "python", repository / "bin/nvcc")
    built = make(repository, f"CUDA_HOME={repository} bash launch/gpu/install.sh trainer transformer_engine")
    assert (built.returncode, built.stderr) == (0, "")
    options = "--no-deps --no-build-isolation --require-hashes --requirement launch/gpu/transformer_engine.txt"
    assert said_to_pip(repository, ".venv")[-1] == options
    unknown = make(repository, "bash launch/gpu/install.sh apex")
    assert unknown.returncode == 2
    assert "apex: expected trainer, transformer_engine, megarl or server" in unknown.stderr
