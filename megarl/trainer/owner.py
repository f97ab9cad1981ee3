"""A run's folder has one owner: the process that trains in it holds a lock, which the system frees when it ends.

The lock is `flock` on `owner.json`, so a killed owner leaves none behind, whatever the file says.  Linux makes it a
lock of the whole file on NFS, where it excludes runs on other machines too; there, if a machine of an owner dies, the
server keeps its lock until the lease ends (90 s by default), so an owner on another machine is waited for.  Lustre
must be mounted with `-o flock`.  On a file system without locks the run says that nothing protects its folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megarl.durable_files import PRIVATE_FILE
from megarl.terminal import sentences

OWNER = "owner.json"  # {"host", "pid", "started"} of the last owner
LEASE_S = 120.0  # for which the lock of an owner on another machine is waited for
POLL_S = 1.0
_LOOK_S = 0.1
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Own a run's folder, which is made if it is not there, and removed if nothing else was put into it.

    Raises ValueError, one sentence with the owner, if another process owns it, or if it may not be written.
    """
    number = _locked(folder)
    try:
        _sign(number)
        yield
    finally:
        if [path.name for path in folder.iterdir()] == [OWNER]:  # a run that was refused has written nothing
            (folder / OWNER).unlink()
            folder.rmdir()
        os.close(number)


def has_owner(folder: Path) -> bool:
    """Whether a process trains in the folder now, on any machine that has its locks."""
    file = folder / OWNER
    if not file.is_file():
        return False
    with file.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment, which `_flock` waits for
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
    return False


def started_at(folder: Path) -> float:
    """When the last owner of a folder began, in seconds since 1970; 0 if that is not known."""
    try:
        return datetime.fromisoformat(json.loads((folder / OWNER).read_text())["started"]).timestamp()
    except (FileNotFoundError, ValueError, KeyError):  # none, or it has not signed yet
        return 0.0


def _locked(folder: Path) -> int:
    """The file of the owner, opened and locked."""
    began, has_said = time.monotonic(), False
    while True:
        number = _opened(folder)
        try:
            owner = _lock(number, folder)
            if owner is None and _is_there(folder / OWNER, number):  # else its owner has removed it since it was opened
                return number
            if owner is not None and (not _is_elsewhere(owner) or time.monotonic() - began > LEASE_S):
                raise ValueError(_refusal(folder, owner))
        except BaseException:
            os.close(number)
            raise
        os.close(number)
        if owner is not None:
            if not has_said:
                _say(f"{folder} is used by {_named(owner)}, which may have died: waiting up to {LEASE_S:.0f} s")
            has_said = True
            time.sleep(POLL_S)


def _opened(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / OWNER, os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise ValueError(
            f"trainer.default_local_dir, trainer.experiment_name: {folder} cannot be written ({error.strerror}); "
            "expected a folder of this run's own"
        ) from error


def _lock(number: int, folder: Path) -> dict[str, Any] | None:
    """Lock the file; what another owner has written if it has the lock, None if we have it."""
    try:
        _flock(number)
    except BlockingIOError:
        try:
            owner = json.loads(os.pread(number, 4096, 0))
        except ValueError:  # it has not signed yet
            return {}
        return owner if isinstance(owner, dict) else {}
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        _say(f"warning: {folder}: its file system has no locks, so nothing keeps a second run out of it")
    return None


def _flock(number: int) -> None:
    """Raises BlockingIOError if another process has the lock for longer than a look (`has_owner`) takes."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_LOOK_S)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _say(sentence: str) -> None:
    sentences(stderr=True).print(sentence)


def _is_there(file: Path, number: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(number))
    except FileNotFoundError:
        return False


def _sign(number: int) -> None:
    """A full disk loses only the words of a refusal, not the lock."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started})
    try:
        os.ftruncate(number, 0)
        os.pwrite(number, text.encode(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def _is_elsewhere(owner: dict[str, Any]) -> bool:
    return owner.get("host", socket.gethostname()) != socket.gethostname()


def _named(owner: dict[str, Any]) -> str:
    if not owner.keys() >= {"pid", "host", "started"}:
        return "another process"
    return f"process {owner['pid']} on {owner['host']}, which began at {owner['started']}"


def _refusal(folder: Path, owner: dict[str, Any]) -> str:
    return (
        f"{folder} is used by {_named(owner)}; expected one run in a folder at a time: wait for its end, or set "
        "another trainer.experiment_name"
    )
