"""Limits of a sample that the kernel enforces, and a user that nothing else belongs to."""

from __future__ import annotations

import math
import os
import resource
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

_SPARE = 2_000_000_000  # user ids that nothing uses, where the kernel allows such numbers
_MANY, _FEW = 1 << 22, 1 << 12  # the kernel's highest process id; what a container may have
_NOBODY = 65534


@dataclass(frozen=True)
class Limits:
    """What a program may use.  Example: Limits(seconds=2)."""

    seconds: float = 5.0  # by the clock
    processor_seconds: float | None = None  # of a processor's time, of each process; None: as by the clock
    memory_bytes: int = 512 << 20  # of address space, of each process
    processes: int = 16  # processes and threads
    file_bytes: int = 16 << 20  # of each file
    folder_bytes: int = 64 << 20  # of all files
    files: int = 256  # files and folders
    open_files: int = 64
    output_bytes: int = 1 << 20  # of stdout, and of stderr


def apply(limits: Limits, others: int) -> None:
    """Set the limits of this process.  `others`: processes and threads of this user that are no part of the program."""
    given = limits.seconds if limits.processor_seconds is None else limits.processor_seconds
    seconds = math.ceil(given) + 1  # if they are the same, the clock ends a program first
    for what, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_NPROC, limits.processes + others),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _, most = resource.getrlimit(what)
        if most != resource.RLIM_INFINITY:
            value = min(value, most)
        resource.setrlimit(what, (value, value))


def spare_user(number: int) -> int:
    """A user id that nothing belongs to, another one for each `number` (a process id).

    A container may have 65536 ids only.
    """
    highest = max(int(start) + int(count) for start, _, count in _id_map())
    if highest > _SPARE + _MANY:
        return _SPARE + number
    return min(highest, _NOBODY) - 1 - number % _FEW


def become(user: int) -> None:
    """Take a user id, its group, and no further groups; capabilities are lost.  Raises OSError."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def own_tasks() -> int:
    """Processes and threads of this user, as RLIMIT_NPROC counts them: this process sees only a part of them.

    Those of the same user id in other containers of the machine count, too.  So the kernel is asked: a limit above the
    number lets one more process begin.  Not for root, to whom the limit does not apply.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    most = _MANY if hard == resource.RLIM_INFINITY else hard

    def allows_one_more(limit: int) -> bool:
        resource.setrlimit(resource.RLIMIT_NPROC, (min(limit, most), hard))
        try:
            os.posix_spawn("/", ["/"], {})  # a folder: the process begins, and ends because this is no program
        except BlockingIOError:
            return False
        except PermissionError:
            return True
        raise AssertionError("a folder was started as a program")

    try:
        high = 64
        while high < most and not allows_one_more(high):
            high *= 2
        return bisect_left(range(min(high, most)), True, key=lambda tasks: allows_one_more(tasks + 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))


def _id_map() -> list[list[str]]:
    return [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
