"""rollout.engine=auto: what it is on which machine, and in a run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from config_helpers import BASE, load

from megarl import cli
from megarl.config import Config, to_yaml
from megarl.servers.sglang_environment import PYTHON_VARIABLE
from megarl.trainer.checkpoint.manifest import write_manifest
from megarl.trainer.servers.engine import chosen_engine


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What counts as SGLang's environment, on a machine with a GPU."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '" + '{"sglang": "0.5.23", "sglang-kernel": "0.4.10"}' + "'\n")
    python.chmod(0o755)
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return python


def test_sglang_needs_a_gpu_and_its_environment(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"trainer.default_local_dir={tmp_path}"
    assert chosen_engine(load(here), "train") == ("sglang", f"there is a GPU, and SGLang at {python}")
    assert chosen_engine(load(here, "trainer.device=cpu"), "train") == ("hf", "trainer.device=cpu uses no GPU")
    engine, reason = chosen_engine(load(here, "rollout.sglang.python=/no/where"), "train")
    assert engine == "hf"
    assert reason.startswith("there is a GPU, but no SGLang (rollout.sglang.python=/no/where: no Python there")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_engine(load(here), "train") == ("hf", "torch finds no GPU here")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('echo \'{"sglang": "0.5.23"}\'', "SGLang 0.5.23 for machines without GPU, without the package sglang-kernel;"),
        ("echo '{}'", "no package sglang there;"),
        ("exit 3", "expected a Python that lists its packages, it failed:"),
    ],
    ids=["cpu", "other", "broken"],
)
def test_an_environment_that_cannot_use_a_gpu_is_none(python: Path, tmp_path: Path, said: str, reason: str) -> None:
    python.write_text(f"#!/bin/sh\n{said}\n")
    engine, why = chosen_engine(load(f"trainer.default_local_dir={tmp_path}"), "train")
    assert engine == "hf"
    assert why.startswith(f"there is a GPU, but no SGLang ({python}: {reason}")


def began(config: Config) -> None:
    """A run that stopped after a save."""
    folder = config.trainer.run_dir / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    write_manifest(folder, {"step": 2, "roles": [], "files": {}, "state": {}})
    (config.trainer.run_dir / "config.yaml").write_text(to_yaml(config))


@pytest.mark.usefixtures("python")
def test_a_run_that_goes_on_keeps_its_engine(tmp_path: Path) -> None:
    here = f"trainer.default_local_dir={tmp_path}"
    began(load(here, "rollout.engine=hf"))
    file = load(here).trainer.run_dir / "config.yaml"
    assert chosen_engine(load(here), "train") == ("hf", f"the run that resumes has it in {file}")
    for again in ([here, "trainer.resume_mode=disable"], [here, "trainer.experiment_name=another"]):
        assert chosen_engine(load(*again), "train")[0] == "sglang"
    saved = f"trainer.resume_mode={file.parent}/checkpoints/step_00000002"
    assert chosen_engine(load(here, "trainer.experiment_name=another", saved), "train")[0] == "hf"
    assert chosen_engine(load(here, "data.val_files=[b]", command="evaluate"), "evaluate")[0] == "sglang"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations with which commands were run."""
    found: list[Config] = []
    monkeypatch.setattr(cli, "_work_of", lambda command: lambda config: found.append(config) or 0)
    return found


def test_a_command_with_servers_says_which_engine_and_why(
    ran: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    words = [*BASE, f"trainer.default_local_dir={tmp_path}", "trainer.device=cpu"]
    assert cli.main(["train", *words]) == 0
    assert ran[0].rollout.engine == "hf"
    assert capsys.readouterr().err == "rollout.engine=auto: hf, because trainer.device=cpu uses no GPU\n"
    assert cli.main(["train", *words, "rollout.engine=sglang"]) == 0
    assert ran[1].rollout.engine == "sglang" and not capsys.readouterr().err
    assert cli.main(["train", *words, "rollout.tensor_model_parallel_size=2"]) == 2
    assert "rollout.engine=hf is one process" in capsys.readouterr().err


def test_only_the_first_machine_of_a_run_decides(ran: list[Config], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *BASE, "trainer.nnodes=2", "trainer.node_rank=1", "trainer.master_addr=10.0.0.1"]) == 0
    assert cli.main(["config", *BASE]) == 0
    assert [config.rollout.engine for config in ran] == ["auto", "auto"]
    assert not capsys.readouterr().err
