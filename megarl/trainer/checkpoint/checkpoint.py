"""Checkpoints of a run: one folder per saved step, which has its name only when all of it is on the disk.

A save is written as `.step_N.partial`.  Its manifest, written last, is plain JSON with size and SHA-256 of every file;
models and optimizers are beside it as sharded checkpoints, which can be loaded into another parallel layout.  Its text
ends with the SHA-256 of all before it, so that one changed bit anywhere is noticed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.config.schema import Trainer
from megarl.io.durable_files import ABSENT, THREADS, Unreadable, facts_of, fault_of, inside, write_text
from megarl.io.own_folders import check_own
from megarl.processes import watchdog

MANIFEST = "manifest.json"
SCORES = "scores.json"  # of the evaluations after the steps that were saved
ROLLOUTS = "rollouts"  # folder of the finished groups that waited
EXPECTED = "expected auto, disable, or the folder of a checkpoint"
FILES_OF_RANKS = "*rank_*.safetensors"
# Settings that a run may change when it goes on: its length, its loggers, its saves, and where its machines are.
_FREE = (
    "total_training_steps total_epochs logger prometheus_port resume_mode async_save save_freq save_every_s "
    "failed_saves term_grace_s verify_resume keep_every_steps keep_best master_addr master_port node_rank spare_nodes "
    "ports prometheus_host share_results trust_shared_folders"
)
FREE = {f"trainer.{key}" for key in _FREE.split()}


class Damaged(ValueError):
    """A file of a save is missing, cut or changed; the sentence names it."""


@dataclass(frozen=True)
class Checkpoint:
    """A finished save.  `state` is the driver's: ledger of the prompts, KL controller, totals, seed."""

    folder: Path
    step: int  # finished iterations
    state: dict[str, Any]
    origin: str | None = None  # SHA-256 of the manifest at which trainer.resume_mode let its training begin, if any


