"""A limit on what runs at a time: a semaphore in which some waiters come before all others."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count


class Slots:
    """Example:

    slots = Slots(512)
    await slots.take()
    try:
        ...
    finally:
        slots.give_back()
    """

    def __init__(self, num: int) -> None:
        # 0 while somebody waits: a slot is handed from one to the next.  Below 0: so many are not handed on.
        self._free = num
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []  # a heap; cancelled waiters stay in it
        self._numbers = count()

    @property
    def are_awaited(self) -> bool:
        """Whether somebody waits for one."""
        return any(not turn.done() for *_, turn in self._waiting)

    async def take(self, *, urgent: bool = False) -> None:
        """Returns when a slot is this caller's; urgent callers come first, and otherwise who came first."""
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
        """To the next one that waits."""
        if self._free < 0:
            self._free += 1
            return None
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                return turn.set_result(None)
        self._free += 1

    def grow(self, num: int) -> None:
        """So many slots more."""
        for _ in range(num):
            self.give_back()

    def shrink(self, num: int) -> None:
        """So many slots fewer, as soon as they are given back."""
        self._free -= num
