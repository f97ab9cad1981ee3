"""Starts programs: processes of their own session, with only the variables and files that they are given.

On machines without GPUs the programs of a run are forked from multiprocessing's fork server, which imports once what
they all need; each would else take seconds of a core for torch, transformers and Megatron.  `preload` starts it and
returns at once.  The fork server has only the allowed variables of this process, ends with the thread that started it,
and its programs end with it.  Without it, after a fork that failed or did not come in time, and for other programs,
`start_program` is `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import IO

from megarl.io.environment import allowed_variables
from megarl.io.job_signals import ASKS
from megarl.processes.lifetime import die_with_parent, name_this_process

# glibc asks the kernel for huge pages (madvise): tensors in pages of 2 MiB cause fewer TLB misses than in 4 KiB.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
# Idle threads of OpenMP wait for the next region in a loop; a short one, as others may want the core meanwhile.
_SPINS = "1000"
IMPORTS = "MEGARL_FORK_SERVER_IMPORTS"  # modules, for megarl.processes.fork_server
_IMPORT_S = 120.0  # after its start the fork server may import for so long until it forks
_ANSWER_S = 10.0  # later it may take so long: a fork takes milliseconds, and one that is stopped never answers

log = logging.getLogger(__name__)
_server: ForkServer | None = None  # apart from the one that pools of this process may have
_forked: frozenset[str] = frozenset()  # modules whose programs are forked
_limit_s = _IMPORT_S  # for which a fork is waited for


def preload(programs: Sequence[str], imports: Sequence[str]) -> None:
    """Start the fork server, if there is none; returns at once.  Call it in a thread that outlives all programs.

    `programs`: modules with a function `main`, which forks can become.  `imports`: what it imports.
    """
    global _server, _forked
    _forked = frozenset(programs)
    if _server is not None:
        return
    _server = ForkServer()
    _server.set_forkserver_preload(["megarl.processes.fork_server"])
    with only_variables(
        {
            **allowed_variables(),
            "CUDA_VISIBLE_DEVICES": "",  # a process that has used a GPU cannot be forked; imports may use one
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", _HUGE_PAGES),
            **({} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", _SPINS)}),
            IMPORTS: " ".join(imports),
        }
    ):
        try:
            _server.ensure_running()
        except OSError as error:  # its socket may have no longer name than the system takes: that of TMPDIR counts
            _do_without(error)


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
    if _server is not None and words and words[0] in _forked:
        out = {1: 1, 2: 2} if log is None else dict.fromkeys((1, 2), log.fileno())
        try:
            return _fork(_server, _Start(words, dict(env), os.getcwd()), out | {fd: fd for fd in pass_fds})
        except (OSError, EOFError) as error:
            _do_without(error)
    heeded = signal.pthread_sigmask(signal.SIG_BLOCK, ASKS)  # so the program's first moments are covered, too
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(env),
            pass_fds=list(pass_fds),
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heeded)


def _do_without(error: Exception) -> None:
    global _forked
    _forked = frozenset()
    log.warning("no program is forked any more, so each starts some seconds later: %s", error or "a fork failed")


class Fork:
    """A forked program, used like a Popen.  Its exit code comes through a pipe from the fork server, its parent."""

    def __init__(self, pid: int, exit_code: int, words: Sequence[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._exit_code, self._words = exit_code, list(words)
        self._signs = [exit_code]  # files that can be read when it has ended
        with contextlib.suppress(OSError):  # it has ended already, or the kernel is older than 5.3
            self._signs.append(os.pidfd_open(pid))
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if (code := self._read(timeout)) is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0)
        return code

    def _read(self, timeout: float | None) -> int | None:
        timeout = None if timeout is None else max(0.0, timeout)
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return None  # another thread waits for it
        try:
            if self.returncode is None and wait(self._signs, timeout):
                try:
                    _wait_for(self._exit_code, _ANSWER_S)
                    self.returncode = forkserver.read_signed(self._exit_code)
                except (EOFError, TimeoutError):  # the fork server was killed, and its programs with it, or is stopped
                    self.returncode = -signal.SIGKILL
                for file in self._signs:
                    os.close(file)
            return self.returncode
        finally:
            self._lock.release()

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Program = subprocess.Popen[bytes] | Fork


@dataclass(frozen=True)
class _Start:
    """What a fork becomes: sent to the fork server, which calls `_bootstrap` in the fork, as of a Process."""

    words: list[str]  # a module, and its arguments
    env: dict[str, str]
    folder: str
    numbers: tuple[int, ...] = ()  # of the files that the program knows; the fork server hands them over in this order
    parent: int = 0  # the fork server's process

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Become the program, and return its exit code."""
        os.setsid()
        die_with_parent(self.parent)
        multiprocessing.current_process().authkey = os.urandom(32)  # programs do not share one
        has_session, *files = forkserver.get_inherited_fds() or []
        os.close(has_session)
        # It starts one of its own: a file that is placed may take the number of the pipe to the one of the driver.
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
        _place(dict(zip(self.numbers, files, strict=True)))
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.env)
        tempfile.tempdir = None  # the fork server may have asked for it, with its own variables
        name_this_process(self.words[0].removeprefix("megarl."))
        sys.argv = [str(Path(self.folder) / self.words[0]), *self.words[1:]]
        if not sys.flags.safe_path:
            sys.path[0] = self.folder
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()  # Python's own module sees to its state itself
        for stream in (sys.stdout, sys.stderr):
            assert isinstance(stream, io.TextIOWrapper), "they are the files 1 and 2 of the process"
            stream.reconfigure(write_through=True)  # a log is read while its program runs
        threads = self.env.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has one number for each nested level
        if threads.isdigit() and int(threads):
            import torch  # read by OpenMP when it was loaded, which was in the fork server

            torch.set_num_threads(int(threads))
        return _exit_code_of(self.words[0])


