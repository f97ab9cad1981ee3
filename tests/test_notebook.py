"""The commands as calls of Python: what a call writes, how it fails, and a notebook from its first cell to its last."""

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
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
    kept = Path(first.rpartition(":")[0]).read_text()
    assert "#         return bonus + float(solution_str == ground_truth)" in kept, "the source, for a reader"
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
    settings = {"actor.optim.rate": 1, "rollout": {"n": 0}}
    with pytest.raises(ConfigError) as found:
        notebook.train("qwen3_mini", ROWS, "exact", settings, folder=tmp_path / "run")
    assert len(found.value.sentences) == 1 and "there is no key actor.optim.rate" in str(found.value)
    assert f"{tmp_path}/run/inputs/" in str(found.value)
    assert "error: " not in capfd.readouterr().out, "it is raised, and not printed too"
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700, "as a run's own folder"


class Table:
    """What pandas calls a data frame."""

    iterrows = None

    def to_dict(self, _: str) -> list[dict[str, Any]]:
        return [{"prompt": "2+3=", "ground_truth": np.int64(5)}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rows": []}, "train_files: there is no row; expected at least one"),
        ({"rows": "2+3="}, "train_files: a str; expected a list of rows"),
        ({"rows": ["2+3="]}, r"train_files\[0\]: a str; expected a dictionary"),
        ({"rows": [*ROWS, {"prompt": object()}]}, r"train_files\[1\]: it cannot be written as JSON"),
        ({"held_out": []}, "val_files: there is no row"),
        ({"reward": None}, "reward=None: expected a function, a name as reward.fn takes it, or a list of both"),
        ({"reward": [threading.Lock().acquire]}, "reward: acquire cannot be kept for the run"),
        ({"settings": {"data": {"train_files": ["x"]}}}, "settings: data.train_files belongs to the call itself"),
        ({"settings": {"trainer": {"experiment_name": "x"}}}, "trainer.experiment_name belongs to the call itself"),
        ({"settings": {"trainer.check_only": True}}, "trainer.check_only belongs to the call itself"),
    ],
)
def test_what_is_no_row_reward_or_setting_of_a_call_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        notebook.train(**{"model": "qwen3_mini", "rows": ROWS, "reward": "exact"} | given)
    assert not list(Path("runs").glob("*")), "no new folder without a run"


def test_inputs_of_an_earlier_call_stay_and_equal_ones_are_the_same_file(tmp_path: Path) -> None:
    call = notebook._Call("train", tmp_path / "run")
    (first,) = call.data("data.train_files", ROWS)["data.train_files"]
    (other,) = call.data("data.train_files", [{"prompt": "1+1="}])["data.train_files"]
    assert first != other and call.data("data.train_files", Table())["data.train_files"] != [other]
    assert call.data("data.train_files", [dict(ROWS[0])])["data.train_files"] == [first]
    assert json.loads(Path(first).read_text()) == ROWS[0]


def test_rewards_that_differ_by_a_value_alone_are_different_files(tmp_path: Path) -> None:
    call = notebook._Call("train", tmp_path / "run")

    def worth(value: float) -> Any:
        return lambda prompt, completion: value

    assert call.rewards(worth(1.0)) != call.rewards(worth(2.0))


def test_calls_without_a_folder_take_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with notebook._call("sft", None) as first, notebook._call("sft", None) as second:
        assert (first.folder, second.folder) == (Path("runs/sft_1"), Path("runs/sft_2")), "two calls at once"


def test_metrics_have_a_row_for_each_step_with_its_evaluation(tmp_path: Path) -> None:
    rows = [{"step": 0, "val/score": 0.1}, {"step": 1, "critic/score/mean": 0.2}, {"step": 1, "val/score": 0.3}]
    append_lines(tmp_path / "metrics.jsonl", rows)
    with pytest.raises(ValueError, match=r"no config.yaml there; expected the folder of a run"):
        notebook.Run(tmp_path)
    (tmp_path / "config.yaml").touch()
    metrics = notebook.Run(tmp_path).metrics
    assert metrics.loc[1].to_dict() == {"val/score": 0.3, "critic/score/mean": 0.2}
    run = notebook.Run(str(tmp_path))
    assert list(metrics["val/score"]) == [0.1, 0.3] and run.summary == {}
    with pytest.raises(ValueError, match=r"samples.jsonl: the run has no such file, or not yet"):
        _ = run.samples
    with pytest.raises(ValueError, match=r"hf: no model that answers is there; expected a finished run of a policy"):
        run.evaluate(["2+3="])


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
def test_the_notebook_of_the_examples_runs_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.chdir(tmp_path)
    answers = notebook.Run("runs/train_1").evaluate(["cab=", "bad="])
    assert list(answers["prompt"]) == ["cab=", "bad="] and "reward" not in answers
    with pytest.raises(ConfigError, match="which reward .*letters takes"):  # a row is scored as in the run, or refused
        notebook.Run("runs/train_1").evaluate([{"prompt": "cab="}])
    with pytest.raises(ConfigError, match=r"val_files\[1\]: a str; expected a dictionary"):
        notebook.Run("runs/train_1").evaluate([{"prompt": "cab="}, "bad="])
    assert "letters" in json.loads(Path("runs/train_1/code.json").read_text())["rewards.py"]
