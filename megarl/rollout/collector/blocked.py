"""Names the user's code that blocks the event loop of a collector, in which everything waits for everything."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[2])
_LOOK_S = 0.5


class LoopWatch:
    """Example: watch = LoopWatch(report, limit_s=10.0), in the thread of the loop, which often calls watch.beat().

    `report` gets one sentence, in another thread, if there is no beat for so long and code of the user runs.
    """

    def __init__(self, report: Callable[[str], None], *, limit_s: float) -> None:
        self._report, self._limit_s = report, limit_s
        self._loop_thread = threading.get_ident()
        self._seen = time.monotonic()
        threading.Thread(target=self._look, daemon=True, name="loop watch").start()

    def beat(self) -> None:
        self._seen = time.monotonic()

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            late = time.monotonic() - self._seen > self._limit_s
            if late and (where := users_line(sys._current_frames().get(self._loop_thread))):
                self._report(
                    f"{where} has blocked the event loop of all episodes and rewards for {self._limit_s:g} s; expected "
                    "`def`, which runs in a process of its own, or an async client that is awaited"
                )
                return


def users_line(frame: FrameType | None) -> str | None:
    """The innermost line of code that is of no library: "episode at agent.py:4"; None if there is none."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_LIBRARIES, _OURS, "<")):
            return f"{code.co_name} at {code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
