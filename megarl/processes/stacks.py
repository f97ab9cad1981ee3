"""What a hung process was doing: before it is killed it writes the stacks of its threads into its log.

The process itself writes them when it gets the signal `REQUEST`: faulthandler does it in the handler, also while a
thread waits in a collective or holds the interpreter's lock.  A process that is stopped (SIGSTOP) or that waits in a
call of the kernel writes nothing; its log then says so.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from megarl.processes.programs import Program

REQUEST = signal.SIGUSR2
STACKS_S = 5.0  # wait for stacks, and for what `write_on_request` gets besides
_END = "-- end of the stacks --"
_LOOK_S = 0.05


def write_on_request(besides: Callable[[], None]) -> None:
    """Let this process write its stacks to stderr when it gets `REQUEST`; call it in the main thread.

    After that a thread of its own calls `besides()`, which may take a moment; only if a thread can run Python code.
    """
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    signal.signal(REQUEST, lambda *_: None)  # so that Python's own handler writes to the socket, in whatever thread
    signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    faulthandler.register(REQUEST, all_threads=True, chain=True)
    threading.Thread(target=_finish, args=(ear, mouth, besides), daemon=True, name="stacks").start()


def _finish(ear: socket.socket, mouth: socket.socket, besides: Callable[[], None]) -> None:
    """`mouth` is only held open here: its number is what signals are written to."""
    with ear, mouth:
        while number := ear.recv(1):
            if number[0] != REQUEST:  # another signal that has a handler
                continue
            try:
                besides()
            finally:
                print(_END, file=sys.stderr, flush=True)


def take(processes: Sequence[Program], logs: Sequence[Path], limit_s: float = STACKS_S) -> None:
    """Let the processes that still run write their stacks, each into its log; returns when all have, or at the limit.

    What keeps one from it is written into its log.
    """
    asked: dict[Path, tuple[int, int]] = {}  # log -> pid, and bytes that were in the log before
    for process, log in zip(processes, logs, strict=True):
        if process.poll() is not None:
            continue
        if reason := _keeps_from_writing(process.pid):
            _note(log, process.pid, reason)
        else:
            asked[log] = process.pid, log.stat().st_size
            process.send_signal(REQUEST)
    deadline = time.monotonic() + limit_s
    while asked and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        asked = {log: (pid, begin) for log, (pid, begin) in asked.items() if not _has_ended(log, begin)}
    for log, (pid, _) in asked.items():
        _note(log, pid, f"none of its threads could run Python code within {limit_s:g} s; what it wrote is above")


def _keeps_from_writing(pid: int) -> str:
    """Why a process could not answer a request, by its entry in /proc; "" if nothing is known to."""
    fields: dict[str, str] = {}
    with suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    if fields.get("State", "R")[0] in "Tt":
        return "it is stopped (SIGSTOP, or a debugger) and runs no code"
    if not int(fields.get("SigCgt", "0"), 16) >> (REQUEST - 1) & 1:
        return "it is still starting"
    return ""


def _has_ended(log: Path, begin: int) -> bool:
    with log.open("rb") as text:
        text.seek(begin)
        return _END.encode() in text.read()


def _note(log: Path, pid: int, reason: str) -> None:
    with log.open("a") as text:
        text.write(f"pid {pid} is killed. It has no whole stacks to show: {reason}.\n")