def _fork(server: ForkServer, start: _Start, files: Mapping[int, int]) -> Fork:
    """`files`: numbers there -> here.  Returns when it leads its session, so that a caller may signal that at once.

    Raises TimeoutError if it does not come.
    """
    global _limit_s
    pid = 0
    ready, theirs = os.pipe()
    with open(ready, "rb", buffering=0) as has_session:
        try:
            exit_code, orders = server.connect_to_new_process([theirs, *files.values()])
        finally:
            os.close(theirs)
        try:
            with open(orders, "wb") as pipe:
                _wait_for(exit_code, _limit_s)
                _limit_s = _ANSWER_S  # it has imported all
                pid = forkserver.read_signed(exit_code)
                reduction.dump({"dir": start.folder}, pipe)
                parent = server._forkserver_pid  # type: ignore[attr-defined]
                reduction.dump(replace(start, numbers=tuple(files), parent=parent), pipe)
            _wait_for(ready, _ANSWER_S)
            has_session.read(1)
        except (OSError, EOFError):
            os.close(exit_code)
            if pid:
                os.kill(pid, signal.SIGKILL)  # else it would run beside the one that is started in its place
            raise
    return Fork(pid, exit_code, start.words)


def _wait_for(file: int, limit_s: float) -> None:
    """Wait until something of the fork server, or its end, can be read there.  Raises TimeoutError."""
    if not wait([file], limit_s):
        raise TimeoutError(f"the fork server has not answered for {limit_s:g} s")


def _exit_code_of(module: str) -> int:
    """Run a module's `main`, wait for its threads, and call what was registered for the end of the process."""
    try:
        import_module(module).main()
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _place(files: Mapping[int, int]) -> None:
    """Give open files other numbers: wanted -> now."""
    above = max([2, *files]) + 1  # no number that is wanted hides a file that is still needed
    held = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for number, file in files.items()}
    for file in set(files.values()):
        os.close(file)
    for number, file in held.items():
        os.dup2(file, number)
        os.close(file)


@contextlib.contextmanager
def only_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """The variables of what is started meanwhile; call it before there are other threads."""
    mine = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(mine)


def _words_of_module(command: Sequence[str]) -> list[str]:
    """[PYTHON, "-u", "-m", "a.b", "--x"] -> ["a.b", "--x"]; empty for another program, or another Python."""
    program, *words = command
    if words[:1] == ["-u"]:
        words = words[1:]
    return words[1:] if program == sys.executable and words[:1] == ["-m"] else []
