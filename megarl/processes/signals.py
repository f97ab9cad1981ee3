"""Signals to a run: SIGUSR1 asks for a save, SIGTERM for a save and the end.

A scheduler sends SIGTERM some time before it takes the machine away.  The handlers only set flags, which the loop of
the run reads where its state is whole.  A timer ends the run when the loop does not get there in time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import NoReturn, Self

from megarl.io.job_signals import ASKS

EXIT_TERMINATED = 128 + signal.SIGTERM  # as shells report it
NO_STEP = "this start of the run has made no step; the same command begins where it began"


class Terminated(BaseException):
    """SIGTERM ends the process; one sentence.  No Exception: nobody may take it for a failure that can be repaired."""


class Signals:
    """The signals that came to a run.

    Example:

        with Signals(grace_s=20) as signals:
            start()                          # SIGTERM ends it at once
            signals.is_patient = True
            for step in range(100):          # SIGTERM ends it after 20 s, if the loop does not end it before
                train(step)
                if signals.ends:
                    signals.end(f"step {step} is saved")

    After SIGTERM an error of the run is a consequence as a rule: machines go one after another.  So it leaves the
    context as Terminated.  More signals of the same kind change nothing, because a scheduler may send one to each
    machine.  Outside the main thread no signal is handled.
    """

    def __init__(self, grace_s: float) -> None:
        """`grace_s`: seconds from SIGTERM until the run ends, whatever it is doing."""
        self.ends = False  # SIGTERM came
        self.is_patient = False  # the loop reads `ends`
        self._wants_save, self._grace_s = False, grace_s
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(handled({signal.SIGUSR1: self._on_save, signal.SIGTERM: self._on_end}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self.ends and isinstance(error, Exception):
            raise Terminated(f"SIGTERM: the run could not finish its step: {error}") from error

    def take_save(self) -> bool:
        """Whether SIGUSR1 came since the last question."""
        wanted, self._wants_save = self._wants_save, False
        return wanted

    def end(self, why: str) -> NoReturn:
        """End the run as SIGTERM wants it; `why`: what became of it."""
        if self.is_patient:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        raise Terminated(f"SIGTERM: {why}")

    def _on_save(self, number: int, _: object) -> None:
        self._wants_save = True

    def _on_end(self, number: int, _: object) -> None:
        if self.ends:
            return
        self.ends = True
        if not self.is_patient:
            self.end(NO_STEP)
        self._stack.enter_context(handled({signal.SIGALRM: self._on_late}))
        self._stack.callback(signal.setitimer, signal.ITIMER_REAL, 0.0)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _on_late(self, number: int, _: object) -> None:
        limit = f"trainer.term_grace_s={self._grace_s:g}"
        self.end(f"the step did not end, or was not saved, within {limit} s; the last save stays")


@contextmanager
def handled(handlers: Mapping[signal.Signals, Callable[[int, object], None]]) -> Iterator[None]:
    """Have these handlers meanwhile.  Outside the main thread, where Python allows none, it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def pass_on(number: int) -> None:
    """Take a signal that another machine of the run got as one of this process, in whatever thread."""
    assert number in ASKS, f"signal {number}: expected one of {', '.join(map(str, ASKS))}"
    os.kill(os.getpid(), number)
