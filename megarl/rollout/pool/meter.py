"""The integral over time of a number that changes now and then, for example the time in which somebody waits."""

from __future__ import annotations

import time


class Meter:
    """Example: a meter that is set to 2, and three seconds later to 0, reads 6 from then on."""

    def __init__(self) -> None:
        self._total, self._level, self._since = 0.0, 0.0, 0.0

    def set(self, level: float) -> None:
        now = time.monotonic()
        self._total += self._level * (now - self._since)
        self._since, self._level = now, level

    def read(self) -> float:
        return self._total + self._level * (time.monotonic() - self._since)


class Waiting:
    """Measures how long requests wait for a slot or a server: `with waiting: await ...`, also several at a time."""

    def __init__(self) -> None:
        self._num, self._meter = 0, Meter()

    @property
    def seconds(self) -> float:
        """With at least one that waits."""
        return self._meter.read()

    def __enter__(self) -> None:
        self._num += 1
        self._meter.set(bool(self._num))

    def __exit__(self, *_: object) -> None:
        self._num -= 1
        self._meter.set(bool(self._num))
