"""Everything a run needs to go on after a crash: one folder a step, whose manifest is written last.

A folder without a manifest is an unfinished save and does not exist for a reader.  The manifest is plain JSON; models
and optimizers lie beside it as Megatron's sharded checkpoints, which load into another layout too.
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
    """A role, as far as a checkpoint cares."""

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """A finished save.  `state` is what the driver put in: step, data position, KL controller, seed."""

    folder: Path
    step: int  # iterations done
    state: dict[str, Any]


def save(root: Path, step: int, roles: Mapping[str, Saves], state: dict[str, Any], *, keep: int) -> Checkpoint:
    """Write `root/step_N`, then forget all but the newest `keep`.

    Later steps under `root` are forgotten too: they belong to a run that this one, begun again further back, replaces.
    """
    folder = root / f"step_{step:08d}"
    _forget(folder)  # of a run that died while it wrote, or that was resumed from an older step
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
    """Fill every role.  Raises ValueError where the checkpoint was made by other roles."""
    saved = json.loads((checkpoint.folder / MANIFEST).read_text())["roles"]
    if saved != sorted(roles):
        raise ValueError(
            f"trainer.resume_mode: {checkpoint.folder} holds {', '.join(saved)}, this run trains "
            f"{', '.join(sorted(roles))}; expected the same roles, or trainer.resume_mode=disable"
        )
    for name, role in roles.items():
        role.restore(checkpoint.folder / name)


def find(resume_mode: str, root: Path) -> Checkpoint | None:
    """auto: the newest checkpoint under `root`, if there is one; disable: none; else the folder of a checkpoint."""
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
    """Settings that differ, as `key old -> new`, but for those that only say how long and where to."""
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
    """Remove a checkpoint, if it is there; the manifest first, so that what an interruption leaves does not count."""
    (folder / MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _read(folder: Path) -> Checkpoint | None:
    manifest = folder / MANIFEST
    if not manifest.exists():
        return None
    content = json.loads(manifest.read_text())
    return Checkpoint(folder, content["step"], content["state"])
