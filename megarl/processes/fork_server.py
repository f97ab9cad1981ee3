"""The warm process of `warm`: imports modules once, and forks a process for each program that is asked for.

    python -m megarl.processes.fork_server SOCKET ROOM

It has no thread of its own, since a fork has only the thread that forked.  In a fork `_serve` returns the request, and
`main` runs the program: to the interpreter it is the main program of its process.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megarl.processes.garbage import imported
from megarl.processes.lifetime import die_with_parent
from megarl.processes.warm import NUMBER

_MOST_FILES = 64  # of a request


@dataclass(frozen=True)
class _Request:
    words: list[str]  # a module, and its arguments
    env: dict[str, str]
    files: dict[int, int]  # number that the program knows -> number here
    exit_codes: int  # file that the exit code is written to
    folder: str


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(os.getppid())
    with warnings.catch_warnings():  # the driver's run says itself what is missing on this machine
        warnings.simplefilter("ignore")
        for module in _read(requests):
            imported(module)  # no collection in a fork writes to, and so copies, the pages of all that is here
    request = _serve(requests)
    if request is None:
        os._exit(0)  # libraries would print what they have not freed
    import_module(request.words[0]).main()


def _serve(requests: socket.socket) -> _Request | None:
    """Fork until the other side hangs up; returns in each fork, with its request, and None at the end."""
    exit_codes: dict[int, int] = {}  # process id -> file
    ear, mouth = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that Python's own handler writes to `mouth`
    signal.set_wakeup_fd(mouth)
    parent = os.getpid()
    while True:
        ready, _, _ = select.select([requests.fileno(), ear], [], [])
        if ear in ready:
            os.read(ear, 1 << 16)
            _reap(exit_codes)
        if requests.fileno() not in ready:
            continue
        request = _receive(requests)
        if request is None:
            return None
        has_session, child_side = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, too many processes: this one serves those that run
            for file in (has_session, child_side, request.exit_codes, *request.files.values()):
                os.close(file)
            requests.sendall(NUMBER.pack(-(error.errno or errno.EAGAIN)))
            continue
        if pid == 0:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for file in (has_session, child_side, ear, mouth, request.exit_codes, *exit_codes.values()):
                os.close(file)
            requests.close()
            die_with_parent(parent)
            _become(request)
            return request
        exit_codes[pid] = request.exit_codes
        for file in (child_side, *request.files.values()):
            os.close(file)
        os.read(has_session, 1)  # ends when the fork closes its side: a caller may at once signal the session
        os.close(has_session)
        requests.sendall(NUMBER.pack(pid))


def _receive(requests: socket.socket) -> _Request | None:
    """None at the end."""
    mark, files, _, _ = socket.recv_fds(requests, 1, _MOST_FILES)
    if not mark:
        return None
    said = _read(requests)
    where = dict(zip(said["files"], files[1:], strict=True))
    return _Request(said["words"], said["env"], where, files[0], said["folder"])


def _read(requests: socket.socket) -> Any:
    (size,) = NUMBER.unpack(_exactly(requests, NUMBER.size))
    return json.loads(_exactly(requests, size))


def _exactly(requests: socket.socket, size: int) -> bytes:
    """In pieces: a signal, as that of a program's end, cuts even a recv with MSG_WAITALL short."""
    told = bytearray()
    while len(told) < size:
        part = requests.recv(size - len(told))
        if not part:
            raise EOFError("the process that asks has ended in the middle of a request")
        told += part
    return bytes(told)


def _reap(exit_codes: dict[int, int]) -> None:
    """Tell the exit codes of the programs that have ended."""
    while exit_codes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with open(exit_codes.pop(pid), "wb", buffering=0) as file:
            try:
                file.write(NUMBER.pack(os.waitstatus_to_exitcode(status)))
            except BrokenPipeError:
                continue  # nobody wants to know


def _become(request: _Request) -> None:
    """Take over the files, the variables and the arguments of the program."""
    above = max([2, *request.files]) + 1  # no number that is wanted hides a file that is still needed
    held = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for number, file in request.files.items()}
    for file in request.files.values():
        os.close(file)
    for number, file in held.items():
        os.dup2(file, number)
        os.close(file)
    _show([sys.executable, "-m", *request.words])
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    sys.argv = [str(Path(request.folder) / request.words[0]), *request.words[1:]]
    if not sys.flags.safe_path:
        sys.path[0] = request.folder
    multiprocessing.current_process().authkey = os.urandom(32)  # programs of their own do not share this
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # nor the state of random numbers, which Python's own module sees to
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper), "they are the files 1 and 2 of the process"
        stream.reconfigure(write_through=True)  # a log is read while its program runs
    threads = request.env.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list has one number for each nested level
    if threads.isdigit() and int(threads):
        import torch  # read by OpenMP when it was loaded, which was in the warm process

        torch.set_num_threads(int(threads))


def _show(command: Sequence[str]) -> None:
    """Write a command line over that of the warm process, for `ps` and all that reads /proc/PID/cmdline."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, in proc(5) fields 48 and 49
    text = b"\0".join(os.fsencode(word) for word in command)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()
