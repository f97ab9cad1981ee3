"""Saves the checkpoints of a run: under a temporary name, on the disk before they count, the old ones deleted.

A save that fails (full disk, no permission) is deleted.  The run goes on if an earlier save is there, because the disk
may have room when the next one is due.  If there is none, or too many have failed in a row, nothing would keep what is
trained: then a save is owed, and the run waits for room to make it.  Where waiting cannot help, it stops.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megarl.data.groups import save_groups
from megarl.group.failures import RankError
from megarl.io.durable_files import (
    MAY_PASS,
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    StorageError,
    Unreadable,
    kept,
    number_of,
    sync,
)
from megarl.io.rank_files import UNWRITTEN, facts_under
from megarl.processes import watchdog
from megarl.roles.handles import Role, SaveError
from megarl.samples.sample import Sample
from megarl.trainer.checkpoint.checkpoint import (
    ROLLOUTS,
    Checkpoint,
    Retention,
    all_checkpoints,
    delete,
    folders_under,
    forget,
    forget_left,
    read_scores,
    write_manifest,
    write_scores,
)

POLL_S = 0.05  # between two questions whether all files are written
SAY_S = 60.0  # between two sentences about a save that is waited for


class Saver:
    """Saves the checkpoints of a run, one at a time: start (models), describe (the driver's state), poll or finish."""

    def __init__(
        self,
        root: Path,
        roles: Mapping[str, Role],
        retention: Retention,
        *,
        in_background: bool,
        allowed: int = 0,
        limit_s: float,
        warn: Callable[[str], None],
        origin: str | None = None,
    ) -> None:
        """`root`: in the run's folder, whose logs (`*.jsonl`) are on the disk before a save counts.

        `in_background`: ranks train on while they write.  `allowed`: saves in a row that may fail before one is owed,
        0: any number.  `limit_s`: how long training waits for a save at most.  `origin`: that of the saves.
        """
        self.last: Checkpoint | None = None  # of the finished ones
        self.failed = 0  # saves since the start
        self._in_row, self._allowed = 0, allowed
        self._owed: StorageError | None = None  # why a save is owed
        self._root = root
        self._roles = roles
        self._retention = retention
        self._in_background = in_background
        self._limit_s = limit_s
        self._warn = warn
        self._origin = origin
        self._pending: tuple[int, dict[str, Any] | None] | None = None
        self._writing: list[Role] = []  # the roles of the pending one

    def start(self, step: int) -> None:
        """Begin the save of the models as they are after `step` iterations, when the one before is finished.

        Raises SaveError, as all methods do, for a save that may not fail and for which no room helps; RankError, as
        all that wait, for one that is not written within the limit: a file system can hold a write without end.
        """
        self.finish()
        try:
            forget_left(self._root, self._warn)
            folder = self._partial(step)
            self._root.mkdir(PRIVATE_FOLDER, exist_ok=True)  # without the run's folder, which another run may make anew
            folder.mkdir(PRIVATE_FOLDER)
        except OSError as error:
            return self._fail(step, error)
        self._pending, self._writing = (step, None), []
        for name, role in self._roles.items():
            self._writing.append(role)
            role.save(folder / name, in_background=self._in_background)

    def describe(self, state: dict[str, Any], waiting: Mapping[int, Sequence[Sample]] | None = None) -> None:
        """Set the driver's state of the save that was started, unless it has failed.

        `waiting`: finished groups, by visit.
        """
        if self._pending is None:
            return
        step = self._pending[0]
        try:
            save_groups(self._partial(step) / ROLLOUTS, waiting or {})
        except UNWRITTEN as error:
            return self._fail(step, error)
        self._pending = step, state
        if not self._in_background:
            self.finish()

    def poll(self) -> bool:
        """Finish the save if all its files are written; returns whether none is left to finish."""
        if self._pending is None:
            return True
        step, state = self._pending
        try:
            if state is None or not all(role.is_saved() for role in self._roles.values()):
                return False
            self.last = self._commit(step, state)
            self._in_row, self._owed = 0, None
        except (SaveError, OSError, ValueError) as error:
            self._fail(step, error)
        self._pending = None
        return True

    def finish(self) -> None:
        """Wait until no save is left to finish."""
        assert self._pending is None or self._pending[1] is not None, "the checkpoint has no state yet"
        if self._pending is not None:
            self._wait(self._pending[0], self.poll)

    def insist(self, save: Callable[[], None]) -> None:
        """If a save is owed, call `save`, which starts and describes one of the state now, until it is kept.

        Raises StorageError if there is no room for it within the time for which the run waits.
        """

        def again() -> None:
            save()
            self.finish()
            if self._owed is not None:
                raise self._owed

        if self._owed is not None:
            self.finish()  # the one that is being written may do
        if self._owed is not None:
            kept(self._root, again)

    def give_way(self) -> None:
        """Delete the save that is being written, since the run itself has no room, for which it waits."""
        watchdog.heartbeat()
        if self._pending is not None:
            self._fail(self._pending[0], StorageError(errno.ENOSPC, "the run's own files need its room"))

    def settle(self) -> None:
        """As `finish`, for a run that ends for another reason: a save without a state, or that fails, is left."""
        if self._pending is None or self._pending[1] is None:
            return
        try:
            self.finish()
        except (SaveError, RankError) as error:
            self._warn(str(error))

    def note_score(self, step: int, score: float) -> None:
        """Remember the validation score after `step` iterations, by which the best saves are kept."""
        if self._retention.best == 0:
            return
        try:
            saved = {checkpoint.step for checkpoint in all_checkpoints(self._root)} | {step}
            write_scores(self._root, {s: v for s, v in {**read_scores(self._root), step: score}.items() if s in saved})
        except (OSError, ValueError) as error:
            self._warn(f"the score of step {step} could not be kept, so it cannot be among the best: {error}")

    def _commit(self, step: int, state: dict[str, Any]) -> Checkpoint:
        """Write the manifest, give the folder its name, then delete what is not to be kept."""
        partial, folder = self._partial(step), self._root / f"step_{step:08d}"
        for file in (partial / ROLLOUTS).iterdir():
            file.chmod(PRIVATE_FILE)
        roles = sorted(self._roles)
        content = {"step": step, "saved": datetime.now(UTC).isoformat(timespec="seconds"), "roles": roles}
        content |= {"origin": self._origin}
        for log in (*self._root.parent.glob("*.jsonl"), self._root.parent):
            sync(log)
        write_manifest(partial, content | {"files": facts_under(partial, *roles), "state": state})
        for parent in (*(path for path in partial.rglob("*") if path.is_dir()), partial):
            sync(parent)
        if os.path.lexists(folder):  # of a run that this one has resumed from an earlier step
            forget(folder, self._warn)
        partial.rename(folder)
        sync(self._root)
        self._prune(step)
        return Checkpoint(folder, step, state, self._origin)

    def _prune(self, step: int) -> None:
        """Delete what is not to be kept, damaged saves, and those of later steps.

        Those are of a run that this one replaces, resumed from an earlier step.  If one cannot be read, all are left.
        """
        try:
            scores = read_scores(self._root)
            whole = [c.step for c in all_checkpoints(self._root) if c.step <= step]
            kept = {f"step_{s:08d}" for s, reasons in self._retention.reasons(whole, scores).items() if reasons}
            for folder in folders_under(self._root):
                if folder.name not in kept:
                    forget(folder, self._warn)
        except (OSError, ValueError) as error:
            self._warn(f"old checkpoints under {self._root} are left: {error}")

    def _fail(self, step: int, error: Exception) -> None:
        """Count a failed save, and delete it when no rank writes to it any more.

        Raises SaveError if it may not fail, and for no lack of room.
        """
        self.failed, self._in_row = self.failed + 1, self._in_row + 1
        self._pending = None
        self._wait(step, lambda: all(_is_over(role) for role in self._writing))
        self._writing = []
        delete(self._partial(step), self._warn)
        sentence = f"the save of step {step} failed and was deleted: {error}"
        try:
            earlier = [checkpoint.folder for checkpoint in all_checkpoints(self._root)]
        except Unreadable:
            earlier = folders_under(self._root)
        if earlier and (self._in_row < self._allowed or not self._allowed):
            self._warn(f"{sentence}; the run goes on, and {earlier[-1].name} is its newest checkpoint")
            return
        none = "there is no earlier one to go on from"
        many = f"{self._in_row} in a row have failed (trainer.failed_saves={self._allowed})"
        sentence = f"{sentence}; {many if earlier else none}"
        if (number := number_of(error)) not in MAY_PASS:
            raise SaveError(sentence) from error
        if self._owed is None:
            self._warn(sentence)
        self._owed = StorageError(number, sentence)

    def _wait(self, step: int, is_over: Callable[[], bool]) -> None:
        began = said = time.monotonic()
        while not is_over():
            now = time.monotonic()
            if now - began > self._limit_s:
                self._pending, self._writing = None, []
                raise RankError(
                    f"the ranks did not write the save of step {step} within {self._limit_s:g} s, in which training "
                    "waited for it (trainer.call_timeout_s)"
                )
            if now - said > SAY_S:
                said = now
                self._warn(f"training has waited {now - began:.0f} s for the save of step {step}")
            time.sleep(POLL_S)

    def _partial(self, step: int) -> Path:
        return self._root / f".step_{step:08d}.partial"


def _is_over(role: Role) -> bool:
    try:
        return role.is_saved()
    except SaveError:
        return True
