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

from megarl.data.examples.tiny import write_tiny_model
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


ACTS = """
import os, time

def f(prompt, completion):
    print("loud " * 1000)
    if os.fork() == 0:
        time.sleep(3600)
        os._exit(0)
    if prompt.ground_truth == "exception": raise KeyError("gone")
    if prompt.ground_truth == "hang": time.sleep(3600)
    if prompt.ground_truth == "memory": return len(bytearray(1 << 40))
    if prompt.ground_truth == "nan": return float("nan")
    return 1.0
"""
SAID = {"exception": "KeyError", "hang": "no answer within 2 s", "memory": "MemoryError", "nan": "returned nan"}


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["unscored", "stop"])
def test_bad_input_rewards_that_fail_leave_their_groups_or_stop_the_run(
    cases: Cases, folder: Path, on_error: str
) -> None:
    """Each prints and forks too.  A run that had begun ends with 1, not 2: nobody knew before."""
    acts = [*SAID, "good"] if on_error == "unscored" else ["good", "exception"]
    (folder / "acts.py").write_text(ACTS)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "1+1=", "ground_truth": "{act}"}}\n' for act in acts))
    before = content(folder / "runs")
    words = [f"data.val_files=[{folder}/rows.jsonl]", "data.max_prompt_length=16", "data.max_response_length=4"]
    words += [f"reward.fn={folder}/acts.py:f", f"reward.on_error={on_error}", "reward.timeout_s=2"]
    words += ["reward.try_rows=0"]  # else they would fail before the start
    done = started(folder, "evaluate", *words)
    cases.number += len(acts)
    logs = "".join(file.read_text(errors="replace") for file in (folder / "runs").rglob("*.log"))
    if on_error == "unscored":
        assert done.returncode == 0, done.stderr
        assert "val/score 1.0000" in done.stdout and "val/unscored 4.0000" in done.stdout, done.stdout
        assert all(said in logs + done.stderr for said in SAID.values()), logs + done.stderr
    else:
        assert done.returncode == 1, done.stderr
        assert "the run stopped: " in done.stderr and "KeyError" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert content(folder / "runs").items() >= before.items()
