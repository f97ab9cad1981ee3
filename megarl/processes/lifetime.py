"""Child processes: end them with their parent, give them names, and read the end of their log."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_NUM_LINES = 15
_bound = 0  # the process that has asked already; a fork of it has not


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to send SIGKILL when the parent ends. Linux only.

    The kernel watches the *thread* that started this process: start children from a thread that lives as long as they
    must live. If the parent ended before this call took effect, the process ends here.  A process that the fork server
    forked has asked at its start, whatever parent its program was told of.
    """
    global _bound
    if _bound == os.getpid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os._exit(1)
    _bound = os.getpid()


def name_this_process(name: str) -> None:
    """For `ps` and `top`, which show the first 15 bytes: forks have the command line of what forked them."""
    with contextlib.suppress(OSError):  # some containers have a /proc that cannot be written
        Path("/proc/self/comm").write_text(name[:15])


def last_lines(path: str | Path, start: int = 0, keep: str | None = None) -> str:
    """The end of a log, to append to an error; only the part from byte `start` on.

    The first earlier line that contains `keep`, in upper or lower case, is put before it.
    """
    file = Path(path)
    text = file.read_bytes()[start:].decode(errors="replace") if file.exists() else ""
    whole = text.splitlines()
    told = [line for line in whole[:-_NUM_LINES] if keep is not None and keep in line.lower()]
    lines = [*told[:1], *whole[-_NUM_LINES:]]
    return "".join(f"\n    {line}" for line in lines)
