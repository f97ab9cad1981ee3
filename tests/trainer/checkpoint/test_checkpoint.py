"""Checkpoints of a run: what counts as one, which are kept, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megarl.trainer.checkpoint import checkpoint
from megarl.trainer.checkpoint.checkpoint import (
    MANIFEST,
    ROLLOUTS,
    Checkpoint,
    Saver,
    Saves,
    all_checkpoints,
    find,
    restore,
)


class Note:
    """A role whose whole state is one string in a file."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def save(self, folder: Path, *, in_background: bool) -> None:
        folder.mkdir()
        (folder / "note").write_text(self.text)

    def is_saved(self) -> bool:
        return True

    def restore(self, folder: Path) -> None:
        self.text = (folder / "note").read_text()


class Crash(Exception):
    """The power fails."""


def steps_under(root: Path) -> list[int]:
    return [c.step for c in all_checkpoints(root)]


def save(root: Path, step: int, roles: Mapping[str, Saves], state: dict[str, Any], *, keep: int) -> Checkpoint:
    saver = Saver(root, roles, keep=keep, in_background=False)
    saver.start(step)
    saver.describe(state)
    assert saver.last is not None
    return saver.last


def save_steps(root: Path, *steps: int, keep: int = 9) -> None:
    for step in steps:
        save(root, step, {"actor": Note(f"after {step}")}, {"seed": 0}, keep=keep)


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    state = {"prompts": {"epoch": 1, "row": 17}, "kl": {"value": 0.002}}
    made = save(tmp_path, 12, {"actor": Note("a"), "critic": Note("c")}, state, keep=2)
    found = find("auto", tmp_path)
    assert found == made == Checkpoint(tmp_path / "step_00000012", 12, state)
    roles: dict[str, Saves] = {"critic": Note(), "actor": Note()}
    restore(found, roles)
    assert {name: vars(role) for name, role in roles.items()} == {"actor": {"text": "a"}, "critic": {"text": "c"}}


def test_a_save_that_did_not_finish_does_not_exist(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)
    dies: Saves = mock.Mock(save=mock.Mock(side_effect=Crash))
    with pytest.raises(Crash):
        save(tmp_path, 5, {"actor": Note("half"), "critic": dies}, {}, keep=2)
    assert (tmp_path / "step_00000005" / "actor" / "note").exists()
    assert steps_under(tmp_path) == [3]
    found = find("auto", tmp_path)
    assert found is not None
    assert found.step == 3
    save_steps(tmp_path, 5)
    assert steps_under(tmp_path) == [3, 5], "the next try writes over what was left"


def test_the_manifest_is_written_after_every_role(tmp_path: Path) -> None:
    def nothing_yet(folder: Path, *, in_background: bool) -> None:
        assert not in_background
        assert not (folder.parent / MANIFEST).exists()

    save(tmp_path, 1, {"actor": mock.Mock(save=nothing_yet), "critic": mock.Mock(save=nothing_yet)}, {}, keep=1)
    content = json.loads((tmp_path / "step_00000001" / MANIFEST).read_text())
    assert content == {"step": 1, "roles": ["actor", "critic"], "state": {}}
    assert {p.name for p in (tmp_path / "step_00000001").iterdir()} == {MANIFEST, ROLLOUTS}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4, 6, keep=2)
    assert steps_under(tmp_path) == [4, 6]
    save_steps(tmp_path, 8, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000008"]


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    save_steps(tmp_path, 7, 100_000_000)
    assert steps_under(tmp_path) == [7, 100_000_000]


def test_a_run_begun_again_further_back_replaces_what_came_after(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4, 6, keep=3)
    save_steps(tmp_path, 3, keep=2)  # resumed from 2
    assert steps_under(tmp_path) == [2, 3], "else the next resume would take the step 6 of the abandoned run"


def test_a_crash_while_an_old_one_is_removed_leaves_no_broken_checkpoint(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    with mock.patch.object(shutil, "rmtree", side_effect=Crash), pytest.raises(Crash):
        save_steps(tmp_path, 4, keep=1)
    assert steps_under(tmp_path) == [4]


def test_resume_modes(tmp_path: Path) -> None:
    assert find("auto", tmp_path / "nothing") is None
    save_steps(tmp_path, 2, 4)
    assert find("disable", tmp_path) is None
    newest, chosen = find("auto", tmp_path), find(str(tmp_path / "step_00000002"), tmp_path)
    assert newest is not None
    assert chosen is not None
    assert (newest.step, chosen.step) == (4, 2)


def test_a_path_without_a_finished_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        find(str(tmp_path), tmp_path)
    assert str(caught.value) == (
        f"trainer.resume_mode={tmp_path}: no finished checkpoint there (no manifest.json); "
        "expected auto, disable, or the folder of a checkpoint"
    )


def test_other_roles_are_refused_before_any_is_restored(tmp_path: Path) -> None:
    made = save(tmp_path, 2, {"actor": Note("a"), "critic": Note("c")}, {}, keep=1)
    actor = Note("untouched")
    with pytest.raises(ValueError) as caught:
        restore(made, {"actor": actor})
    assert str(caught.value) == (
        f"trainer.resume_mode: {made.folder} holds actor, critic, this run trains actor; "
        "expected the same roles, or trainer.resume_mode=disable"
    )
    assert actor.text == "untouched"


def test_a_manifest_cut_short_never_gets_its_name(tmp_path: Path) -> None:
    with mock.patch.object(checkpoint.os, "fsync", side_effect=Crash), pytest.raises(Crash):
        save_steps(tmp_path, 1)
    assert steps_under(tmp_path) == []


class Slow(Note):
    """A role that is written in the background, until it is told that it is done."""

    done: bool | Exception = False

    def is_saved(self) -> bool:
        if isinstance(self.done, Exception):
            raise self.done
        return self.done


def test_a_background_save_is_a_checkpoint_when_every_role_is_written(tmp_path: Path) -> None:
    actor, critic = Slow("a"), Slow("c")
    saver = Saver(tmp_path, {"actor": actor, "critic": critic}, keep=1, in_background=True)
    assert saver.poll(), "nothing was started"
    saver.start(2)
    actor.done = True
    assert not saver.poll(), "its state is still to come, too"
    saver.describe({"seed": 7})
    assert not saver.poll()
    assert (steps_under(tmp_path), saver.last) == ([], None)
    critic.done = True
    assert saver.poll()
    assert saver.last == find("auto", tmp_path) == Checkpoint(tmp_path / "step_00000002", 2, {"seed": 7})


def test_the_next_save_begins_when_the_one_before_is_finished(tmp_path: Path) -> None:
    actor = Slow("a")
    saver = Saver(tmp_path, {"actor": actor}, keep=2, in_background=True)
    saver.start(2)
    saver.describe({})

    def written(_: float) -> None:
        actor.done = True

    with mock.patch.object(checkpoint.time, "sleep", written):
        saver.start(4)
    assert steps_under(tmp_path) == [2]
    assert (tmp_path / "step_00000004" / "actor" / "note").exists()


def test_a_background_save_that_fails_raises_its_error_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    actor = Slow("a")
    saver = Saver(tmp_path, {"actor": actor}, keep=1, in_background=True)
    saver.start(4)
    saver.describe({})
    actor.done = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        saver.poll()
    assert steps_under(tmp_path) == [2]


def test_what_a_run_left_that_died_during_a_save_goes_with_the_next_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 50)
    (tmp_path / "step_00000095" / "actor").mkdir(parents=True)
    save_steps(tmp_path, 100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000050", "step_00000100"]
