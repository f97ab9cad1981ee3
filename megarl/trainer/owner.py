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
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megarl.durable_files import PRIVATE_FILE
from megarl.terminal import sentences

OWNER = "owner.json"  # {"host", "pid", "started"} of the last owner
LOCK = "owner.lock"
LEASE_S = 120.0  # for which the lock of an owner on another machine is waited for
_LOOK_S = 0.2  # for which looks (`has_owner`) may hold the lock
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run's folder, which is made if it is not there, and removed if nothing else was put into it.

    Raises ValueError, one sentence with the owner, if another process owns it, or if it may not be written.
    """
    lock = _locked(folder)
    try:
        _sign(folder / OWNER)
        yield
    finally:
        try:
            if {path.name for path in folder.iterdir()} <= {OWNER, LOCK}:  # a run that was refused has written nothing
                (folder / OWNER).unlink(missing_ok=True)
                (folder / LOCK).unlink(missing_ok=True)
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


def _locked(folder: Path) -> FileLock:
    lock = FileLock(folder / LOCK, mode=PRIVATE_FILE, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_LOOK_S)
    except Timeout:
        owner = _owner_of(folder)
        if owner.get("host", socket.gethostname()) == socket.gethostname():
            raise ValueError(_refusal(folder, owner)) from None
        _say(f"{folder} is used by {_named(owner)}, which may have died: waiting up to {LEASE_S:.0f} s")
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
        _say(f"warning: {folder}: its file system has no locks, so nothing keeps a second run out of it")
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


def _say(sentence: str) -> None:
    sentences(stderr=True).print(sentence)


def _named(owner: dict[str, Any]) -> str:
    if not owner.keys() >= {"pid", "host", "started"}:
        return "another process"
    return f"process {owner['pid']} on {owner['host']}, which began at {owner['started']}"


def _refusal(folder: Path, owner: dict[str, Any]) -> str:
    return (
        f"{folder} is used by {_named(owner)}; expected one run in a folder at a time: wait for its end, or set "
        "another trainer.experiment_name"
    )
