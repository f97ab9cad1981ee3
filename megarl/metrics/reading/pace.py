"""How long a run still takes: one rule, for the lines of the console and for `megarl watch`."""

from __future__ import annotations

from collections.abc import Mapping

STEP_S = "timing_s/step"  # seconds of a step alone; the metrics of an evaluation do not have it


def is_step(metrics: Mapping[str, float]) -> bool:
    """Whether these are the metrics of a step, and not of an evaluation."""
    return STEP_S in metrics


class Pace:
    """The mean time from the end of a step to the end of the next one, since the first of them ended.

    So evaluations and saves between steps count as often as they are made, and the start of a run does not.

    Example: pace.note(1, 610.0, 10.0); pace.note(2, 650.0, 10.0); pace.seconds_left(77) -> 3000.0
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None  # step and time of its end
        self._last = (0, 0.0)
        self._seconds = 0.0

    def note(self, step: int, time_s: float, seconds: float) -> None:
        """A step of so many seconds has ended.  One that is made again, after a rollback, begins anew."""
        if self._first is None or step <= self._last[0]:
            self._first = (step, time_s)
        self._last, self._seconds = (step, time_s), seconds

    def seconds_left(self, total: int) -> float | None:
        """To the end of step `total`; after one step alone, by its own seconds; None before it."""
        if self._first is None:
            return None
        steps = self._last[0] - self._first[0]
        mean = (self._last[1] - self._first[1]) / steps if steps else self._seconds
        return max(total - self._last[0], 0) * mean


def clock_text(seconds: float | None) -> str:
    """75 -> "1:15", 3725 -> "1:02:05"; "?" for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
