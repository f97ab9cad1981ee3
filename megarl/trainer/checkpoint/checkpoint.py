"""Checkpoints of a run: one folder per saved step, which has its name only when all of it is on the disk.

A save is written as `.step_N.partial`.  Its manifest, written last, is plain JSON with size and SHA-256 of every file;
models and optimizers are beside it as sharded checkpoints, which can be loaded into another parallel layout.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megarl.config import Config
from megarl.config.schema import Trainer
from megarl.durable_files import facts_of
from megarl.trainer.checkpoint.manifest import MANIFEST, Damaged, faults_in, read_manifest

ROLLOUTS = "rollouts"  # folder of the finished groups that waited
EXPECTED = "expected auto, disable, or the folder of a checkpoint"
FILES_OF_RANKS = "*rank_*.safetensors"


class Saves(Protocol):
    """The part of a role that a checkpoint uses."""

    def save(self, folder: Path, *, in_background: bool) -> None:
        """Write the role; `in_background`: return when its ranks may train on."""
        ...

    def is_saved(self) -> bool:
        """Whether nothing of the last save is written any more; raises SaveError if it could not be written."""
        ...

    def faults(self, folder: Path) -> list[str]:
        """A sentence for each damaged file of the ranks."""
        ...

    def restore(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """A finished save.  `state` is the driver's: ledger of the prompts, KL controller, totals, seed."""

    folder: Path
    step: int  # finished iterations
    state: dict[str, Any]
    origin: str | None = None  # SHA-256 of the manifest at which trainer.resume_mode let its training begin, if any


def restore(checkpoint: Checkpoint, roles: Mapping[str, Saves], *, verify: bool) -> None:
    """Load the state of every role.  `verify`: before that, the ranks read all files and compare their SHA-256.

    Raises ValueError if the checkpoint has other roles, Damaged if a file has changed.
    """
    saved = read_manifest(checkpoint.folder)["roles"]
    if saved != sorted(roles):
        raise ValueError(
            f"trainer.resume_mode: {checkpoint.folder} holds {', '.join(saved)}, this run trains "
            f"{', '.join(sorted(roles))}; expected the same roles, or trainer.resume_mode=disable"
        )
    if verify:
        for name, role in roles.items():
            if faults := role.faults(checkpoint.folder / name):
                raise Damaged("; ".join(faults))
    for name, role in roles.items():
        role.restore(checkpoint.folder / name)


def find(
    resume_mode: str, root: Path, warn: Callable[[str], None], *, verify: bool, before: int | None = None
) -> Checkpoint | None:
    """auto: the newest whole checkpoint under `root`, if there is any; disable: none; otherwise that of a folder.

    If there are newer ones under `root` that come from that folder's, the newest of these: who is told the same again,
    as by Slurm or Kubernetes, goes on.  `warn` is told.
    All sizes are checked.  `verify`: SHA-256 too, except of the ranks' files, which `restore` has checked by the ranks.
    `before`: only earlier steps under `root` are taken.  `warn` is told of each damaged one that is passed over.
    Raises ValueError for a folder without a whole checkpoint, and if auto finds only damaged ones; Unreadable, because
    the run would replace a newer save that may be whole.
    """
    if resume_mode == "disable":
        return None
    folders = [folder for folder in folders_under(root) if before is None or step_of(folder) < before]
    if resume_mode != "auto":
        origin = _origin_at(resume_mode)
        own = {checkpoint.folder for checkpoint in all_checkpoints(root) if checkpoint.origin == origin}
        later, _ = _newest_whole([folder for folder in folders if folder in own], warn, verify=verify)
        if later is not None:
            how = f"it goes on from {later.folder.name}; for another run from there set another trainer.experiment_name"
            warn(f"trainer.resume_mode={resume_mode}: this run has gone on from there to {later.folder.name}, so {how}")
            return later
        return replace(_named(resume_mode, verify=verify), origin=origin)
    found, faults = _newest_whole(folders, warn, verify=verify)
    if found is not None:
        return found
    if folders or before is not None:
        what = "is whole" if before is None else f"before step {before} is whole"
        raise ValueError(
            f"trainer.resume_mode=auto: no checkpoint under {root} {what}{''.join(f' ({fault})' for fault in faults)}; "
            "expected one, or trainer.resume_mode=disable, which begins again"
        )
    return None


