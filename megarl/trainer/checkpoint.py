"""Checkpoints of a run: one folder per saved step, whose manifest is written last.

A folder without a manifest is an unfinished save, and readers ignore it.  The manifest is plain JSON; models and
optimizers are beside it as Megatron's sharded checkpoints, which can be loaded into another parallel layout.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl.config import Config

MANIFEST = "manifest.json"


class Saves(Protocol):
    """The part of a role that a checkpoint uses."""

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """A finished save.  `state` is the driver's: position in the prompts, KL controller, totals, seed."""

    folder: Path
    step: int  # finished iterations
    state: dict[str, Any]


def save(root: Path, step: int, roles: Mapping[str, Saves], state: dict[str, Any], *, keep: int) -> Checkpoint:
    """Write `root/step_N`, then delete all but the newest `keep` checkpoints.

    Checkpoints of later steps are deleted too: they are of a run that this one replaces, resumed from an earlier step.
    """
    folder = root / f"step_{step:08d}"
    _forget(folder)  # left by a run that died during the save, or that is resumed from an earlier step
    folder.mkdir(parents=True)
    for name, role in roles.items():
        role.save(folder / name)
    manifest = {"step": step, "roles": sorted(roles), "state": state}
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(manifest, indent=2))
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    partial.rename(folder / MANIFEST)
    kept = [c for c in all_checkpoints(root) if c.step <= step][-keep:]
    for other in all_checkpoints(root):
        if other not in kept:
            _forget(other.folder)
    return Checkpoint(folder, step, state)


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
    free = ("trainer.total_training_steps", "trainer.total_epochs", "trainer.logger", "trainer.resume_mode")
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
