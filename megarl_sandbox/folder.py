"""The folder of a program: its size, and its end, whatever the program made in it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from megarl_sandbox.kernel import look_at_files_as
from megarl_sandbox.limits import Limits

_GONE = (errno.ENOENT, errno.ENOTDIR)
_TOO_DEEP_OR_CLOSED = (errno.ENAMETOOLONG, errno.EACCES)
_logger = logging.getLogger(__name__)


def is_full(folder: str, limits: Limits, held: int = 0) -> bool:
    """Whether a folder has more files or bytes than it may, or one that cannot be looked into: too deep, or closed.

    What vanishes meanwhile does not count.  `held`: bytes of its files without a name (`held_bytes`).
    """
    waiting, files, size = [folder], 0, held
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    size += _size(entry)
                    if files > limits.files or size > limits.folder_bytes:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError as error:
            if error.errno in _TOO_DEEP_OR_CLOSED:
                return True
            if error.errno not in _GONE:
                raise
    return size > limits.folder_bytes


def held_bytes(group: int, folder: str, largest: int) -> int:
    """Bytes of the files that the processes of a group have deleted from a folder (its real path), and still keep.

    The size of one that is mapped and not open cannot be seen: it counts as `largest`.
    """
    if os.geteuid():  # a thread more would count for the limit of this user
        return _held_bytes(group, folder, largest)
    with ThreadPoolExecutor(1) as apart:  # who looks as another user does not die with its parent any more
        return apart.submit(_held_bytes, group, folder, largest).result()


def _held_bytes(group: int, folder: str, largest: int) -> int:
    held: dict[int, int] = {}  # number of a file -> its bytes
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            if os.getpgid(int(pid)) == group:
                held |= _held_by(f"/proc/{pid}", folder, largest)
    return sum(held.values())


def _held_by(process: str, folder: str, largest: int) -> dict[int, int]:
    owner, found = os.stat(process), {}
    look_at_files_as(owner.st_uid, owner.st_gid)  # root of a container may not look at processes of others
    for line in Path(process, "maps").read_text(errors="replace").split("\n"):  # only "\n" is escaped in names
        if f" {folder}/" in line and line.endswith(" (deleted)"):
            found[int(line.split()[4])] = largest
    for number in os.listdir(f"{process}/fd"):
        with suppress(OSError):  # it is closed
            file, name = os.stat(f"{process}/fd/{number}"), os.readlink(f"{process}/fd/{number}")
            if file.st_nlink == 0 and name.startswith(f"{folder}/"):
                found[file.st_ino] = file.st_blocks * 512
    return found


def remove(folder: str) -> None:
    """Remove a folder of a program that has ended; if that fails, it says so in the log.

    Folders in it move up to the top one by one: so no path is too long, however deep they were.
    """
    try:
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(folder)
    except OSError as error:
        _logger.warning("the folder of a program was not removed: %s", error)


def _empty(top: int) -> None:
    new_names = _new_names()
    moved = _clear(top, top, new_names)
    while moved:
        name = moved.pop()
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        try:
            moved += _clear(folder, top, new_names)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=top)


def _clear(folder: int, top: int, new_names: Iterator[str]) -> list[str]:
    """Remove the files of a folder, and move its folders to the top; returns their new names there."""
    moved = []
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        if is_folder:
            moved.append(next(new_names))
            _open_to_owner(name, folder)
            os.rename(name, moved[-1], src_dir_fd=folder, dst_dir_fd=top)
        else:
            os.unlink(name, dir_fd=folder)
    return moved


def _open_to_owner(name: str, folder: int) -> None:
    """Let the owner open a folder; never follows a link."""
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{found}", 0o700)
    finally:
        os.close(found)


def _new_names() -> Iterator[str]:
    """Names that no program can have given."""
    prefix = uuid.uuid4().hex
    return (f"{prefix}-{number}" for number in itertools.count())


def _size(entry: os.DirEntry[str]) -> int:
    """In bytes; 0 if it has vanished."""
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0
