"""Child processes: handles, names, their end with their parent, the end of their log, and whether memory ended them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from pathlib import Path
from typing import Protocol

from megarl.io.job_signals import leave_to_driver

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
KILLED = "killed by SIGKILL, as the kernel does when memory ends"
_COUNTERS, _LIMITS = ("memory.events", "memory.oom_control"), ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT = 2**60  # bytes: what the first version of cgroups writes for none is more
_PR_SET_PDEATHSIG = 1
_NUM_LINES = 15
_bound = 0  # the process that has asked already; a fork of it has not


class ProcessHandle(Protocol):
    """A process, or several that start and end together, such as the ranks of a machine."""

    @property
    def pid(self) -> int:
        """Process id on its own machine; of the first process if there are several; 0 if we did not start it."""

    def exit_code(self) -> int | None:
        """None while it runs.  With several processes: the code of one that failed, as soon as one has failed."""

    def log_tail(self) -> str:
        """The end of its log, to append to an error; with several processes, the log of the one that ended."""

    def end(self, grace_s: float) -> None:
        """End it and all its child processes; by force if it has not ended within `grace_s`.

        A second call does nothing.
        """


def die_with_parent(parent_pid: int, *, heeds_signals: bool = False) -> None:
    """Ask the kernel to send SIGKILL when the parent ends. Linux only.  `heeds_signals`: see job_signals.

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
    if not heeds_signals:
        leave_to_driver()
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


class MemoryEnd:
    """Example: memory = MemoryEnd(); process = start(); ...; print(memory.words(process.returncode))"""

    def __init__(self, root: Path = CGROUPS, proc: Path = PROC) -> None:
        """`root`: where cgroups of the first or the second version are mounted."""
        self._root, self._proc = root, proc
        _, self._before = self.count()

    def words(self, exit_code: int | None) -> str:
        """A line for the end of a log, if a process with this exit code was killed so since this object was made."""
        if exit_code != -signal.SIGKILL:
            return ""
        limits = [size for file in self._files(_LIMITS) if 0 < (size := _number(file, r"\d+")) < _NO_LIMIT]
        limit = f", limit {min(limits) / 1e6:,.0f} MB" if limits else ""
        who, kills = self.count()
        grew = kills > self._before
        return f"\n    {KILLED} (oom_kill of {who} {self._before} -> {kills}{limit})" if grew else ""

    def count(self) -> tuple[str, int]:
        """Processes that were killed so far, of whom: a cgroup counts its own, whoever took the memory."""
        who, file = next(
            (("this cgroup", own) for own in self._files(_COUNTERS)), ("this machine", self._proc / "vmstat")
        )
        return who, _number(file, r"^oom_kill (\d+)")

    def _files(self, names: tuple[str, ...]) -> list[Path]:
        """Those of the cgroup of this process, and of the ones above it."""
        folders: list[Path] = []
        for line in _text(self._proc / "self" / "cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(",") or not controllers:
                own = self._root / controllers / path.lstrip("/")  # the second version has no folder of a controller
                folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(self._root)]
        return [folder / name for folder in folders for name in names if (folder / name).is_file()]


def _number(file: Path, pattern: str) -> int:
    """0 if it is not there."""
    found = re.search(pattern, _text(file), re.M)
    return int(found[found.lastindex or 0]) if found else 0


def _text(file: Path) -> str:
    """Empty where the kernel has no such file, or does not show it."""
    try:
        return file.read_text()
    except OSError:
        return ""
