"""What train and sft share: attempts of which each begins where the one before came to."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from config_helpers import load
from saved_runs import save, saver_of

from megarl.algo.finite import BadNumber
from megarl.group import RankError
from megarl.trainer.bad_numbers import BadNumbers
from megarl.trainer.checkpoint.checkpoint import Checkpoint
from megarl.trainer.preflight import preflight
from megarl.trainer.resumable import Plan, take_up, to_the_end


class Made(SimpleNamespace):
    """An attempt, to which there may be weak references."""


def test_the_attempt_before_is_gone_when_the_next_one_is_made(tmp_path: Path) -> None:
    """It holds groups that wait.  The first one fails at its start, the second one in a step."""
    made, saves = list[Any](), list[Any]()

    @contextmanager
    def opened(plan: Plan) -> Iterator[Any]:
        assert all(old() is None for old in made)
        saves.append(plan.resume)
        if len(saves) == 1:
            raise RankError("rank 0 did not start")
        attempt = Made(last_save=SimpleNamespace(step=5), finished_steps=7)
        made.append(ref(attempt))
        yield attempt

    def loop(attempt: Any) -> dict[str, Any]:
        if len(saves) < 3:
            raise RankError("rank 0 died")
        return {"steps": 3}

    allowed: list[int] = []
    infrastructure = SimpleNamespace(allow_restart=lambda _, steps: allowed.append(steps))
    plan = Plan(load(f"trainer.default_local_dir={tmp_path}"), 9, None)
    signals = SimpleNamespace(ends=False)
    assert to_the_end(plan, opened, loop, signals, infrastructure) == {"steps": 3}  # type: ignore[type-var, arg-type]
    assert [save and save.step for save in saves] == [None, None, 5]
    assert allowed == [0, 7]


def test_an_attempt_that_fails_at_its_start_does_not_make_the_next_one_begin_anew(tmp_path: Path) -> None:
    """With trainer.resume_mode=disable, which only the first one heeds."""
    config = load(f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=disable")
    saved, began = Checkpoint(tmp_path, 4, {}), list[Checkpoint | None]()

    @contextmanager
    def opened(plan: Plan) -> Iterator[Any]:
        began.append(plan.resume)
        if len(began) == 2:
            raise RankError("rank 0 did not start")
        yield SimpleNamespace(last_save=saved, finished_steps=5)

    def loop(_: Any) -> dict[str, Any]:
        if len(began) < 3:
            raise RankError("rank 0 died")
        return {}

    infrastructure, signals = SimpleNamespace(allow_restart=lambda *_: None), SimpleNamespace(ends=False)
    to_the_end(Plan(config, 9, None), opened, loop, signals, infrastructure)  # type: ignore[type-var, arg-type]
    assert began == [None, saved, saved]


def test_a_checkpoint_of_sft_is_refused_with_a_sentence(tmp_path: Path) -> None:
    config = load(f"trainer.default_local_dir={tmp_path}")
    save(saver_of(config.trainer.run_dir / "checkpoints"), 3, {"examples": {}, "loss": 1.0, "wall_s": 2.0})
    with pytest.raises(ValueError, match="is a checkpoint of `megarl sft`; expected one of `megarl train`"):
        preflight(config, 0.0)


@pytest.mark.parametrize(("error", "is_finished"), [(BadNumber("a loss"), True), (RankError("rank 0 died"), False)])
def test_a_save_is_finished_before_ranks_end_that_are_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_finished: bool
) -> None:
    story: list[str] = []
    plan = Plan(load(f"trainer.default_local_dir={tmp_path}"), 9, None)
    with pytest.raises(type(error)), ExitStack() as stack:
        stack.callback(story.append, "ranks end")
        saver = take_up(plan, {}, BadNumbers("stop", tmp_path), stack)
        monkeypatch.setattr(saver, "settle", lambda: story.append("save"))
        raise error
    assert story == ["save"] * is_finished + ["ranks end"]