def to_resume(settings: Trainer, warn: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint from which a run goes on, as `find` says.  Raises ValueError too if others can change it."""
    saves, mode = settings.run_dir / "checkpoints", settings.resume_mode
    found = find(mode, saves, warn, verify=settings.verify_resume)
    return None if found is None else _checked(found, settings)


def find(
    resume_mode: str, root: Path, warn: Callable[[str], None], *, verify: bool, before: int | None = None
) -> Checkpoint | None:
    """auto: the newest whole checkpoint under `root`, if there is any; disable: none; otherwise that of a folder.

    If this run has already resumed from that folder, its newest later checkpoint, so that a requeued job continues.
    All sizes are checked.  `verify`: SHA-256 too, except of the ranks' files, which `restore` has checked by the ranks.
    `before`: only earlier steps under `root` count.  `warn` is called for each damaged one that is skipped.
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
    """The newest whole checkpoint before the one in which the ranks found a damaged file.

    Raises the error if trainer.resume_mode names this one, ValueError if there is no earlier one.
    """
    if damaged.folder == Path(settings.resume_mode):
        raise error
    warn(f"{damaged.folder.name} is passed over: {error}")
    mode = "auto" if settings.resume_mode == "disable" else settings.resume_mode  # which begins anew only once
    found = find(mode, damaged.folder.parent, warn, verify=settings.verify_resume, before=damaged.step)
    assert found is not None, "find raises an error if there is none"
    return _checked(found, settings)


def _checked(found: Checkpoint, settings: Trainer) -> Checkpoint:
    """Raises ValueError if others can change it, and the run does not trust them."""
    if not settings.trust_shared_folders:
        check_own(found.folder, f"trainer.resume_mode={settings.resume_mode}", contents=True)
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

    Raises OSError if it keeps its name.  `warn` is called if it cannot be deleted after that.
    """
    doomed = folder.with_name(f".{folder.name}.deleted")
    delete(doomed, warn)  # what an interrupted deletion has left
    folder.rename(doomed)
    delete(doomed, warn)


def forget_left(root: Path, warn: Callable[[str], None]) -> None:
    """Delete what runs that died during a save or a deletion have left; `warn` is called if that fails."""
    for left in root.glob(".step_*"):
        delete(left, warn)


def delete(path: Path, warn: Callable[[str], None]) -> None:
    """Delete a folder with all that is in it, or of a symbolic link the link; `warn` is called if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        warn(f"{path} cannot be deleted, and takes room: {error}")


def changes(before: Config, now: Config) -> list[str]:
    """Settings that differ, as `key old -> new`, except those that change no result (FREE)."""
    old, new = _flat(asdict(before)), _flat(asdict(now))
    changed = [key for key in {**new, **old} if old.get(key) != new.get(key) and key not in FREE]
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


@dataclass(frozen=True)
class Retention:
    """Which saves of a run are kept: the newest, milestones, and the best by validation score."""

    newest: int  # as many of the last steps
    every: int = -1  # each multiple of so many steps is a milestone; -1: none
    best: int = 0  # as many of the highest scores; of two equal ones the later
    first: int | None = None  # the step of the save that trainer.resume_mode names, while the command may come again

    @classmethod
    def of(cls, config: Config) -> Retention:
        trainer, named = config.trainer, Path(config.trainer.resume_mode)
        step, own = named.name.removeprefix("step_"), (trainer.run_dir / "checkpoints").resolve()
        first = int(step) if step.isdecimal() and named.parent.resolve() == own else None
        return cls(trainer.max_checkpoints_to_keep, trainer.keep_every_steps, trainer.keep_best, first)

    def reasons(self, steps: Collection[int], scores: Mapping[int, float]) -> dict[int, list[str]]:
        """step -> why it is kept: newest, milestone, best, first; none: it may be deleted.

        Example: Retention(1, every=20, best=1).reasons([10, 20, 30], {10: 0.9, 20: 0.8})
        -> {10: ["best"], 20: ["milestone"], 30: ["newest"]}
        """
        scored = sorted((step for step in steps if step in scores), key=lambda step: (scores[step], step))
        chosen: dict[str, Sequence[int | None]] = {
            "newest": sorted(steps)[-self.newest :],
            "milestone": [step for step in steps if self.every > 0 and step % self.every == 0],
            "best": scored[-self.best :] if self.best else [],
            "first": [self.first],
        }
        return {step: [reason for reason, kept in chosen.items() if step in kept] for step in sorted(steps)}


def read_scores(root: Path) -> dict[int, float]:
    """step -> validation score.  Raises ValueError for a file that is damaged."""
    file = root / SCORES
    if not file.exists():
        return {}
    try:
        return {int(step): float(score) for step, score in json.loads(file.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: it cannot be read ({error}); expected an unchanged file, or none") from error


def write_scores(root: Path, scores: Mapping[int, float]) -> None:
    write_text(root / SCORES, json.dumps({str(step): scores[step] for step in sorted(scores)}))


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """`content["files"]`: the Facts of each other file in the folder, by its name relative to it."""
    write_text(folder / MANIFEST, _manifest_text(content))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises Damaged if it is missing, or not what was written; Unreadable if that cannot be said."""
    file = folder / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        del content["sha256"]
        intact = _manifest_text(content) == text
    except ABSENT:
        raise Damaged(f"{file} is missing") from None
    except OSError as error:
        raise Unreadable.of(file, error) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise Damaged(f"{file} is damaged, or of another version of megarl")
    return content


def faults_in(folder: Path, *, reads: bool, skip: str = "") -> list[str]:
    """A sentence for each damaged file of a save, its manifest included.

    `reads`: also compare digests, for which all of a file is read, except of files whose name has the pattern `skip`.
    Raises Unreadable.
    """
    try:
        files = read_manifest(folder)["files"]
    except Damaged as error:
        return [str(error)]

    def look(name: str) -> str | None:
        try:
            inside(folder, name)
        except ValueError as error:
            return str(error)
        fault = fault_of(folder / name, files[name], reads=reads and not fnmatchcase(name, skip))
        return fault and f"{folder / name} {fault}"

    with ThreadPoolExecutor(THREADS) as threads:  # they read and digest beside each other
        faults: list[str] = []
        for sentence in threads.map(look, files):
            watchdog.heartbeat()
            if sentence:
                faults.append(sentence)
        return faults


def _manifest_text(content: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)
