"""What surrounds a reward function in its process: limits, further variables, the sandbox, and an end for children."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import resource
import select
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from sys import getrefcount

import megarl_sandbox
from megarl_sandbox.kernel import PR_SET_CHILD_SUBREAPER, close_from, prctl


@dataclass(frozen=True)
class Surroundings:
    """Example: Surroundings(memory_mb=4096).set_up(timeout_s=5.0)."""

    memory_mb: int = 8192  # of a process
    file_mb: int = 1024  # of a file that it writes
    sandbox: str = "auto"  # see megarl_sandbox.use
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables; may be secret

    def set_up(self, timeout_s: float = 5.0) -> None:
        """Called once in a new process, by its main thread, after what it may keep is loaded.

        `timeout_s`: see time_limit_s.
        """
        _Process.timeout_s = timeout_s
        megarl_sandbox.use(self.sandbox)
        for what, megabytes in ((resource.RLIMIT_DATA, self.memory_mb), (resource.RLIMIT_FSIZE, self.file_mb)):
            _, most = resource.getrlimit(what)
            limit = megabytes << 20 if most == resource.RLIM_INFINITY else min(megabytes << 20, most)
            resource.setrlimit(what, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.setpgid(0, 0)
        _start_guard()
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # children of children that end become ours
        _Process.kept = _children()


def end_children() -> None:
    """End the processes that a sample left behind, and what these left behind.

    Those live on that Python itself keeps to start and watch others, and those of a pool, an executor, a manager, a
    multiprocessing.Process or a subprocess.Popen that the reward still holds: the next sample uses them.
    """
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    kept = _Process.kept | helpers
    for child in multiprocessing.active_children():
        if getrefcount(child) > 4:  # multiprocessing's set, this list, the variable and the argument are four
            kept.add(child.pid)
        else:
            child.kill()  # by its starter, which may be multiprocessing's fork server, a child of this process
    if _children() - kept:  # the usual case costs no look at all objects
        kept |= _held()
    while left := _children() - kept:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in left:
            os.waitpid(pid, 0)


def _held() -> set[int]:
    """The processes of Popen objects that something refers to, and not only subprocess, which keeps lost ones."""
    lost = set(map(id, subprocess._active))  # type: ignore[attr-defined]
    return {each.pid for each in gc.get_objects() if issubclass(type(each), subprocess.Popen) and id(each) not in lost}


def check_sandbox(name: str) -> None:
    """Raises ValueError if this machine has no sandbox of this kind."""
    try:
        megarl_sandbox.check(name)
    except megarl_sandbox.SandboxError as error:
        raise ValueError(f"reward.sandbox={name}: {error}") from error


def time_limit_s() -> float:
    """How long a sample may take in this process."""
    return _Process.timeout_s


class _Process:
    timeout_s = 5.0
    kept: set[int] = set()  # started by the reward's file when it was loaded


def _children() -> set[int]:
    """Those that have ended but were not waited for included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the usual case costs no look at all processes of the machine
        return set()
    return {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) == os.getpid()}


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended
        return None
    return int(stat.rpartition(")")[2].split()[1])  # the name before it may have spaces


def _start_guard() -> None:
    """Start a process that ends this one's group when this one or its starter is killed, and that is no child of it.

    A thread could not: a function may hold the interpreter's lock.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None and starter.pid is not None, "a reward's process is started by multiprocessing"
    group, watched = os.getpgrp(), [os.pidfd_open(os.getpid()), os.pidfd_open(starter.pid)]
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                os.setpgid(0, 0)
                kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 16) for descriptor in watched]  # above 0 and 1
                for number, descriptor in enumerate(kept):
                    os.dup2(descriptor, number)
                close_from(2)  # else it would keep pipes of the reward's process open
                select.select([0, 1], [], [])
                os.killpg(group, signal.SIGKILL)
        finally:
            os._exit(0)
    for descriptor in watched:
        os.close(descriptor)
    os.waitpid(between, 0)
