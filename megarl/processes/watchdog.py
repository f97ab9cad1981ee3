"""A watchdog ends the driver when its main loop hangs: heartbeats of its other threads would keep it looking alive.

The thread that drives a run calls `heartbeat` in its loop and in each of its waits, which have limits of their own.
When its work between two calls takes too long, a timer of faulthandler writes the stacks of all threads to stderr and
ends the process with exit code 1.  The timer needs neither Python's lock nor that thread.  With the process its
connections end, and so do its ranks, its servers and the other machines.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

_EVERY_S = 1.0  # between two settings of the timer, each of which starts a thread
_STDERR = 2
LIMIT_S = 1800.0  # of the driver's own work between two heartbeats

_looks: list[Callable[[], None]] = []  # what else is done then
_limit_s: float | None = None  # None: no thread is watched
_thread = 0  # that is watched
_shown = 0.0  # time.monotonic() when the timer was last set


@contextmanager
def watch(limit_s: float = LIMIT_S) -> Iterator[None]:
    """End this process if the calling thread does not call `heartbeat` for so many seconds."""
    global _limit_s, _thread
    assert _limit_s is None, "a process drives one run at a time"
    _limit_s, _thread = limit_s, threading.get_ident()
    _set_timer(limit_s)
    try:
        yield
    finally:
        _limit_s = None
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """`heartbeat` of the watched thread calls it once a second, and the end of this context does."""
    _looks.append(look)
    try:
        yield
    finally:
        _looks.remove(look)
        look()


def heartbeat() -> None:
    """The calling thread, if it is watched, goes on; cheap enough for every turn of a loop."""
    if _limit_s is not None and time.monotonic() - _shown >= _EVERY_S and threading.get_ident() == _thread:
        _set_timer(_limit_s)
        for look in _looks:
            look()


def wait_for(futures: Collection[Future[Any]]) -> None:
    """Wait until all are done; their work has limits of its own."""
    while wait(futures, timeout=_EVERY_S).not_done:
        heartbeat()


def _set_timer(limit_s: float) -> None:
    global _shown
    _shown = time.monotonic()
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
