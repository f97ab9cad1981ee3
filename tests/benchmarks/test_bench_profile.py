"""Steps laid over each other: which process used how much of which stage."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.quickstart.bench_profile import (
    BINS,
    Reading,
    Sampled,
    Sampler,
    Step,
    around,
    by_stage,
    draw,
    lanes,
    seconds_of_stages,
    steps_of,
)

STEPS = [Step(10.0, 12.0, [("gen", 10.1), ("update", 11.0)]), Step(12.0, 16.0, [("gen", 12.0), ("update", 13.0)])]
READINGS = [
    Reading(9.9, "a", 1.0),  # before the first step
    Reading(10.05, "a", 0.5),  # before its first stage: counts to that
    Reading(11.5, "a", 0.25),
    Reading(13.5, "a", 0.75),
    Reading(12.5, "b", 0.5),
    Reading(16.0, "b", 1.0),  # behind the last step
]


def test_cpu_time_counts_to_its_stage_which_lasts_until_the_next_one_begins() -> None:
    assert by_stage(STEPS, READINGS) == {"a": {"gen": 0.25, "update": 0.5}, "b": {"gen": 0.25}}
    assert seconds_of_stages(STEPS) == pytest.approx({"gen": (0.9 + 1.0) / 2, "update": (1.0 + 3.0) / 2})
    assert around(Sampled(9.0, 17.0, READINGS), STEPS) == {"a": {"start": 1.0}, "b": {"end": 1.0}}


def test_lanes_are_shares_of_a_core_over_a_mean_step(tmp_path: Path) -> None:
    """The mean step takes 3 s, so a part of it 3 / BINS."""
    found = lanes(STEPS, READINGS)
    part = 3.0 / BINS
    assert found["b"][int(BINS * 0.125)] == pytest.approx(0.5 / 2 / part)
    assert sum(found["a"]) == pytest.approx((0.5 + 0.25 + 0.75) / 2 / part)
    draw(seconds_of_stages(STEPS), found, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_steps_are_read_from_a_run(tmp_path: Path) -> None:
    metrics = [{"step": n, "time": 100.0 + n, "timing_s/step": 0.5} for n in (1, 2)] + [{"step": 2, "val/score": 1.0}]
    stages = [["update", 0.2, 0.3, 0], ["gen", 0.1, 0.1, 0], ["inner", 0.1, 0.05, 1]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    timeline = [{"step": n, "stages": stages, "calls": []} for n in (1, 2, 3)]
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timeline))
    _, step = steps_of(tmp_path)
    assert (step.begin, step.end) == (101.5, 102.0)
    assert [name for name, _ in step.stages] == ["gen", "update"]
    assert [begin for _, begin in step.stages] == pytest.approx([101.6, 101.7])


def test_the_cpu_time_of_a_process_and_of_its_child_is_read() -> None:
    inner = "import time; end = time.time() + 60\nwhile time.time() < end: pass"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], start_new_session=True) as process:
        sampler = Sampler(process.pid)
        sampler.start()
        try:
            deadline = time.monotonic() + 120
            while not any(reading.process != "driver" for reading in sampler.readings):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, 9)
            sampler.stop.set()
            sampler.join()
    assert all(reading.cpu_s > 0 for reading in sampler.readings)
