"""Starts a program in a process that confines itself, waits for it within its limits, and ends all its processes."""

from __future__ import annotations

import fcntl
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Mapping
from typing import Protocol

from megarl_sandbox import folder as folders
from megarl_sandbox.kernel import PR_SET_PDEATHSIG, close_from, prctl
from megarl_sandbox.limits import Limits
from megarl_sandbox.program import Program, Result, SandboxError
from megarl_sandbox.python import is_open_to_all

MAIN = "main.py"
_LOOK_S = 0.05  # between two looks at the folder's size
_REFUSED = "the code could not be confined, and did not run: "


class Jailer(Protocol):
    """A way to confine a process."""

    @property
    def can_fill_the_disk(self) -> bool: ...

    def enter(self, program: Program) -> None: ...

    def has_begun(self, program: Program, status: int) -> bool:
        """Whether a program that ended with this status had begun, and the status is its own."""
        ...


def execute(jailer: Jailer, source: str, *, stdin: str, files: Mapping[str, str], limits: Limits) -> Result:
    """Run Python source in a new folder; see `run`.  The calling thread has to live as long as the program.

    Raises SandboxError if the process could not be confined.
    """
    folder = os.path.realpath(tempfile.mkdtemp(prefix="megarl-sandbox-", dir=_place()))
    try:
        contents = {name: text.encode() for name, text in {**files, MAIN: source}.items()}
        program = Program(folder, contents, MAIN, limits)
        result = _Running(jailer, program, stdin.encode()).result()
        if not result.why and not jailer.has_begun(program, result.status):
            raise SandboxError(_REFUSED + result.stderr.strip())
        return result
    finally:
        folders.remove(folder)


class _Running:
    """A started program."""

    def __init__(self, jailer: Jailer, program: Program, stdin: bytes) -> None:
        self._program, self._looks_at_folder = program, jailer.can_fill_the_disk
        self._start = time.monotonic()
        self._held, self._looks_again = 0, 0.0  # bytes of files without a name, and when it looks for them again
        self._pid = 0
        given = _sealed(stdin)
        pipes = [os.pipe() for _ in range(3)]  # stdout, stderr, errors of the confinement
        self._out, self._err, self._refusal = (read for read, _ in pipes)
        theirs = [given, *(write for _, write in pipes)]
        parent = os.getpid()
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _become_program(jailer, program, theirs, parent)
        finally:
            for descriptor in theirs:
                os.close(descriptor)

    def result(self) -> Result:
        """Wait for the end.  Whatever happens, no process of the program is left."""
        kept: dict[int, bytearray] = {self._out: bytearray(), self._err: bytearray()}
        try:
            refusal = _read_all(self._refusal)  # until the program begins
            if refusal:
                raise SandboxError(_REFUSED + refusal)
            why = self._wait(kept)
        finally:
            status = self._end()
            for descriptor in (self._out, self._err, self._refusal):
                os.close(descriptor)
        stdout, stderr = (bytes(part).decode(errors="replace") for part in kept.values())
        return Result(stdout, stderr, status, time.monotonic() - self._start, why)

    def _wait(self, kept: dict[int, bytearray]) -> str:
        """Collect output until the program ends or reaches a limit, which is returned."""
        limits = self._program.limits
        deadline = time.monotonic() + limits.seconds
        ended = os.pidfd_open(self._pid)
        try:
            with selectors.DefaultSelector() as selector:
                for descriptor in (*kept, ended):
                    os.set_blocking(descriptor, False)
                    selector.register(descriptor, selectors.EVENT_READ)
                while True:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return "time"
                    ready = [
                        key.fd for key, _ in selector.select(min(left, _LOOK_S) if self._looks_at_folder else left)
                    ]
                    for descriptor in set(ready) & kept.keys():
                        if not _read_some(descriptor, kept[descriptor], limits.output_bytes):
                            selector.unregister(descriptor)
                    if any(len(part) > limits.output_bytes for part in kept.values()):
                        return "output"
                    if self._looks_at_folder and folders.is_full(self._program.folder, limits, self._held_bytes()):
                        return "folder"
                    if ended in ready and not set(ready) & kept.keys():
                        return ""
        finally:
            os.close(ended)

    def _held_bytes(self) -> int:
        """Looks for a twentieth of the time at most, since it looks at all processes of the machine."""
        began = time.monotonic()
        if began >= self._looks_again:
            self._held = folders.held_bytes(self._pid, self._program.folder, self._program.limits.file_bytes)
            self._looks_again = began + 20 * (time.monotonic() - began)
        return self._held

    def _end(self) -> int:
        """End all processes: they are in one group, which they cannot leave.  Returns the first one's exit code."""
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:  # it was never a group: the process ended at once
            os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        try:
            while True:  # grandchildren are ours if this process is a subreaper
                os.waitpid(-self._pid, 0)
        except ChildProcessError:
            return os.waitstatus_to_exitcode(status)


def _become_program(jailer: Jailer, program: Program, descriptors: list[int], parent: int) -> None:
    """In the forked child: never returns."""
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        # Above all numbers that are overwritten; then to 0 to 3, of which the last is closed when the program begins.
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16) for descriptor in descriptors]
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number, inheritable=number < 3)
        close_from(4)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        jailer.enter(program)
    except BaseException as error:
        os.write(3, f"{type(error).__name__}: {error}".encode()[:4096])
    finally:
        os._exit(127)


def _place() -> str:
    """Where other users find their folder, too."""
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    return next((place for place in places if os.path.isdir(place) and is_open_to_all(place)), places[0])


def _sealed(content: bytes) -> int:
    """A file in memory that can be neither changed nor enlarged."""
    descriptor = os.memfd_create("stdin", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _read_all(descriptor: int) -> str:
    """Until its end."""
    parts = []
    while part := os.read(descriptor, 65536):
        parts.append(part)
    return b"".join(parts).decode(errors="replace")


def _read_some(descriptor: int, kept: bytearray, limit: int) -> bool:
    """What is there now, at most one byte beyond the limit; False at the end."""
    try:
        part = os.read(descriptor, max(1, min(65536, limit + 1 - len(kept))))
    except BlockingIOError:
        return True
    kept += part
    return bool(part)
