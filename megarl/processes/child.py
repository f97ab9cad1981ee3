"""Starts a function in a Python process of its own that gets only the allowed variables of this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import IO, Any

from megarl.io.environment import allowed_variables
from megarl.processes.lifetime import name_this_process
from megarl.processes.programs import Program, start_program


def start_child(
    function: Callable[[Connection, Any], None], argument: object, *, log: IO[bytes] | None = None
) -> tuple[Program, Connection]:
    """Start function(pipe, argument) in a new process; returns it and this end of the pipe.

    Both are pickled; what else the process needs, such as a token, is in `argument`.  `log`: takes what it prints.
    """
    pipe, theirs = multiprocessing.Pipe()
    # multiprocessing would start it with all variables of this process, of which a program can hide none again: they
    # stay in /proc/PID/environ.
    command = [sys.executable, "-m", "megarl.processes.child", str(theirs.fileno())]
    process = start_program(command, env=allowed_variables(), log=log, pass_fds=[theirs.fileno()])
    theirs.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: who reads the pipe finds out
        pipe.send(_preparation())
        pipe.send((function, argument))
    return process, pipe


def end_session(process: Program) -> None:
    """Kill a child, which leads a session, with the programs that its code left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _preparation() -> dict[str, Any]:
    """What multiprocessing tells its children: sys.path, and the main module, whose functions may be sent."""
    found = spawn.get_preparation_data("child")
    del found["authkey"]  # it goes to nobody but children of multiprocessing
    return found


def main() -> None:
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    spawn.prepare(pipe.recv())
    function, argument = pipe.recv()
    name_this_process(function.__name__)
    function(pipe, argument)
    # What is left is to free what the system frees at once; its parent waits for its end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
