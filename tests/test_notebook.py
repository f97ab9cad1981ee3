"""The commands as calls of Python: what a call writes, how it fails, and a notebook from its first cell to its last."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from readme_blocks import ROOT

from megarl import notebook
from megarl.config import ConfigError
from megarl.metrics.reading.jsonl import append_lines
from megarl.metrics.reading.status import read_status
from megarl.rewards.load import resolve
from megarl.samples.sample import Completion, Prompt

ROWS = [{"prompt": "2+3=", "ground_truth": "5"}]


def paid(address: str, answer: str) -> Any:
    return resolve(address, {})(Prompt("0", [1], "2+3=", "5"), Completion([1], [0.0], "stop", (), answer))


def test_rewards_of_a_notebook_are_kept_with_what_they_use(tmp_path: Path) -> None:
    bonus = 0.5

    def graded(solution_str: str, ground_truth: str) -> float:
        return bonus + float(solution_str == ground_truth)

    call = notebook._Call("train", tmp_path / "run")
    first, name, second = call.rewards([graded, "exact", lambda prompt, completion: len(completion.text)])
    assert (first.rpartition(":")[2], name) == ("graded", "exact")
    assert (
        "# " + "        return bonus + float(solution_str == ground_truth)"
        in (tmp_path / "run/inputs/train/rewards.py").read_text()
    ), "the source, for a reader"
    assert [paid(first, "5"), paid(first, "6"), paid(second, "four")] == [1.5, 0.5, 4]


def test_a_function_that_a_file_has_is_imported_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/half_paid.py").write_text("def half(prompt, completion):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    from half_paid import half  # type: ignore[import-not-found]

    (address,) = notebook._Call("train", tmp_path / "run").rewards(half)
    script = f"from megarl.rewards.load import resolve; print(resolve({address!r}, {{}})(None, None))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0.5\n", done.stderr


def test_a_mistake_is_the_sentence_of_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as found:
        notebook.train(
            "qwen3_mini", ROWS, "exact", {"actor.optim.rate": 1, "rollout": {"n": 0}}, folder=tmp_path / "run"
        )
    assert len(found.value.sentences) == 1 and "there is no key actor.optim.rate" in str(found.value)
    assert f"{tmp_path}/run/inputs/train/settings.yaml" in str(found.value)
    with pytest.raises(ConfigError, match=r"data.train_files belongs to an argument of the call"):
        notebook.train("qwen3_mini", ROWS, "exact", {"data.train_files": ["x.jsonl"]}, folder=tmp_path / "run")
    assert "error: " not in capfd.readouterr().out, "it is raised, and not printed too"


def test_calls_without_a_folder_take_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert notebook._Call("sft", None)._folder == Path("runs/sft_1")
    Path("runs/sft_1/config.yaml").touch()
    assert notebook._Call("sft", None)._folder == Path("runs/sft_2")


def test_metrics_have_a_row_for_each_step_with_its_evaluation(tmp_path: Path) -> None:
    rows = [{"step": 0, "val/score": 0.1}, {"step": 1, "critic/score/mean": 0.2}, {"step": 1, "val/score": 0.3}]
    append_lines(tmp_path / "metrics.jsonl", rows)
    with pytest.raises(ValueError, match=r"no config.yaml there; expected the folder of a run"):
        notebook.Run(tmp_path)
    (tmp_path / "config.yaml").touch()
    metrics = notebook.Run(tmp_path).metrics
    assert metrics.loc[1].to_dict() == {"val/score": 0.3, "critic/score/mean": 0.2}
    assert list(metrics["val/score"]) == [0.1, 0.3] and notebook.Run(tmp_path).summary == {}


@pytest.mark.full
@pytest.mark.dist
def test_an_interrupt_ends_the_run_and_the_same_call_goes_on(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        from megarl.notebook import train
        rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a in range(8) for b in range(8)]
        settings = {"data.train_batch_size": 4, "rollout.n": 2, "data.max_response_length": 4, "trainer.save_freq": 1}
        settings |= {"algorithm.adv_estimator": "grpo", "trainer.total_training_steps": 40, "rollout.engine": "hf"}
        train("qwen3_mini", rows, lambda prompt, completion: len(completion.text), settings, folder="run")
        """
    )
    run = tmp_path / "run"

    def started() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", script]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    process = started()
    while not (run / "checkpoints/latest").exists() and not list((run / "checkpoints").glob("step_*/manifest.json")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert "KeyboardInterrupt" in said.splitlines()[-1], said
    assert (read_status(run) or {})["end"]["error"] == "KeyboardInterrupt"
    again = started().communicate()[0]
    assert "going on from step" in again and "results: " in again, again


@pytest.mark.full
@pytest.mark.dist
def test_the_notebook_of_the_examples_runs_in_a_kernel(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(ROOT / "examples/notebook.ipynb", as_version=4)
    where = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    client = NotebookClient(book, timeout=800, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=os.environ | where)
    shown = {cell.source.splitlines()[-1]: cell.outputs for cell in book.cells if cell.cell_type == "code"}
    before, after = next(
        [float(number) for number in outputs[-1].data["text/plain"].strip("()").split(",")]
        for line, outputs in shown.items()
        if line.startswith("run.summary")
    )
    assert after > before + 0.3 and after > 0.8
    printed = json.dumps(shown)
    assert "has finished its 25 steps" in printed, "the picture of the run, in place"
    assert "step 25/25" not in printed
    assert (tmp_path / "runs/train_1/report.html").exists() and "report.html" in printed
    assert "cab=" in printed and "dbc" in printed
