from pathlib import Path

from megarl.metrics.trackers.run import Run
from megarl.metrics.trackers.status import StatusTracker, read_status


def test_the_status_names_the_stage_its_beginning_and_the_last_finished_step(tmp_path: Path) -> None:
    times = iter([10.0, 10.5, 11.5, 12.0])
    tracker = StatusTracker(Run(tmp_path, "megarl", "try", {}, 40, resume_step=6), clock=lambda: next(times))
    assert read_status(tmp_path) is None
    tracker.stage("gen", 1, 8)
    seen = read_status(tmp_path)
    assert seen is not None and (seen["step"], seen["total_steps"], seen["stage"], seen["since"]) == (6, 40, "gen", 10)
    assert (seen["done"], seen["total"]) == (1, 8)
    tracker.stage("gen", 2, 8)  # half a second later: not written
    assert read_status(tmp_path) == seen
    tracker.stage("gen", 3, 8)
    assert read_status(tmp_path) == seen | {"done": 3}
    tracker.log(7, {})
    tracker.close()
    ended = read_status(tmp_path)
    assert ended is not None and (ended["step"], ended["stage"], ended["since"]) == (7, "ended", 12)
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]
