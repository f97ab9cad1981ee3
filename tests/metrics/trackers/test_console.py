import io

from rich.console import Console

from megarl.metrics.trackers.console import ConsoleTracker
from megarl.metrics.trackers.run import Run

METRICS = {"critic/score/mean": 0.5, "actor/pg_loss": -0.01234, "timing_s/step": 2.0, "unknown/thing": 7.0}


def tracker(
    tmp_path, *, terminal: bool, resume_step: int | None = None
) -> tuple[ConsoleTracker, io.StringIO, list[float]]:
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=terminal, width=300)
    run = Run(tmp_path, "megarl", "try", {}, 100, resume_step, console)
    return ConsoleTracker(run, clock=lambda: now[0]), out, now


def test_plain_lines_where_there_is_no_terminal(tmp_path):
    track, out, now = tracker(tmp_path, terminal=False)
    track.log(0, {"val/accuracy": 0.4})
    track.stage("gen", 3, 64)
    now[0] = 612.0  # ten minutes of start and evaluation, which come once
    track.log(1, METRICS)
    now[0] = 616.0
    track.log(2, METRICS | {"val/accuracy": 0.75})
    track.close()
    assert out.getvalue().splitlines() == [
        "step   0/100  val/accuracy 0.400",
        "step   1/100  score 0.500  pg_loss -0.0123  2.00 s  eta 3:18",  # 99 steps of 2 s
        "step   2/100  val/accuracy 0.750",
        "step   2/100  score 0.500  pg_loss -0.0123  2.00 s  eta 6:32",  # 98 of 4 s: from end to end it took so long
    ]
    assert "\x1b" not in out.getvalue()


def test_an_evaluation_is_no_step_and_its_time_counts_as_often_as_it_is_made(tmp_path):
    track, out, now = tracker(tmp_path, terminal=False)
    now[0] = 600.0
    for step in range(1, 26):  # 10 s each, and an evaluation of 30 s between two
        now[0] += 10.0
        track.log(step, METRICS | {"timing_s/step": 10.0})
        now[0] += 30.0
        track.log(step, {"val/score": 0.5, "timing_s/testing": 30.0})
    said = out.getvalue().splitlines()
    assert len(said) == 50
    assert said[-2].endswith("10.00 s  eta 50:00"), "75 steps of 40 s"
    assert said[-1] == "step  25/100  val/score 0.500"


def test_the_pace_of_a_resumed_run_counts_what_is_left(tmp_path):
    track, out, _ = tracker(tmp_path, terminal=False, resume_step=90)
    assert track.eta == "?"
    track.log(91, METRICS | {"timing_s/step": 500.0})
    assert out.getvalue().rstrip().endswith("step  91/100  score 0.500  pg_loss -0.0123  500.00 s  eta 1:15:00")


def test_a_terminal_gets_a_bar_with_the_stage_and_how_far_it_is(tmp_path):
    track, out, _ = tracker(tmp_path, terminal=True)
    track.stage("update_actor", 3, 8)
    track.close()
    for text in ("step 1/100", "update_actor", "3/8", "eta ?"):
        assert text in out.getvalue()


def test_the_bar_goes_on_after_a_line(tmp_path):
    track, out, _ = tracker(tmp_path, terminal=True)
    track.stage("update_actor", 3, 8)
    track.log(1, METRICS)
    track.stage("gen", 5, 64)
    track.close()
    for text in ("score", "step 2/100", "gen", "5/64", "eta 3:18"):
        assert text in out.getvalue()
