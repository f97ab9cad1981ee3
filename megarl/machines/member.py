"""One agent as the driver sees it: requests to it, and the processes that it has started."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megarl.processes.channels.connection import Connection, ConnectionLost

_ORDER_S = 60.0
_LONGEST_WHY = 2000  # characters of the reason that is sent to the agents


class NodeLost(RuntimeError):
    """A machine did not join, was lost, or could not carry out a request; one sentence."""


class NodeLeft(NodeLost):
    """A machine was let go, after a save; a spare one waits to take its place."""


@dataclass
class RemoteJob:
    """A process on another node: a processes.lifetime.ProcessHandle."""

    member: Member
    number: int
    pid: int = 0
    code: int | None = None
    words: str = ""

    def exit_code(self) -> int | None:
        """None while it runs; -1 if unknown because its node is lost."""
        return -1 if self.code is None and self.member.lost else self.code

    def log_tail(self) -> str:
        if self.code is None and not self.member.lost:
            with suppress(NodeLost):
                return str(self.member.order("words", job=self.number)["words"])
        return self.words or (f"\n    {self.member.lost}" if self.member.lost else "")

    def end(self, grace_s: float) -> None:
        with suppress(NodeLost):  # it ended with its node
            self.member.order("end", job=self.number, grace_s=grace_s)


OnSignal = Callable[["Member", int], None]


class Member:
    """The connection to one agent."""

    def __init__(self, hello: dict[str, Any], connection: Connection, silence_s: float, on_signal: OnSignal) -> None:
        """`hello`: what the agent said of itself when it connected.  `on_signal`: called when it got a signal."""
        self.number, self.host = int(hello["node"]), str(hello["host"])  # the number that the user gave this machine
        self.node = self.number  # its place in the run; a spare machine gets the place of a lost one
        self.address = str(connection.sock.getpeername()[0])
        self.lost = ""  # the reason, after the machine was lost
        self.leaves = False  # it got SIGTERM
        self.connection, self._on_signal = connection, on_signal
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._jobs: dict[int, RemoteJob] = {}
        connection.sock.settimeout(silence_s)
        threading.Thread(target=self._listen, daemon=True, name=f"machine {self.number}").start()

    @property
    def name(self) -> str:
        return f"machine {self.node} (host {self.host})"

    def order(self, what: str, *, limit_s: float = _ORDER_S, **arguments: Any) -> dict[str, Any]:
        """Send a request to the agent and return its answer.  Raises: NodeLost."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        try:
            if self.lost:
                raise NodeLost(self.lost)
            self.connection.send({"id": number, "do": what, **arguments})
            found = answer.get(timeout=limit_s)
        except (ConnectionLost, queue.Empty) as error:
            raise NodeLost(self.lost or f"{self.name} did not answer within {limit_s:.0f} s") from error
        finally:
            del self._answers[number]
        if "error" in found:
            raise NodeLost(f"{self.name}: {found['error']}")
        return found

    def start(self, what: str, number: int, **arguments: Any) -> RemoteJob:
        job = self._jobs[number] = RemoteJob(self, number)
        job.pid = self.order(what, job=number, **arguments)["pid"]
        return job

    def leave(self, why: str | None = None, *, terminated: bool = False) -> None:
        """Send the agent away.  `why`: the run is not finished; `terminated`: SIGTERM has ended it."""
        reason = {} if why is None else {"why": why[:_LONGEST_WHY], "terminated": terminated}
        with suppress(ConnectionLost):
            self.connection.send({"do": "leave", **reason})
        self.lost = self.lost or f"{self.name} was sent away"
        self.connection.close()

    def _listen(self) -> None:
        try:
            while True:
                said, _ = self.connection.receive()
                if "ended" in said:
                    job = self._jobs[said["ended"]]
                    job.words, job.code = said["words"], said["code"]
                elif "signal" in said:
                    self._on_signal(self, int(said["signal"]))
                elif "id" in said and said["id"] in self._answers:
                    self._answers[said["id"]].put(said)
        except ConnectionLost as error:
            self.lost = self.lost or f"{self.name} at {self.address} is lost: {error}"
            for answer in list(self._answers.values()):
                answer.put({"error": "it is lost"})
