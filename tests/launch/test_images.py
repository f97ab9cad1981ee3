"""The images of launch/docker/, read as text: what they copy exists, and pip installs nothing but the locks."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import check_pins
import pytest
import yaml

import megarl
from megarl.commands.launch.command import launch_file, parse

ROOT = check_pins.ROOT
FILES = sorted((ROOT / "launch/docker").glob("*.Dockerfile"))
INSTALL = (ROOT / "launch/gpu/install.sh").read_text()
PARTS = {"trainer", "transformer_engine", "megarl", "server"}
TRAINER, SERVER = (ROOT / f"launch/docker/{name}.Dockerfile" for name in ("trainer", "server"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


class Step(NamedTuple):
    """Example: Step("COPY", "launch/gpu launch/gpu/")."""

    what: str
    words: str


def steps(file: Path) -> list[Step]:
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [Step(*line.split(maxsplit=1)) for line in lines]


def told(file: Path, what: str) -> list[str]:
    return [step.words for step in steps(file) if step.what == what]


@each_file
def test_every_instruction_is_one_of_dockers_and_what_it_copies_reaches_the_builder(file: Path) -> None:
    assert {step.what for step in steps(file)} <= {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for words in told(file, "COPY"):
        for source in shlex.split(words)[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source.split('/')[0]}" in ignored, source


@each_file
def test_every_step_of_pip_takes_the_locks_or_a_commit_of_apex(file: Path) -> None:
    for words in told(file, "RUN"):
        if "pip" in words.split():
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
    assert found == ["trainer", "transformer_engine", "megarl", "server"]
    assert all(part in PARTS for part in re.findall(r"^        (\w+)\)", INSTALL, re.M))


def test_the_base_has_the_cuda_of_the_locks_and_a_pinned_tag() -> None:
    (base,) = told(TRAINER, "FROM")
    (toolkit,) = [pin for pin in check_pins.pins_of(check_pins.TRAINER_LOCK) if pin.startswith("cuda-toolkit==")]
    version = re.fullmatch(r"nvidia/cuda:(\d+\.\d+\.\d+)-cudnn-devel-ubuntu24\.04", base)
    assert version is not None
    assert version[1] == ".".join(toolkit.partition("==")[2].split(".")[:3])
    assert told(SERVER, "FROM") == ["${TRAINER}"], "the server is built on the trainer of this version"
    assert told(SERVER, "ARG") == [f"TRAINER=megarl-trainer:{megarl.__version__}"]


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


def test_the_user_of_the_image_can_write_where_the_checks_leave_their_pages() -> None:
    text = TRAINER.read_text()
    made = "RUN install --directory --owner megarl runs\n"
    assert text.rindex("WORKDIR /opt/megarl\n") < text.index(made) < text.index("WORKDIR /workspace\n")
    assert "COPY" not in text[text.index(made) :]
    assert 'options.out or ROOT / "runs"' in (ROOT / "launch/ladder.py").read_text()


def test_the_environment_of_sglang_is_where_the_image_says() -> None:
    (found,) = [words for words in told(SERVER, "ENV") if words.startswith("MEGARL_SGLANG_PYTHON=")]
    assert found == "MEGARL_SGLANG_PYTHON=/opt/megarl/.venv-sglang/bin/python"


def test_commands_without_a_path_are_those_of_the_trainers_environment() -> None:
    """As files of `megarl launch` name them: python."""
    assert any(words.startswith("PATH=/opt/megarl/.venv/bin:$PATH") for words in told(TRAINER, "ENV"))
