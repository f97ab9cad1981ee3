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
    now[0] = 12.0  # ten seconds of start and evaluation
    track.log(1, METRICS)
    now[0] = 16.0
    track.log(2, METRICS | {"val/accuracy": 0.75})
    track.close()
    assert out.getvalue().splitlines() == [
        "step   0/100  val/accuracy 0.400",
        "step   1/100  score 0.500  pg_loss -0.0123  2.00 s  eta 3:18",  # 99 steps of 2 s
        "step   2/100  val/accuracy 0.750",
        "step   2/100  score 0.500  pg_loss -0.0123  2.00 s  eta 4:54",  # 98 of (2 + 4) / 2 s
    ]
    assert "\x1b" not in out.getvalue()


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
