"""Starts programs of this package at once: they are forked from a warm process, which has imported what they need.

Ranks, servers and collectors of a run would each import torch, transformers and Megatron for themselves, which takes
seconds of a core.  `warm_up` starts one process that imports them while the caller goes on, and `start_program` asks it
for a fork that becomes the program: with variables, files and a session of its own, as `subprocess` would start it.
Without a warm process, and for any other program, `start_program` is `subprocess`.

The warm process has only the allowed variables of this one, so that a package which reads another one while it is
imported, as torch does TORCH_LOGS, does not find it.  It ends with the thread that started it, and its
programs end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

from megarl.sandbox.environment import allowed_variables

NUMBER = struct.Struct("!i")  # a size, a process id, or an exit code
_KILLED = -signal.SIGKILL
_ROOM = 4096  # bytes
# glibc asks the kernel for huge pages (madvise): tensors in pages of 2 MiB cause fewer TLB misses than in 4 KiB.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


class Program(Protocol):
    """A started program: what is used of subprocess.Popen."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class _Fork:
    """A forked program, as a Program.  Its exit code comes through a pipe from the warm process, whose child it is."""

    def __init__(self, pid: int, exit_codes: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._exit_codes, self._command = exit_codes, list(command)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if (code := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0)
        return code

    def _look(self, timeout: float | None) -> int | None:
        timeout = None if timeout is None else max(0.0, timeout)
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return None  # another thread waits for it
        try:
            if self.returncode is None:
                ready = select.poll()
                ready.register(self._exit_codes, select.POLLIN)
                if ready.poll(None if timeout is None else timeout * 1000):
                    said = os.read(self._exit_codes, NUMBER.size)
                    # Nothing: the warm process was killed, and its programs with it.
                    self.returncode = NUMBER.unpack(said)[0] if said else _KILLED
                    os.close(self._exit_codes)
            return self.returncode
        finally:
            self._lock.release()

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _WarmProcess:
    def __init__(self, programs: Sequence[str], imports: Sequence[str]) -> None:
        self.programs = frozenset(programs)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # Forks write their own command line over this one, for which it needs room.
                [sys.executable, "-m", "megarl.processes.fork_server", str(theirs.fileno()), " " * _ROOM],
                stdin=subprocess.DEVNULL,
                env={
                    **allowed_variables(),
                    "CUDA_VISIBLE_DEVICES": "",  # a process that has used a GPU cannot be forked; imports may use one
                    "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _HUGE_PAGES),
                },
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._socket, self._lock = ours, threading.Lock()
        self._is_asking = False  # stays so where a signal interrupts: a later request would get the reply to that one
        ours.sendall(message(list(imports)))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self, words: Sequence[str], env: Mapping[str, str], files: Mapping[int, int], command: Sequence[str]
    ) -> _Fork:
        """`words`: the module and its arguments; `files`: numbers there -> here.

        Raises OSError if it has ended, or cannot fork.
        """
        exit_codes, theirs = os.pipe()
        try:
            wanted = {"words": list(words), "env": dict(env), "files": list(files), "folder": os.getcwd()}
            with self._lock:
                if self._is_asking:
                    raise ConnectionResetError("a request to the warm process was interrupted")
                self._is_asking = True
                socket.send_fds(self._socket, [b"\0"], [theirs, *files.values()])
                self._socket.sendall(message(wanted))
                said = self._socket.recv(NUMBER.size, socket.MSG_WAITALL)
                self._is_asking = False
            if len(said) < NUMBER.size:
                raise ConnectionResetError("the warm process has ended")
            if (pid := NUMBER.unpack(said)[0]) < 0:
                raise OSError(-pid, f"the warm process cannot fork: {os.strerror(-pid)}")
        except BaseException:
            os.close(exit_codes)
            raise
        finally:
            os.close(theirs)
        return _Fork(pid, exit_codes, command)

    def end(self) -> None:
        """The programs that it started end with it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def message(said: object) -> bytes:
    """JSON, after its size."""
    body = json.dumps(said).encode()
    return NUMBER.pack(len(body)) + body


_warm: _WarmProcess | None = None


def warm_up(programs: Sequence[str], imports: Sequence[str]) -> None:
    """Start the warm process; returns at once.  Does nothing if there is one.

    `programs`: modules with a function `main`, which forks can become.  `imports`: what it imports.  Call it in a
    thread that lives as long as all that is started: see `lifetime`.  For a machine, or a run, without GPUs.
    """
    global _warm
    if _warm is None or not _warm.alive:
        _warm = _WarmProcess(programs, imports)


def cool_down() -> None:
    """End the warm process, and with it the programs that it started and that have not ended."""
    global _warm
    if _warm is not None:
        _warm.end()
        _warm = None


def start_program(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> Program:
    """Start a program in a session of its own and without stdin; signals to this process's group do not reach it.

    `command`: of one of ours `[sys.executable, "-m", MODULE, ...]`.  `log`: takes stdout and stderr; None: as here.
    """
    words = _words_of_module(command)
    if _warm is not None and words and words[0] in _warm.programs:
        out = {1: 1, 2: 2} if log is None else dict.fromkeys((1, 2), log.fileno())
        with contextlib.suppress(OSError):  # the usual way is left, whose error is told
            return _warm.fork(words, env, out | {fd: fd for fd in pass_fds}, command)
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=dict(env),
        pass_fds=list(pass_fds),
        start_new_session=True,
    )


def _words_of_module(command: Sequence[str]) -> list[str]:
    """[PYTHON, "-u", "-m", "a.b", "--x"] -> ["a.b", "--x"]; empty for another program, or another Python."""
    program, *words = command
    if words[:1] == ["-u"]:
        words = words[1:]
    return words[1:] if program == sys.executable and words[:1] == ["-m"] else []
