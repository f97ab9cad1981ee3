"""The driver ends when its main loop hangs: its other threads would tell all machines for ever that it is there.

The thread that drives a run calls `show_life` in its loop and in each of its waits, which have limits of their own.
What it does between two calls is its own work: a batch, a file, a question to a server.  When that takes too long, a
timer of faulthandler writes the stacks of all threads to stderr and ends the process with exit code 1.  The timer needs
neither Python's lock nor that thread.  With the process its connections end, and so do its ranks, its servers and the
other machines; what started them all can start them again.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

_EVERY_S = 1.0  # between two settings of the timer, each of which starts a thread
_STDERR = 2

_limit_s: float | None = None  # None: nobody is watched
_thread = 0  # that is watched
_shown = 0.0  # time.monotonic() when the timer was last set


@contextmanager
def watched(limit_s: float) -> Iterator[None]:
    """End this process if the calling thread does not call `show_life` for so many seconds."""
    global _limit_s, _thread
    assert _limit_s is None, "a process drives one run at a time"
    _limit_s, _thread = limit_s, threading.get_ident()
    _set_timer(limit_s)
    try:
        yield
    finally:
        _limit_s = None
        faulthandler.cancel_dump_traceback_later()


def show_life() -> None:
    """The calling thread, if it is watched, goes on; cheap enough for every turn of a loop."""
    if _limit_s is not None and time.monotonic() - _shown >= _EVERY_S and threading.get_ident() == _thread:
        _set_timer(_limit_s)


def wait_for(futures: Collection[Future[Any]]) -> None:
    """Wait until all are done; their work has limits of its own."""
    while wait(futures, timeout=_EVERY_S).not_done:
        show_life()


def _set_timer(limit_s: float) -> None:
    global _shown
    _shown = time.monotonic()
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
