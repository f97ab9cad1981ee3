"""Checkpoints of a run: one folder per saved step, whose manifest is written last.

A folder without a manifest is an unfinished save, and readers ignore it.  The manifest is plain JSON; models and
optimizers are beside it as Megatron's sharded checkpoints, which can be loaded into another parallel layout.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.config import Config
from megarl.data.groups import save_groups
from megarl.sample import Sample

MANIFEST = "manifest.json"
ROLLOUTS = "rollouts"  # folder of the finished groups that waited
POLL_S = 0.05  # between two questions whether all files are written


class Saves(Protocol):
    """The part of a role that a checkpoint uses."""

    def save(self, folder: Path, *, in_background: bool) -> None:
        """Write the role; `in_background`: return when its ranks may train on."""
        ...

    def is_saved(self) -> bool:
        """Whether the last save is complete on every rank; raises its error."""
        ...

    def restore(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """A finished save.  `state` is the driver's: ledger of the prompts, KL controller, totals, seed."""

    folder: Path
    step: int  # finished iterations
    state: dict[str, Any]


class Saver:
    """Saves the checkpoints of a run, one at a time: start (models), describe (the driver's state), poll or finish."""

    def __init__(self, root: Path, roles: Mapping[str, Saves], *, keep: int, in_background: bool) -> None:
        """`keep`: number of newest checkpoints that are kept.  `in_background`: ranks train on while they write."""
        self.last: Checkpoint | None = None  # of the finished ones
        self._root, self._roles, self._keep, self._in_background = root, roles, keep, in_background
        self._pending: tuple[int, dict[str, Any] | None] | None = None

    def start(self, step: int) -> None:
        """Begin `root/step_N` with the models as they are after `step` iterations, when the one before is finished."""
        self.finish()
        folder, finished = self._folder(step), {c.folder for c in all_checkpoints(self._root)}
        for left in {folder, *self._root.glob("step_*")} - (finished - {folder}):  # by runs that died during a save
            _forget(left)
        folder.mkdir(parents=True)
        for name, role in self._roles.items():
            role.save(folder / name, in_background=self._in_background)
        self._pending = step, None

    def describe(self, state: dict[str, Any], waiting: Mapping[int, Sequence[Sample]] | None = None) -> None:
        """Set the driver's state of the checkpoint that was started; `waiting`: finished groups, by visit."""
        assert self._pending is not None, "no checkpoint was started"
        step = self._pending[0]
        save_groups(self._folder(step) / ROLLOUTS, waiting or {})
        self._pending = step, state
        if not self._in_background:
            self.finish()

    def poll(self) -> bool:
        """Finish the checkpoint if all its files are written; returns whether none is left to finish.

        Raises the error of a rank that could not write.
        """
        if self._pending is None:
            return True
        step, state = self._pending
        if state is None or not all(role.is_saved() for role in self._roles.values()):
            return False
        self._pending, self.last = None, self._commit(step, state)
        return True

    def finish(self) -> None:
        """Wait until no checkpoint is left to finish."""
        assert self._pending is None or self._pending[1] is not None, "the checkpoint has no state yet"
        while not self.poll():
            time.sleep(POLL_S)

    def _commit(self, step: int, state: dict[str, Any]) -> Checkpoint:
        """Write the manifest, then delete all but the newest checkpoints.

        Checkpoints of later steps are deleted too: they are of a run that this one replaces, resumed from an earlier
        step.
        """
        folder = self._folder(step)
        manifest = {"step": step, "roles": sorted(self._roles), "state": state}
        partial = folder / f".{MANIFEST}.partial"
        partial.write_text(json.dumps(manifest, indent=2))
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.rename(folder / MANIFEST)
        kept = [c for c in all_checkpoints(self._root) if c.step <= step][-self._keep :]
        for other in all_checkpoints(self._root):
            if other not in kept:
                _forget(other.folder)
        return Checkpoint(folder, step, state)

    def _folder(self, step: int) -> Path:
        return self._root / f"step_{step:08d}"


def restore(checkpoint: Checkpoint, roles: Mapping[str, Saves]) -> None:
    """Load the state of every role.  Raises ValueError if the checkpoint has other roles."""
    saved = json.loads((checkpoint.folder / MANIFEST).read_text())["roles"]
    if saved != sorted(roles):
        raise ValueError(
            f"trainer.resume_mode: {checkpoint.folder} holds {', '.join(saved)}, this run trains "
            f"{', '.join(sorted(roles))}; expected the same roles, or trainer.resume_mode=disable"
        )
    for name, role in roles.items():
        role.restore(checkpoint.folder / name)


def find(resume_mode: str, root: Path) -> Checkpoint | None:
    """auto: the newest checkpoint under `root`, if there is one; disable: none; otherwise the folder of a checkpoint.

    Raises ValueError for a folder without a finished checkpoint.
    """
    if resume_mode == "disable":
        return None
    if resume_mode == "auto":
        found = all_checkpoints(root)
        return found[-1] if found else None
    checkpoint = _read(Path(resume_mode))
    if checkpoint is None:
        raise ValueError(
            f"trainer.resume_mode={resume_mode}: no finished checkpoint there (no {MANIFEST}); expected auto, disable, "
            "or the folder of a checkpoint"
        )
    return checkpoint


def all_checkpoints(root: Path) -> list[Checkpoint]:
    """The finished checkpoints under `root`, oldest step first."""
    found = [_read(folder) for folder in sorted(root.glob("step_*"))]
    return sorted((c for c in found if c is not None), key=lambda c: c.step)


def changes(before: Config, now: Config) -> list[str]:
    """Settings that differ, as `key old -> new`, except the run's length, its loggers and its resume mode."""
    old, new = _flat(asdict(before)), _flat(asdict(now))
    free = {f"trainer.{key}" for key in ("total_training_steps", "total_epochs", "logger", "resume_mode", "async_save")}
    changed = [key for key in {**new, **old} if old.get(key) != new.get(key) and key not in free]
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in changed]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _forget(folder: Path) -> None:
    """Delete a checkpoint, if it exists; the manifest first, so that an interrupted deletion leaves no valid one."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _read(folder: Path) -> Checkpoint | None:
    manifest = folder / MANIFEST
    if not manifest.exists():
        return None
    content = json.loads(manifest.read_text())
    return Checkpoint(folder, content["step"], content["state"])
