"""Measures where the seconds of an export or a push go."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Sums the seconds of phases; time in a nested phase counts for the inner phase only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        now = time.perf_counter()
        if self._open:
            self._charge(now)
        self._open.append((phase, now))
        try:
            yield
        finally:
            now = time.perf_counter()
            self._charge(now)
            self._open.pop()
            if self._open:
                self._open[-1] = (self._open[-1][0], now)

    def _charge(self, now: float) -> None:
        phase, since = self._open[-1]
        self.seconds[phase] += now - since

    def split(self, phase: str, of: str, seconds: float) -> None:
        """Move `seconds` from phase `of` to `phase`, or all that it has: a caller's own clock may have run longer."""
        seconds = min(seconds, self.seconds[of])
        self.seconds[of] -= seconds
        self.seconds[phase] += seconds
