"""One input of each kind through the command: exit code 2, a line, no traceback, and the run that was there stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bad_input import Cases
from saved_runs import save_steps

from megarl.cli import main

ROW = json.dumps({"prompt": "1+1=", "ground_truth": "2"})


@pytest.fixture
def words(tmp_path: Path, model: Path) -> list[str]:
    """A command line that is one, over the folder of an earlier run with a save."""
    (tmp_path / "rows.jsonl").write_text(f"{ROW}\n")
    save_steps(tmp_path / "runs" / "earlier" / "checkpoints", 3)
    (tmp_path / "runs" / "earlier" / "summary.json").write_text("{}")
    named = (f"trainer.default_local_dir={tmp_path}/runs", "trainer.experiment_name=earlier", "rollout.engine=hf")
    return [f"model.path={model}", *named, "trainer.device=cpu"]


def content(folder: Path) -> dict[Path, bytes]:
    """Of every file but those in which a process that owns the folder signs."""
    files = (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("owner."))
    return {file: file.read_bytes() for file in files}


def spoil(kind: str, folder: Path, model: Path) -> tuple[list[str], list[str]]:
    """Makes one input bad.  Returns further words, and how the sentences about it begin."""
    rows, mine = folder / "rows.jsonl", folder / "mine.py"
    match kind:
        case "configuration":
            wrong = ["rollout.val_kwargs.n=two", "trainer.seed=x"]
            return wrong, [f"{word}: expected" for word in wrong]
        case "file":
            (folder / "a.yaml").write_bytes(b"\xff")
            return ["--config", f"{folder}/a.yaml"], [f"{folder}/a.yaml: cannot be read"]
        case "model":
            (model / "config.json").write_text("[]")
            return [], [f"model.path={model}: its config.json"]
        case "tokenizer":
            for file in model.glob("tokenizer*"):
                file.unlink()
            return [], [f"model.tokenizer_path={model}"]
        case "data":
            rows.write_bytes(f"{ROW}\n\xff\n".encode("latin-1"))
            return [], [f"{rows}:2: not JSON"]
        case "reward":
            mine.write_text("def f(prompt, completion, third, fourth): return 1\n")
            return [f"reward.fn={mine}:f"], [f"reward.fn={mine}:f"]
        case "plug-in":
            mine.write_text("def f(:\n")
            return [f"algorithm.plugins=[{mine}]"], [f"algorithm.plugins has '{mine}'"]
        case "checkpoint":
            save = folder / "runs" / "earlier" / "checkpoints" / "step_00000003"
            (save / "manifest.json").write_bytes(b"{")
            more = ["data.train_batch_size=1", "trainer.total_training_steps=9", f"trainer.resume_mode={save}"]
            return more, [f"trainer.resume_mode={save}: "]
    rows.unlink()
    return [], [f"{rows}: no such file"]


@pytest.mark.parametrize(
    "kind", ["configuration", "file", "model", "tokenizer", "data", "reward", "plug-in", "checkpoint", "missing"]
)
def test_bad_input_through_the_command(
    cases: Cases, tmp_path: Path, model: Path, words: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cases.add()
    more, named = spoil(kind, tmp_path, model)
    before = content(tmp_path / "runs")
    command, key = ("train", "data.train_files") if kind == "checkpoint" else ("evaluate", "data.val_files")
    assert main([command, *words, f"{key}=[{tmp_path}/rows.jsonl]", *more]) == 2
    said = capsys.readouterr().err
    faults = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(faults) == len(named)
    assert all(any(one in line for line in faults) for one in named), said
    assert "Traceback" not in said
    assert content(tmp_path / "runs") == before


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


@pytest.mark.full
@pytest.mark.parametrize("on_error", ["unscored", "stop"])
def test_bad_input_rewards_that_fail_leave_their_groups_or_stop_the_run(
    cases: Cases, tmp_path: Path, words: list[str], on_error: str
) -> None:
    """Each prints and forks too.  A run that had begun ends with 1, not 2: nobody knew before."""
    acts = [*SAID, "good"] if on_error == "unscored" else ["good", "exception"]
    (tmp_path / "acts.py").write_text(ACTS)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "1+1=", "ground_truth": "{act}"}}\n' for act in acts))
    before = content(tmp_path / "runs")
    words += [f"data.val_files=[{tmp_path}/rows.jsonl]", "data.max_prompt_length=16", "data.max_response_length=4"]
    words += [f"reward.fn={tmp_path}/acts.py:f", f"reward.on_error={on_error}", "reward.timeout_s=2"]
    words += ["reward.try_rows=0"]  # else they would fail before the start
    done = subprocess.run([sys.executable, "-m", "megarl", "evaluate", *words], capture_output=True, text=True)
    cases.number += len(acts)
    logs = "".join(file.read_text(errors="replace") for file in (tmp_path / "runs").rglob("*.log"))
    if on_error == "unscored":
        assert done.returncode == 0, done.stderr
        assert "val/score 1.0000" in done.stdout and "val/unscored 4.0000" in done.stdout, done.stdout
        assert all(said in logs + done.stderr for said in SAID.values()), logs + done.stderr
    else:
        assert done.returncode == 1, done.stderr
        assert "the run stopped: " in done.stderr and "KeyError" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert content(tmp_path / "runs").items() >= before.items()
