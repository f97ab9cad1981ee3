"""A limit on what runs at a time, with urgent waiters; and meters of time."""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count


class Slots:
    """Example: slots = Slots(512); await slots.take(); ...; slots.give_back()"""

    def __init__(self, num: int) -> None:
        # 0 while a caller waits: a slot is handed from one to the next.  Below 0: so many are not handed on.
        self._free = num
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []  # a heap; cancelled waiters stay in it
        self._numbers = count()

    @property
    def are_awaited(self) -> bool:
        """Whether a caller waits for one."""
        return any(not turn.done() for *_, turn in self._waiting)

    async def take(self, *, urgent: bool = False) -> None:
        """Returns when a slot is this caller's: urgent callers first, then in the order of the calls."""
        if self._free > 0:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (not urgent, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot came with the cancellation
                self.give_back()
            raise

    def give_back(self) -> None:
        """Pass the slot to the next caller that waits."""
        if self._free < 0:
            self._free += 1
            return None
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                return turn.set_result(None)
        self._free += 1

    def grow(self, num: int) -> None:
        """Add slots."""
        for _ in range(num):
            self.give_back()

    def shrink(self, num: int) -> None:
        """Remove slots, as soon as they are given back."""
        self._free -= num


class Meter:
    """The integral over time of a number: set to 2, and three seconds later to 0, it reads 6 from then on."""

    def __init__(self) -> None:
        self._total = 0.0
        self._level = 0.0
        self._since = 0.0

    def set(self, level: float) -> None:
        now = time.monotonic()
        self._total += self._level * (now - self._since)
        self._since, self._level = now, level

    def read(self) -> float:
        return self._total + self._level * (time.monotonic() - self._since)


class Waiting(Meter):
    """Reads how long at least one request has waited for a slot or a server: `with waiting: await ...`."""

    def __init__(self) -> None:
        super().__init__()
        self._num = 0

    def __enter__(self) -> None:
        self._num += 1
        self.set(True)

    def __exit__(self, *_: object) -> None:
        self._num -= 1
        self.set(bool(self._num))
