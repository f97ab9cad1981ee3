"""`megarl watch`: the page of a run's folder, which grows, is cut by a resume, and holds what a model generated."""

import json
import time
from pathlib import Path

import pytest
from report_cases import run_folder
from rich.console import Console

from megarl.cli import main
from megarl.commands.watch.page import BLOCKS, Run, page, plain, sparkline
from megarl.metrics.reading.jsonl import append_lines, drop_after
from megarl.metrics.reading.status import end_noted
from megarl.metrics.trackers.status import StatusTracker
from megarl.metrics.trackers.tracker import Run as Described
from megarl.trainer.run_lock import owned


def started(folder: Path, step: int, total: int = 60) -> Path:
    """A run that has made `step` of `total` steps, and began to generate at the time 1000."""
    run_folder(folder, steps=step)
    tracker = StatusTracker(Described(folder, "megarl", "try", {}, total, resume_step=step), clock=lambda: 1000.0)
    tracker.stage("gen", 3, 8)
    return folder


def text_of(run: Run, **how: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(page(run, **how))  # type: ignore[arg-type]
    return console.export_text()


def test_the_page_of_a_run_that_goes_on(tmp_path: Path):
    run = Run(started(tmp_path / "try", 40))
    run.look()
    shown = text_of(run, is_running=True, now=1075.0)
    # 20 steps are left, each of as many seconds as the last ones took.
    seconds = run.series["timing_s/step"][1][-1]
    assert shown.startswith(f"try  step 41/60  gen 3/8 for 1:15  eta 0:{20 * seconds:02.0f}")
    assert "advice at step 7: entropy: " in shown
    assert sparkline(run.series["critic/score/mean"][1]) in shown
    lines = shown.splitlines()
    (stages,) = [at for at, line in enumerate(lines) if line.startswith("stage")]
    assert lines[stages + 1].startswith("update_actor"), "the longest stage of the last step"
    assert "12+34=" in shown


def test_the_time_to_the_end_has_the_evaluations_in_it_and_not_what_was_before_the_start(tmp_path: Path):
    folder = started(tmp_path / "try", 0)
    with owned(folder):
        now = time.time() + 600
        rows = [{"step": 24, "time": now - 90_000, "timing_s/step": 10.0}]  # of the start before
        for step in range(25, 31):
            rows.append({"step": step, "time": now + 40 * step, "timing_s/step": 10.0})
            rows.append({"step": step, "time": now + 40 * step + 30, "val/score": 0.5, "timing_s/testing": 30.0})
        append_lines(folder / "metrics.jsonl", rows)
        run = Run(folder)
        run.look()
    assert "eta 20:00" in text_of(run, is_running=True), "30 steps of 40 s"


def test_stages_are_those_of_the_last_step_alone(tmp_path: Path):
    folder = started(tmp_path / "try", 2)
    more = {"step": 3, "timing_s/gen": 0.25, "timing_s/step": 1.0, "time": 1010.0}
    append_lines(folder / "metrics.jsonl", [more, {"step": 3, "val/score": 0.5, "timing_s/testing": 9.0}])
    run = Run(folder)
    run.look()
    lines = text_of(run, is_running=True).splitlines()
    (at,) = [at for at, line in enumerate(lines) if line.startswith("stage")]
    assert lines[at + 1].split()[:3] == ["gen", "█" * 5, "0.25"]
    assert not any(line.startswith(("update_actor", "testing")) for line in lines)


def test_faults_of_a_step_are_summed_over_the_run(tmp_path: Path):
    folder = started(tmp_path / "try", 2)
    lost = [{"step": 3, "rollout/lost": 2.0, "push/fallbacks": 1.0}, {"step": 5, "rollout/lost": 1.0}]
    after = {"step": 6, "rollout/lost": 0.0, "push/fallbacks": 1.0, "reward/unscored": 0.0}
    append_lines(folder / "metrics.jsonl", [*lost, after])
    run = Run(folder)
    run.look()
    shown = text_of(run, is_running=True)
    assert "faults: slower transports 1, groups lost 3 (last at step 5)" in shown
    assert "unscored" not in shown


def test_the_share_of_right_answers_is_shown_and_named(tmp_path: Path):
    folder = started(tmp_path / "try", 2)
    row = {"step": 2, "val/score": 0.951, "val-core/my/sums/acc/mean@1": 0.926, "val-core/my/sums/acc/best@4/mean": 1.0}
    append_lines(folder / "metrics.jsonl", [row])
    run = Run(folder)
    run.look()
    lines = text_of(run, is_running=True).splitlines()
    assert [line.split()[-3] for line in lines if line.startswith("accuracy ")] == ["0.926"]
    assert [line.split()[-3] for line in lines if line.startswith("val score ")] == ["0.951"]
    append_lines(folder / "metrics.jsonl", [{"step": 2, "val-core/more/acc/mean@1": 0.5}])
    run.look()
    shown = text_of(run, is_running=True)
    assert "accuracy, my/sums" in shown and "accuracy, more" in shown


def test_a_run_that_has_just_started_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It makes data and tries rewards: its folder has an owner, and nothing else."""
    folder = tmp_path / "try"
    with owned(folder):
        assert main(["watch", str(folder), "--once"]) == 0
        assert capsys.readouterr().out == "try  has just started\n"
        run = Run(folder)
        run.look()
        assert text_of(run, is_running=False).startswith("try  ended before its first stage")
        StatusTracker(Described(folder, "megarl", "try", {}, 60)).stage("starting ranks")
        run.look()
        assert text_of(run, is_running=True).startswith("try  step 1/60  starting ranks for 0:00  eta ?")


def test_what_a_model_wrote_is_no_command_to_the_terminal(tmp_path: Path):
    folder = started(tmp_path / "try", 2)
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    append_lines(folder / "samples.jsonl", [sample | {"completion": "\x1b]0;struck\x07\x1b[2J[red]46[/red]\r\n"}])
    run = Run(folder)
    run.look()
    shown = text_of(run, is_running=True)
    assert "\x1b" not in shown and "\x07" not in shown
    assert "]0;struck  [2J[red]46[/red]" in shown


def test_a_look_reads_what_was_added_and_a_resume_begins_anew(tmp_path: Path):
    folder = started(tmp_path / "try", 5)
    run, file = Run(folder), folder / "metrics.jsonl"
    run.look()
    assert run.series["critic/score/mean"][0] == [1, 2, 3, 4, 5]
    with file.open("a") as half:
        half.write('{"step": 6, "critic/score/mean"')
    run.look()
    assert run.series["critic/score/mean"][0] == [1, 2, 3, 4, 5], "half a line"
    with file.open("a") as rest:
        rest.write(': 0.5}\nno JSON\n{"step": 7, "critic/score/mean": null}\n')
    run.look()
    assert run.last("critic/score/mean") == 0.5
    assert run.series["critic/score/mean"][0] == [1, 2, 3, 4, 5, 6]
    drop_after(file, 3)
    run.look()
    assert run.series["critic/score/mean"][0] == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "shown"), [(None, "has finished its 60 steps"), (ValueError("a.jsonl:3"), "a.jsonl:3")]
)
def test_a_run_that_has_ended_is_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception | None, shown: str
):
    folder = started(tmp_path / "try", 60)
    try:
        with owned(folder), end_noted(folder):
            if error:
                raise error
    except ValueError:
        pass
    assert main(["watch", str(folder)]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert shown in head
    assert ("megarl doctor --run" in head) is (error is not None)


def test_a_run_that_somebody_stopped_has_not_failed(tmp_path: Path):
    folder = started(tmp_path / "try", 3)
    with pytest.raises(KeyboardInterrupt), end_noted(folder):
        raise KeyboardInterrupt("step 3 is saved")
    run = Run(folder)
    run.look()
    assert text_of(run, is_running=False).startswith("try  was stopped after step 3/60: step 3 is saved")


def test_the_last_samples_are_of_different_prompts(tmp_path: Path):
    folder = started(tmp_path / "try", 2)
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    for uid in "abc":
        rows = [sample | {"uid": uid, "prompt": f"prompt {uid}", "completion": f"{uid}{i}"} for i in range(5)]
        append_lines(folder / "samples.jsonl", rows)
    run = Run(folder)
    run.look()
    shown = text_of(run, is_running=True)
    assert all(f"prompt {uid}" in shown and f"{uid}4" in shown for uid in "abc")


def test_the_trainers_numbers_are_shown_where_it_has_some(tmp_path: Path):
    folder = started(tmp_path / "try", 2)
    run = Run(folder)
    run.look()
    assert "MFU" not in text_of(run, is_running=True)
    append_lines(folder / "metrics.jsonl", [{"step": 3, "perf/mfu/actor": 0.412, "perf/max_memory_reserved_gb": 61.3}])
    run.look()
    shown = text_of(run, is_running=True)
    assert "41.2%" in shown and "61.3" in shown and "host memory" not in shown


def test_a_killed_run_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["watch", str(started(tmp_path / "try", 3))]) == 0
    assert capsys.readouterr().out.startswith("try  ended after step 3/60: killed; see `megarl doctor --run ")


def test_a_folder_without_a_run_is_one_sentence(capsys: pytest.CaptureFixture[str]):
    assert main(["watch", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("error: nothing: no status.json there; expected the folder of a run")


def test_curves_go_from_the_least_to_the_largest_value():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BLOCKS
    assert sparkline([3.0, 3.0]) == BLOCKS[0] * 2
    assert sparkline([0.0, 0.0, 1.0, 1.0], width=2) == BLOCKS[0] + BLOCKS[-1]
    assert sparkline([]) == ""


def test_long_texts_are_cut_in_the_middle():
    assert plain("a" * 60 + "b" * 60, 10) == "aaaaa … bbbbb"
    assert plain("one\ntwo\tthree") == "one two three"
