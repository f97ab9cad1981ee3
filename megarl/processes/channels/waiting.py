"""Waits that say why, and heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from megarl.processes.channels.connection import Connection, ConnectionLost

HEARTBEAT_S = 2.0  # interval of heartbeats of a process for which others wait
FIRST_S, EVERY_S = 5.0, 60.0  # the usual wait is shorter than the first


class Wait:
    """A wait that says why: after some seconds, and then once a minute.

    Example: wait = Wait(1800, print); while not found(): wait.tell("no driver yet"); time.sleep(1)
    """

    def __init__(self, limit_s: float, say: Callable[[str], object]) -> None:
        self._deadline = time.monotonic() + limit_s
        self._next = time.monotonic() + FIRST_S
        self._say = say
        self._until = time.strftime("%H:%M", time.localtime(time.time() + limit_s))

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._deadline

    def tell(self, why: str, *, is_new: bool = False) -> None:
        """Say `why`, if it is time to or it `is_new`."""
        if is_new or time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY_S
            self._say(f"{why}, until {self._until}")


class Heartbeat:
    """Sends a heartbeat on some connections every HEARTBEAT_S, until `stop`; a peer whose is missing is lost.

    Example: heartbeat = Heartbeat(lambda: [member.connection for member in members]); ...; heartbeat.stop()
    """

    def __init__(
        self, connections: Callable[[], Iterable[Connection]], on_lost: Callable[[], object] = lambda: None
    ) -> None:
        """`on_lost`: called in the heartbeat's thread where a peer is gone, which also ends a wait for its messages."""
        self._connections, self._on_lost, self._stopped = connections, on_lost, threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def stop(self) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            for connection in self._connections():
                try:
                    connection.send({"beat": 1})
                except ConnectionLost:
                    self._on_lost()
