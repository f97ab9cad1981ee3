"""Starts a function in a Python process of its own that gets only the allowed variables of this one."""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection
from typing import Any

from megarl.sandbox.environment import allowed_variables

# multiprocessing starts programs with all variables of this process; those it then hides stay in /proc/PID/environ.
_PROGRAM = """
import sys
from multiprocessing import spawn
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
spawn.prepare(pipe.recv())
function, argument = pipe.recv()
function(pipe, argument)
"""


def start_child(
    function: Callable[[Connection, Any], None], argument: object, **how: Any
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start function(pipe, argument) in a new process; returns it and this end of the pipe.

    Both are pickled; what else the process needs, such as a token, is in `argument`.  `how`: arguments of Popen.
    """
    pipe, theirs = multiprocessing.Pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        env=allowed_variables(),
        pass_fds=[theirs.fileno()],
        # Ctrl-C, and a signal that a shell sends to this process's group, do not reach it.
        start_new_session=True,
        **how,
    )
    theirs.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: who reads the pipe finds out
        pipe.send(_preparation())
        pipe.send((function, argument))
    return process, pipe


def _preparation() -> dict[str, Any]:
    """What multiprocessing tells its children: sys.path, and the main module, whose functions may be sent."""
    found = spawn.get_preparation_data("child")
    del found["authkey"]  # it goes to nobody but children of multiprocessing
    return found
