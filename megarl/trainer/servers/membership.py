"""Servers join a run and leave it while it goes on: what the driver does between two of its own requests to them.

A server that joins is watched like all others: it gets a verified push before any request.  One that leaves gets no new
request; its running ones return what they have generated, which is kept, and go on elsewhere.  Then it is let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from megarl.io.terminal import say
from megarl.machines.joining import JoinedProgram, JoinListener
from megarl.rollout.collector.collector_client import Collectors
from megarl.servers.supervisor import Servers


class Memberships:
    """Example: gone = Memberships(door, servers, collectors, check).poll_members(holding)

    `check`: raises ValueError for a server that the run cannot use.
    """

    def __init__(
        self,
        door: JoinListener,
        servers: Servers,
        collectors: Collectors,
        check: Callable[[str], None],
    ) -> None:
        self._door = door
        self._servers = servers
        self._collectors = collectors
        self._check = check
        self._serving: set[str] = set()  # those that joined and have had a verified push
        self.counts: Counter[str] = Counter(joined=0, left=0)

    def poll_members(self, holding: Collection[str]) -> list[str]:
        """Let servers in and out; returns those that are in service no more.  `holding`: servers with the weights."""
        gone: list[str] = []
        for url in (self._servers.joined & set(holding)) - self._serving:
            self._serving.add(url)
            say(f"{url} has its first verified weights and serves the run")
        for program in self._door.programs:
            is_member = bool(program.urls) and set(program.urls) <= self._servers.joined
            if program.lost or program.wants_to_leave:
                gone += self._take_out(program)
                if all(self._collectors.has_left(url) for url in program.urls):
                    program.dismiss()
                    self._door.forget(program)
            elif program.urls and not is_member:
                self._take_in(program)
        return gone

    def metrics(self) -> dict[str, float]:
        """Totals since the start of these ranks."""
        return {f"push/servers_{name}": float(count) for name, count in self.counts.items()}

    def _take_in(self, program: JoinedProgram) -> None:
        try:
            for url in program.urls:
                if url in self._servers.urls:
                    raise ValueError(f"{url} is a server of the run already")
                self._check(url)
        except ValueError as error:
            say(f"servers that wanted to join were sent away: {error}")
            program.dismiss(f"the run does not take {' '.join(program.urls)}: {error}")
            self._door.forget(program)
            return
        for url in program.urls:
            self._servers.add(url)
            self._collectors.join(url)
            self.counts["joined"] += 1
            say(f"{url} joins the run")

    def _take_out(self, program: JoinedProgram) -> list[str]:
        members = [url for url in program.urls if url in self._servers.joined]
        for url in members:
            self._servers.remove(url)
            self._serving.discard(url)
            self._collectors.leave(url)
            self.counts["left"] += 1
            say(f"{url} leaves the run{f', its owner is lost: {program.lost}' if program.lost else ''}")
        return members
