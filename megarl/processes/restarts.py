"""How often something that fails may begin again, and how long it rests before."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 30


@dataclass
class Restarts:
    """The failures in a row of one process, server or call.

    Example: restarts = Restarts(most=3, rest_s=1.0); restarts.count = 2; restarts.next_rest_s is 4.0
    """

    most: int | None = None  # None: no limit
    rest_s: float = 1.0  # before it begins again; doubles with each failure
    longest_rest_s: float = 60.0
    settled_after_s: float = 600.0  # after it ran for so long, earlier failures do not count any more
    count: int = 0

    @property
    def are_used_up(self) -> bool:
        return self.most is not None and self.count >= self.most

    @property
    def next_rest_s(self) -> float:
        return min(self.longest_rest_s, self.rest_s * 2 ** min(self.count, _MOST_DOUBLINGS))

    def note_run(self, ran_s: float) -> None:
        """It has run for so long without a failure."""
        if ran_s >= self.settled_after_s:
            self.count = 0
