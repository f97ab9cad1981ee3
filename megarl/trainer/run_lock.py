"""A run's folder has one owner: the process that trains in it holds a lock, which the system frees when it ends.

The lock is `flock`, so a killed owner leaves none behind.  Linux makes it a lock on the server of an NFS, where it
excludes runs on other machines too; there, if a machine of an owner dies, the server keeps its lock until the lease
ends (90 s by default), so an owner on another machine is waited for.  Lustre must be mounted with `-o flock`.  On a
file system without locks the run says that nothing protects its folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megarl.config.schema import Trainer
from megarl.io.durable_files import ABSENT, PRIVATE_FILE
from megarl.io.own_folders import RUN_FOLDER, check_own
from megarl.io.terminal import say
from megarl.processes import watchdog

USERS_MASK = "MEGARL_USERS_UMASK"  # the variable of the mask of files that the user's shell has
RESULTS = ("hf", "adapter", "report.html", "README.md", "answers.md", "summary.json")
OWNER = "owner.json"  # {"host", "pid", "started"} of the last owner
LOCK = "owner.lock"
LEASE_S = 120.0  # for which the lock of an owner on another machine is waited for
_LOOK_S = 0.2  # for which looks (`has_owner`) may hold the lock
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def owned(folder: Path, *, trusts_others: bool = True, stays: bool = True) -> Iterator[None]:
    """Own a run's folder, which is made if it is not there, and removed if nothing else was put into it.

    This process ends, with exit code 1, if the folder is deleted, moved or replaced, since what is written then is
    lost, or gets into the folder of another run.  Raises ValueError, one sentence, if another process owns the folder,
    which it names, if it may not be written, or if others can change it and it does not `trusts_others`.  `stays`: the
    owner is known afterwards, also where there was none before.
    """
    folder = folder.absolute()
    lock, was_there = _locked(folder, trusts_others), (folder / OWNER).exists()
    try:
        with (folder / LOCK).open("ab") as ours, watchdog.looking(partial(_end_if_lost, folder, ours.fileno())):
            _sign(folder / OWNER)
            yield
    finally:
        try:
            is_empty = {path.name for path in folder.iterdir()} <= {OWNER, LOCK}
            if is_empty or not (was_there or stays):
                (folder / OWNER).unlink(missing_ok=True)
                (folder / LOCK).unlink(missing_ok=True)
            if is_empty:  # a run that was refused has written nothing
                folder.rmdir()
        finally:
            lock.release()


def has_owner(folder: Path) -> bool:
    """Whether a process trains in the folder now, on any machine that has its locks."""
    if not (folder / LOCK).is_file():
        return False
    with (folder / LOCK).open("rb") as lock:  # which may be where nothing can be written
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others may look too
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
    return False


def started_at(folder: Path) -> float:
    """When the last owner of a folder began, in seconds since 1970; 0 if that is not known."""
    try:
        return datetime.fromisoformat(_owner_of(folder)["started"]).timestamp()
    except (ValueError, KeyError):
        return 0.0


def _end_if_lost(folder: Path, ours: int) -> None:
    """End this process if the file of the lock, open as `ours`, is not in the folder any more."""
    try:
        is_there = os.path.samestat(os.fstat(ours), (folder / LOCK).stat())
    except ABSENT:
        is_there = False
    except OSError:  # the file server is away
        return
    if not is_there:
        say(f"the run stopped: {folder} was deleted, moved or replaced, so nothing more of this run is written there")
        os._exit(1)


def _locked(folder: Path, trusts_others: bool) -> FileLock:
    lock = FileLock(folder / LOCK, mode=PRIVATE_FILE, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not trusts_others:  # another user can have made it
            check_own(folder, RUN_FOLDER)
        lock.acquire(timeout=_LOOK_S)
    except Timeout:
        owner = _owner_of(folder)
        if owner.get("host", socket.gethostname()) == socket.gethostname():
            raise ValueError(_refusal(folder, owner)) from None
        say(f"{folder} is used by {_named(owner)}, which may have died: waiting up to {LEASE_S:.0f} s")
        try:
            lock.acquire(timeout=LEASE_S)
        except Timeout:
            raise ValueError(_refusal(folder, owner)) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS + _REFUSALS:
            raise
        if error.errno in _REFUSALS:
            raise ValueError(
                f"trainer.default_local_dir, trainer.experiment_name: {folder} cannot be written ({error.strerror}); "
                "expected a folder of this run's own"
            ) from error
        say(f"warning: {folder}: its file system has no locks, so nothing keeps a second run out of it")
    return lock


def _owner_of(folder: Path) -> dict[str, Any]:
    """What the last owner has written; empty if there is none, or it has not signed yet."""
    try:
        owner = json.loads((folder / OWNER).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _sign(file: Path) -> None:
    """A full disk loses only the words of a refusal, not the lock."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started})
    try:
        file.touch(PRIVATE_FILE)
        file.write_text(text)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def _named(owner: dict[str, Any]) -> str:
    if not owner.keys() >= {"pid", "host", "started"}:
        return "another process"
    return f"process {owner['pid']} on {owner['host']}, which began at {owner['started']}"


def _refusal(folder: Path, owner: dict[str, Any]) -> str:
    return (
        f"{folder} is used by {_named(owner)}; expected one run in a folder at a time: wait for its end, or set "
        "another trainer.experiment_name"
    )


@contextmanager
def shared(settings: Trainer) -> Iterator[None]:
    """With trainer.share_results, give the results the permissions of the user's umask at the end, also after an error.

    The run's folder, and those above it that the settings name, can then be passed through, but not listed.
    """
    try:
        yield
    finally:
        given = 0o777 & ~int(os.environ.get(USERS_MASK, "22"), 8)
        run, top = settings.run_dir, Path(settings.default_local_dir)
        for path in (run / name for name in RESULTS if settings.share_results and (run / name).exists()):
            for each in (path, *path.rglob("*")):
                each.chmod(given if each.is_dir() else given & 0o666)
            for folder in (run, *run.parents):
                if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(top):
                    folder.chmod(folder.stat().st_mode | (given & 0o111))
