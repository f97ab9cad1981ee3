"""One input of each kind through the command, as a process: exit code 2, a sentence, and the earlier run stays."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_input import Cases
from saved_runs import save_steps

from megarl.data.tiny import write_tiny_model
from megarl.trainer.owner import OWNER

KIND = "through the command, as a process"
ROW = json.dumps({"prompt": "1+1=", "ground_truth": "2"})
SIZES: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, a prompt, and an earlier run with three saves."""
    write_tiny_model(tmp_path / "model", **SIZES)
    (tmp_path / "rows.jsonl").write_text(f"{ROW}\n")
    save_steps(tmp_path / "runs" / "earlier" / "checkpoints", 3)
    (tmp_path / "runs" / "earlier" / "summary.json").write_text("{}")
    return tmp_path


def started(folder: Path, command: str, *more: str) -> subprocess.CompletedProcess[str]:
    """`megarl COMMAND` over the folder of the earlier run."""
    words = [f"model.path={folder}/model", "rollout.engine=hf", "trainer.device=cpu", "trainer.experiment_name=earlier"]
    words += [f"trainer.default_local_dir={folder}/runs", *more]
    return subprocess.run([sys.executable, "-m", "megarl", command, *words], capture_output=True, text=True)


def content(folder: Path) -> dict[Path, bytes]:
    """Of every file but the one in which a process that owns the folder signs."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != OWNER}


def configuration(folder: Path) -> tuple[list[str], list[str]]:
    files = [f"data.train_files=[{folder}/rows.jsonl]"]
    sentences = ["rollout.n=two: expected an integer", "actor.clip_ration=0.1: there is no key actor.clip_ration"]
    return ["train", *files, "rollout.n=two", "actor.clip_ration=0.1"], sentences


def data(folder: Path) -> tuple[list[str], list[str]]:
    (folder / "rows.jsonl").write_bytes(f"{ROW}\n".encode() + b'{"prompt": "\xff"}\n')
    return ["evaluate", f"data.val_files=[{folder}/rows.jsonl]"], [f"{folder}/rows.jsonl:2: not JSON"]


def model(folder: Path) -> tuple[list[str], list[str]]:
    (folder / "model" / "config.json").write_text("[]")
    said = f"model.path={folder}/model: its config.json"
    return ["evaluate", f"data.val_files=[{folder}/rows.jsonl]"], [said]


def reward(folder: Path) -> tuple[list[str], list[str]]:
    (folder / "mine.py").write_text("def f(prompt, completion, third, fourth): return 1\n")
    said = f"reward.fn={folder}/mine.py:f"
    return ["evaluate", f"data.val_files=[{folder}/rows.jsonl]", f"reward.fn={folder}/mine.py:f"], [said]


def plugin(folder: Path) -> tuple[list[str], list[str]]:
    (folder / "mine.py").write_text("import no_such_package\n")
    said = f"algorithm.plugins has '{folder}/mine.py'"
    return ["evaluate", f"data.val_files=[{folder}/rows.jsonl]", f"algorithm.plugins=[{folder}/mine.py]"], [said]


def checkpoint(folder: Path) -> tuple[list[str], list[str]]:
    save = folder / "runs" / "earlier" / "checkpoints" / "step_00000003"
    (save / "manifest.json").write_bytes(b"{")
    words = [f"data.train_files=[{folder}/rows.jsonl]", "data.train_batch_size=1", "trainer.total_training_steps=9"]
    return ["train", *words, f"trainer.resume_mode={save}"], [str(save)]


@pytest.mark.parametrize("kind", [configuration, data, model, reward, plugin, checkpoint])
def test_bad_input_of_each_kind_ends_the_process_with_a_sentence(
    cases: Cases, folder: Path, kind: Callable[[Path], tuple[list[str], list[str]]]
) -> None:
    cases.add()
    (command, *words), sentences = kind(folder)
    before = content(folder / "runs")
    done = started(folder, command, *words)
    faults = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(faults)) == (2, len(sentences)), done.stderr
    for said in sentences:
        assert any(said in line for line in faults), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert content(folder / "runs") == before
