"""Time that passes only when everybody sleeps."""

import asyncio
import heapq
from collections.abc import Awaitable
from typing import Any


class VirtualClock:
    """Example: clock = VirtualClock(); limit = Limit(clock=clock, sleep=clock.sleep); await clock.run(limit(call))"""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []  # how long each sleep was asked to be
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self.slept.append(seconds)
        heapq.heappush(self._sleepers, (self.now_s + seconds, len(self.slept), woken))
        await woken.wait()

    async def at_once(self, seconds: float) -> None:
        """Another `sleep`, for one task that waits for real servers too: the time is over at once."""
        self.slept.append(seconds)
        self.now_s += seconds

    async def run(self, *calls: Awaitable[Any]) -> list[Any]:
        """The results or exceptions of these calls, which wait for nothing but this clock and each other."""
        everything = asyncio.gather(*calls, return_exceptions=True)
        while not everything.done():
            for _ in range(20 * len(calls)):  # all that can go on without time does
                await asyncio.sleep(0)
            if not everything.done() and self._sleepers:
                self.now_s, _, woken = heapq.heappop(self._sleepers)
                woken.set()
        return everything.result()
