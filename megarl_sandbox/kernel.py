"""System calls that Python's standard library lacks, as functions that raise OSError."""

from __future__ import annotations

import contextlib
import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
Argument = int | bytes | None | ctypes.Array  # an address is an array or bytes

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000


def syscall(number: int, *arguments: Argument) -> int:
    """The system call of this number; raises OSError."""
    return _checked(_libc.syscall(ctypes.c_long(number), *map(_word, arguments)), f"system call {number}")


def prctl(option: int, *arguments: Argument) -> int:
    """prctl(2); raises OSError."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    return _checked(_libc.prctl(ctypes.c_int(option), *map(_word, padded)), f"prctl {option}")


def look_at_files_as(user: int, group: int) -> None:
    """From now on this thread of root, and no other, is one of that user where it looks at files; else nothing."""
    _libc.setfsgid(group)
    _libc.setfsuid(user)


def close_from(first: int) -> None:
    """Close all open descriptors of this process from a number on.

    Their highest possible number may be a thousand million, so only those that are open are looked at.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        if number >= first:
            with contextlib.suppress(OSError):  # that of the list itself is closed already
                os.close(number)


def unshare(flags: int) -> None:
    """unshare(2), which Python has from 3.12 on; raises OSError."""
    _checked(_libc.unshare(ctypes.c_int(flags)), f"unshare {flags:#x}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2); raises OSError."""
    kind_bytes = kind.encode() if kind else None
    words = (os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), options.encode())
    _checked(_libc.mount(*words), f"mount on {target}")


def unmount(target: str, flags: int) -> None:
    """umount2(2); raises OSError."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"umount {target}")


def _word(argument: Argument) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def _checked(value: int, what: str) -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return value
