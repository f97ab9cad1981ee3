"""One run after another: what fails or is interrupted costs the others nothing, and all of it is written down."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from config_helpers import BASE
from ring_cases import make_parts, settings, steps

from megarl import cli
from megarl.commands import sweep as command
from megarl.commands.sweep import Result, is_finished, main, print_table, sweep, train
from megarl.config import SweptRun, load_sweep, to_yaml


@pytest.fixture
def runs(tmp_path: Path) -> list[SweptRun]:
    return load_sweep([*BASE, "rollout.n=2,4,8", f"trainer.default_local_dir={tmp_path}"])


def finish(run: SweptRun, **numbers: Any) -> int:
    """What a run leaves that came to its end, as far as a sweep looks at it."""
    folder = run.config.trainer.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(run.config))
    (folder / "summary.json").write_text(json.dumps({"wall_s": 12.5} | numbers))
    return 0


def written(runs: list[SweptRun]) -> list[dict[str, Any]]:
    return json.loads((Path(runs[0].config.trainer.default_local_dir) / "sweep.json").read_text())["runs"]


def test_each_run_comes_after_the_one_before_and_its_numbers_are_kept(runs: list[SweptRun]) -> None:
    seen: list[dict[str, Any]] = []

    def start(run: SweptRun) -> int:
        seen.append(dict(run.values))
        return finish(run, accuracy_before=0.25, accuracy_after=0.5, last_score=len(seen) / 4)

    results = sweep(runs, start)
    assert seen == [{"rollout.n": 2}, {"rollout.n": 4}, {"rollout.n": 8}]
    folder = str(runs[0].config.trainer.run_dir)
    assert results[0] == Result({"rollout.n": 2}, folder, "finished", 0.25, 0.5, 0.25, 12.5)
    assert written(runs) == [vars(result) for result in results]
    assert written(runs)[2]["last_score"] == 0.75


def interrupted(run: SweptRun) -> int:
    raise KeyboardInterrupt


def test_the_same_command_again_starts_only_what_is_not_finished(runs: list[SweptRun]) -> None:
    sweep(runs, lambda run: interrupted(run) if run is runs[1] else finish(run, accuracy_after=0.5))
    again: list[SweptRun] = []
    said: list[str] = []
    results = sweep(runs, lambda run: again.append(run) or finish(run), said.append)
    assert again == runs[1:]
    assert [result.state for result in results] == ["finished"] * 3
    assert results[0].accuracy_after == 0.5
    assert said[0] == "== run 1 of 3: rollout.n=2: finished before"


def test_a_run_of_other_settings_or_without_an_end_or_without_resume_is_not_finished(
    runs: list[SweptRun], tmp_path: Path
) -> None:
    finish(runs[0])
    config = runs[0].config
    assert is_finished(config)
    words = [*BASE, "rollout.n=2,4,8", f"trainer.default_local_dir={tmp_path}"]
    assert is_finished(load_sweep([*words, "trainer.logger=[console]"])[0].config), "where to says nothing"
    for other in ("trainer.total_training_steps=9", "actor.optim.lr=1e-4", "trainer.resume_mode=disable"):
        assert not is_finished(load_sweep([*words, other])[0].config), other
    (config.trainer.run_dir / "config.yaml").write_text("actor: {of_another_version: 1}")
    assert not is_finished(config)
    finish(runs[0])
    (config.trainer.run_dir / "summary.json").unlink()
    assert not is_finished(config)


@pytest.mark.parametrize(
    ("ends", "code", "states"),
    [
        ([0, 0, 0], 0, ["finished"] * 3),
        ([0, 2, -9], 1, ["finished", "failed", "failed"]),
        ([0, 1, 0], 1, ["finished", "failed", "finished"]),
        ([0, None, 0], 130, ["finished", "interrupted", "not started"]),
        ([1, None, 0], 130, ["failed", "interrupted", "not started"]),
    ],
)
def test_a_run_that_fails_stops_no_other_and_one_that_is_interrupted_the_sweep(
    runs: list[SweptRun],
    ends: list[int | None],
    code: int,
    states: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = iter(ends)

    def start(run: SweptRun) -> int:
        end = next(left)
        return interrupted(run) if end is None else end or finish(run, accuracy_before=0.25, accuracy_after=0.5)

    monkeypatch.setattr(command, "train", start)
    assert main(runs) == code
    assert [row["state"] for row in written(runs)] == states
    failed = [row for row in written(runs) if row["state"] == "failed"]
    assert all(row["accuracy_after"] is None and row["seconds"] is not None for row in failed)
    shown = capsys.readouterr().out
    assert "== run 2 of 3: rollout.n=4" in shown
    for word in ("rollout.n", "before", "after", "last score", "seconds", *states):
        assert word in shown
    assert shown.splitlines()[-1].startswith("sweep: ") and shown.splitlines()[-1].endswith("/sweep.json")


def test_a_table_has_a_column_for_each_key_and_shows_values_as_they_are_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    values = {"actor.optim.betas": [0.9, 0.99], "actor.clip_ratio_high": None, "model.path": "[b]x[/b]"}
    print_table([Result(values, "runs/x_sweep/a", "finished", 0.25, 0.9375, 1.5, 61.7), Result(values, "runs/x/b")])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    filled = [row for row in rows if row]
    shown = ["[0.9, 0.99]", "null", "[b]x[/b]"]
    assert filled[0] == [*shown, "finished", "0.250", "0.938", "1.500", "62", "a"]
    assert filled[1] == [*shown, "not started", "", "", "", "", "b"]


def test_check_only_prints_every_layout_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "train", lambda run: pytest.fail("it started one"))
    words = ["recipe=grpo_qwen2_5_72b_8x8h100", "trainer.check_only=true", "rollout.n=8,16"]
    assert cli.main(["train", "-m", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.index("rollout.n=8") < shown.index("actor") < shown.index("rollout.n=16")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the front door hands on."""
    seen: list[Any] = []

    def work_of(found: cli.Command) -> Callable[[Any], int]:
        assert found == cli.SWEEP
        return lambda runs: seen.append(runs) or 1

    monkeypatch.setattr(cli, "_work_of", work_of)
    return seen


