"""Servers join a run and leave it while it goes on: what the driver does between two of its own requests to them.

A server that joins is watched like all others: it gets a verified push before any request.  One that leaves gets no new
request; its running ones return what they have written, which is kept, and go on elsewhere.  Then it is let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from megarl.machines.joining import Door, Party
from megarl.rollout.collector.collector_client import Collectors
from megarl.servers.supervisor import Servers
from megarl.terminal import sentences


class Memberships:
    """Example: gone = Memberships(door, servers, collectors, check).tend(holding)

    `check`: raises ValueError for a server that the run cannot use.
    """

    def __init__(
        self,
        door: Door,
        servers: Servers,
        collectors: Collectors,
        check: Callable[[str], None],
    ) -> None:
        self._door, self._servers, self._collectors, self._check = door, servers, collectors, check
        self._serving: set[str] = set()  # those that joined and have had a verified push
        self.counts: Counter[str] = Counter(joined=0, left=0)

    def tend(self, holding: Collection[str]) -> list[str]:
        """Let servers in and out; returns those that are in service no more.  `holding`: servers with the weights."""
        gone: list[str] = []
        for url in (self._servers.joined & set(holding)) - self._serving:
            self._serving.add(url)
            _say(f"{url} has its first verified weights and serves the run")
        for party in self._door.parties:
            is_member = bool(party.urls) and set(party.urls) <= self._servers.joined
            if party.lost or party.wants_to_leave:
                gone += self._take_out(party)
                if all(self._collectors.has_left(url) for url in party.urls):
                    party.dismiss()
                    self._door.forget(party)
            elif party.urls and not is_member:
                self._take_in(party)
        return gone

    def metrics(self) -> dict[str, float]:
        """Totals since the start of these ranks."""
        return {f"push/servers_{name}": float(count) for name, count in self.counts.items()}

    def _take_in(self, party: Party) -> None:
        try:
            for url in party.urls:
                if url in self._servers.urls:
                    raise ValueError(f"{url} is a server of the run already")
                self._check(url)
        except ValueError as error:
            _say(f"servers that wanted to join were sent away: {error}")
            party.dismiss(f"the run does not take {' '.join(party.urls)}: {error}")
            self._door.forget(party)
            return
        for url in party.urls:
            self._servers.add(url)
            self._collectors.join(url)
            self.counts["joined"] += 1
            _say(f"{url} joins the run")

    def _take_out(self, party: Party) -> list[str]:
        members = [url for url in party.urls if url in self._servers.joined]
        for url in members:
            self._servers.remove(url)
            self._serving.discard(url)
            self._collectors.leave(url)
            self.counts["left"] += 1
            _say(f"{url} leaves the run{f', its owner is lost: {party.lost}' if party.lost else ''}")
        return members


def _say(sentence: str) -> None:
    sentences(stderr=True).print(sentence)