def _newest_whole(
    folders: list[Path], warn: Callable[[str], None], *, verify: bool
) -> tuple[Checkpoint | None, list[str]]:
    """The last of these folders without a fault, and the faults of the one looked at last."""
    faults: list[str] = []
    for folder in reversed(folders):
        if not (faults := faults_in(folder, reads=verify, skip=FILES_OF_RANKS)):
            return _read(folder), []
        warn(f"{folder.name} is passed over: {'; '.join(faults)}")
    return None, faults


def save_before(damaged: Checkpoint, error: Damaged, settings: Trainer, warn: Callable[[str], None]) -> Checkpoint:
    """The newest whole checkpoint before the one of which the ranks have found a file damaged.

    Raises the error if trainer.resume_mode names this one, ValueError if there is no earlier one.
    """
    if damaged.folder == Path(settings.resume_mode):
        raise error
    warn(f"{damaged.folder.name} is passed over: {error}")
    mode = "auto" if settings.resume_mode == "disable" else settings.resume_mode  # which begins anew only once
    found = find(mode, damaged.folder.parent, warn, verify=settings.verify_resume, before=damaged.step)
    assert found is not None, "find raises an error if there is none"
    return found


def _origin_at(resume_mode: str) -> str:
    """The origin of what is trained from the save in this folder."""
    if not (file := Path(resume_mode) / MANIFEST).is_file():
        raise ValueError(f"trainer.resume_mode={resume_mode}: no finished checkpoint there (no {MANIFEST}); {EXPECTED}")
    return facts_of(file)["sha256"]


def _named(resume_mode: str, *, verify: bool) -> Checkpoint:
    folder = Path(resume_mode)
    if faults := faults_in(folder, reads=verify, skip=FILES_OF_RANKS):
        raise ValueError(f"trainer.resume_mode={resume_mode}: {'; '.join(faults)}; {EXPECTED}")
    return _read(folder)


def folders_under(root: Path) -> list[Path]:
    """The folders of finished saves, damaged or not, oldest step first."""
    return sorted((f for f in root.glob("step_*") if f.name[len("step_") :].isdecimal()), key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name[len("step_") :])


def all_checkpoints(root: Path) -> list[Checkpoint]:
    """The checkpoints under `root` whose manifest is whole, oldest step first.  Raises Unreadable."""
    found = []
    for folder in folders_under(root):
        try:
            found.append(_read(folder))
        except Damaged:
            continue  # `find` and `megarl checkpoint verify` name it
    return found


def forget(folder: Path, warn: Callable[[str], None]) -> None:
    """Delete a save; it loses its name first, so that an interrupted deletion leaves none that is not whole.

    Raises OSError if it keeps its name.  `warn` is told of what cannot be deleted without a name.
    """
    doomed = folder.with_name(f".{folder.name}.deleted")
    delete(doomed, warn)  # what an interrupted deletion has left
    folder.rename(doomed)
    delete(doomed, warn)


def forget_left(root: Path, warn: Callable[[str], None]) -> None:
    """Delete what runs that died during a save or a deletion have left.  `warn` is told of what cannot be."""
    for left in root.glob(".step_*"):
        delete(left, warn)


def delete(path: Path, warn: Callable[[str], None]) -> None:
    """Delete a folder with all that is in it, or of a symbolic link the link; `warn` is told if that cannot be."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        warn(f"{path} cannot be deleted, and takes room: {error}")


def changes(before: Config, now: Config) -> list[str]:
    """Settings that differ, as `key old -> new`, except the run's length, its loggers, and what concerns its saves."""
    old, new = _flat(asdict(before)), _flat(asdict(now))
    free = {f"trainer.{key}" for key in ("total_training_steps", "total_epochs", "logger", "resume_mode", "async_save")}
    free |= {f"trainer.{key}" for key in ("save_freq", "save_every_s", "term_grace_s")}
    free |= {f"trainer.{key}" for key in ("verify_resume", "keep_every_steps", "keep_best")}
    changed = [key for key in {**new, **old} if old.get(key) != new.get(key) and key not in free]
    return [f"{key} {old.get(key)} -> {new.get(key)}" for key in changed]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _read(folder: Path) -> Checkpoint:
    content = read_manifest(folder)
    return Checkpoint(folder, content["step"], content["state"], content.get("origin"))