def test_a_sweep_on_each_machine_of_a_job_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYPILOT_NODE_RANK", "1")
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
    assert cli.main(["train", "-m", *BASE, "rollout.n=2,4"]) == cli.EXIT_USAGE
    assert "trainer.nnodes=1: SkyPilot has 2 machines" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["-m", "--multirun"])
def test_the_front_door_takes_a_sweep(flag: str, asked: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "my run.yaml"
    file.write_text("recipe: quickstart\ntrainer: {experiment_name: mine}\n")
    assert cli.main(["train", flag, "--config", str(file), "actor.optim.lr=1e-4,3e-4"]) == 1
    assert [str(run.config.trainer.run_dir) for run in asked[0]] == [
        "runs/mine_sweep/actor.optim.lr=0.0001",
        "runs/mine_sweep/actor.optim.lr=0.0003",
    ]


def test_the_front_door_refuses_a_mistake_before_anything_starts(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "-m", "recipe=quickstart", "actor.optim.lr=1e-4,fast"]) == 2
    assert capsys.readouterr().err == "error: actor.optim.lr=fast: expected a number\n"
    assert cli.main(["sft", "-m", "recipe=quickstart_sft", "actor.optim.lr=1e-4,3e-4"]) == 2
    assert "only `megarl train` makes several runs" in capsys.readouterr().err
    assert not asked


def test_the_work_of_a_sweep_is_a_function_that_exists_and_help_names_its_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli._work_of(cli.SWEEP) is main
    assert cli.main(["train", "--help"]) == 0
    assert "train -m (--multirun)" in capsys.readouterr().out


def test_a_run_is_a_process_whose_exit_code_counts(runs: list[SweptRun], capfd: pytest.CaptureFixture[str]) -> None:
    assert train(replace(runs[0], words=("rollout.nn=2",))) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: rollout.nn=2: there is no key rollout.nn; did you mean rollout.n?\n")


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_a_sweep_of_two_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    parts = make_parts(tmp_path / "parts")
    words = settings(parts, tmp_path, "tiny", "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo")
    words += ["actor.optim.lr=1e-3,3e-3", "trainer.save_freq=1", "trainer.total_training_steps=5"]
    typed = [sys.executable, "-m", "megarl", "train", "-m", *words]
    first, second = (tmp_path / "tiny_sweep" / f"actor.optim.lr={lr}" for lr in ("0.001", "0.003"))

    second.mkdir(parents=True)
    (second / "summary.json").write_text("{}")  # of an earlier run with other settings
    log = tmp_path / "said.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(typed, stdout=out, stderr=out, cwd=tmp_path)
    try:
        wait_for(second / "checkpoints" / "step_00000001" / "manifest.json", process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130, log.read_text()[-2000:]
    finally:
        process.kill()
    assert [row["state"] for row in written(load_sweep(words))] == ["finished", "interrupted"]
    assert not psutil.wait_procs(children, timeout=30)[1], "what the run had started is gone"
    assert not (second / "summary.json").exists(), "only a run that came to its end has one"

    before = (first / "summary.json").stat().st_mtime_ns
    done = subprocess.run(typed, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "actor.optim.lr=0.001: finished before" in done.stdout
    assert (first / "summary.json").stat().st_mtime_ns == before
    assert "going on from step" in done.stderr
    rows = written(load_sweep(words))
    assert [row["state"] for row in rows] == ["finished"] * 2
    assert [row["values"] for row in rows] == [{"actor.optim.lr": 1e-3}, {"actor.optim.lr": 3e-3}]
    for row, folder in zip(rows, (first, second), strict=True):
        summary = json.loads((folder / "summary.json").read_text())
        assert (row["score_before"], row["score_after"]) == (summary["score_before"], summary["score_after"])
        assert row["accuracy_after"] is None, "the rewards of this run are shares of digits"
        assert row["last_score"] == summary["last_score"] > 0
        assert row["seconds"] == summary["wall_s"]
    rates = [set(steps(folder, "actor/lr").values()) for folder in (first, second)]
    assert rates == [{1e-3}, {3e-3}], "the value that was swept reached the run"


def wait_for(file: Path, process: subprocess.Popen[bytes], limit_s: float = 600.0) -> None:
    deadline = time.monotonic() + limit_s
    while not file.exists():
        assert process.poll() is None, "the sweep ended before it could be interrupted"
        assert time.monotonic() < deadline, f"{file} did not come"
        time.sleep(0.05)
