"""The images of launch/docker/, read as text: what they copy exists, and pip installs nothing but the locks."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import check_pins
import pytest
import yaml
from dockerfiles import context, steps

import megarl
from megarl.commands.launch.command import launch_file, parse

ROOT = check_pins.ROOT
FILES = sorted((ROOT / "launch/docker").glob("*.Dockerfile"))
INSTALL = (ROOT / "launch/gpu/install.sh").read_text()
PARTS = {"trainer", "transformer_engine", "megarl", "server"}
TRAINER, SERVER = (ROOT / f"launch/docker/{name}.Dockerfile" for name in ("trainer", "server"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def told(file: Path, what: str) -> list[str]:
    return [step.words for step in steps(file) if step.what == what]


def _last_copy(file: Path) -> int:
    """The number of the last step that copies from the repository."""
    return max(k for k, step in enumerate(steps(file)) if step.what == "COPY" and "--from=" not in step.words)


@each_file
def test_every_instruction_is_one_of_dockers_and_what_it_copies_reaches_the_builder(file: Path, tmp_path: Path) -> None:
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD", "LABEL"}
    assert {step.what for step in steps(file)} <= known
    context(tmp_path)
    for words in told(file, "COPY"):
        for source in shlex.split(words)[:-1]:
            assert words.startswith("--from=") or (tmp_path / source).exists(), source


def test_the_builder_gets_what_the_images_are_made_of_alone(tmp_path: Path) -> None:
    context(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("LICENSE", "README.md", "setup.py"),
        *("configs", "launch", "megarl", "megarl_sandbox"),
    }
    assert {path.name for path in (tmp_path / "launch").iterdir()} == {"environment.sh", "gpu"}


@each_file
def test_every_step_of_pip_takes_the_locks_a_commit_of_apex_or_our_own_files(file: Path) -> None:
    for words in told(file, "RUN"):
        if words == ".venv/bin/python -m pip install --no-deps --no-build-isolation --no-index .":
            assert (file, steps(file).index(("RUN", words))) == (TRAINER, _last_copy(TRAINER) + 1)
        elif "pip" in words.split():
            assert (
                'git clone https://github.com/NVIDIA/apex /tmp/apex && git -C /tmp/apex checkout "$APEX_COMMIT"'
                in words
            )
            (installed,) = re.findall(r"pip install ([^&;]*)", words)
            assert [word for word in installed.split() if not word.startswith("--")] == ["/tmp/apex"]
        for parts in re.findall(r"launch/gpu/install\.sh([^&;]*)", words):
            assert parts.split() and set(parts.split()) <= PARTS
    everything = " ".join(told(file, "RUN"))
    assert "uv pip" not in everything and "conda" not in everything and "curl" not in everything


def test_the_images_together_install_every_part_once() -> None:
    runs = " ; ".join(words for file in (TRAINER, SERVER) for words in told(file, "RUN"))
    found = re.findall(r"bash launch/gpu/install\.sh (\w+)", runs)
    assert found == ["trainer", "transformer_engine", "server"], "and megarl not for developers (--editable)"
    assert all(part in PARTS for part in re.findall(r"^        (\w+)\)", INSTALL, re.M))


def test_the_bases_have_the_cuda_of_the_locks_and_a_digest() -> None:
    (toolkit,) = [pin for pin in check_pins.pins_of(check_pins.TRAINER_LOCK) if pin.startswith("cuda-toolkit==")]
    version = ".".join(toolkit.partition("==")[2].split(".")[:3])
    digest = r"@sha256:[0-9a-f]{64}"
    build, last = told(TRAINER, "FROM")
    assert re.fullmatch(rf"nvidia/cuda:{re.escape(version)}-cudnn-devel-ubuntu24\.04{digest} AS build", build)
    assert re.fullmatch(rf"nvidia/cuda:{re.escape(version)}-base-ubuntu24\.04{digest}", last), "torch brings the rest"
    assert told(SERVER, "FROM") == ["${TRAINER}"]
    compilers = re.findall(r"cuda-nvcc-(\d+-\d+)", " ".join(told(SERVER, "RUN")))
    assert compilers == ["-".join(version.split(".")[:2])]


def test_the_images_are_named_and_labelled_by_the_version_of_the_package_and_the_commit(tmp_path: Path) -> None:
    program, calls = tmp_path / "docker", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", ROOT / "launch/docker/build.sh", "--pull"], env=environment, check=True)
    trainer, server = calls.read_text().splitlines()
    of_trainer = rf"--tag megarl-trainer:{re.escape(megarl.__version__)} .*--build-arg VERSION={megarl.__version__}"
    assert re.search(rf"{of_trainer} --build-arg REVISION=[0-9a-f]{{40}}(-changed)? --pull \.$", trainer)
    assert f"--tag megarl-server:{megarl.__version__} " in server
    assert f"--build-arg TRAINER=megarl-trainer:{megarl.__version__} " in server
    labels = " ".join(told(TRAINER, "LABEL"))
    assert "image.version=$VERSION" in labels and "image.revision=$REVISION" in labels


def test_pages_and_files_name_images_of_this_version() -> None:
    found = {}
    for file in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("launch/**/*")]:
        if file.is_file() and file.suffix != ".pyc":
            found[file] = re.findall(r"megarl-(?:trainer|server):(\d[\w.]*)", file.read_text())
    assert {version for versions in found.values() for version in versions} == {megarl.__version__}


def test_kubernetes_takes_the_servers_image_as_its_user() -> None:
    words = ["job", "grpo_qwen2_5_72b_8x8h100"]
    (job,) = [one for one in yaml.safe_load_all(launch_file(parse(words))[1]) if one["kind"] == "Job"]
    spec = job["spec"]["template"]["spec"]
    assert f"--uid {spec['securityContext']['runAsUser']} megarl" in " ".join(told(TRAINER, "RUN"))
    assert spec["containers"][0]["image"] == f"megarl-server:{megarl.__version__}"


@each_file
def test_an_image_runs_without_roots_rights_and_holds_no_secret(file: Path) -> None:
    assert told(file, "USER")[-1] == "megarl"
    for what in ("ARG", "ENV"):
        for words in told(file, what):
            assert not re.search(r"TOKEN|SECRET|PASSWORD|API_KEY", words), words


def test_the_environment_of_sglang_is_where_the_image_says() -> None:
    (found,) = [words for words in told(SERVER, "ENV") if words.startswith("MEGARL_SGLANG_PYTHON=")]
    assert found == "MEGARL_SGLANG_PYTHON=/opt/megarl/.venv-sglang/bin/python"


def test_commands_without_a_path_are_those_of_the_trainers_environment() -> None:
    """As files of `megarl launch` name them: python."""
    assert any(words.startswith("PATH=/opt/megarl/.venv/bin:$PATH") for words in told(TRAINER, "ENV"))
