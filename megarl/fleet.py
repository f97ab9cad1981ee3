"""The servers of a run as the ring sees them: each is out of service until it holds the trainer's weights, verified.

A server that died is started again by its supervisor, one that failed a push is pushed again and, failing twice in a
row, started again; none of them is asked for anything before its next verified push.  The run stops only when no server
is left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megarl.rollout.supervisor import ServerDied, ServerEvent, Servers, State

Push = Callable[[Sequence[str], int], dict[str, Any]]  # (urls, version) -> weights.push.PushReport as a dict

_TEND_EVERY_S = 0.5
_PATIENCE = 2  # failed pushes in a row that a server may have before it is started again


class Trusts(Protocol):
    """Who is told which servers may write: a rollout.stream.Stream."""

    def trust(self, url: str, version: int, adapter: str | None = None) -> None: ...

    def fence(self, url: str) -> None: ...


def is_verified(report: dict[str, Any]) -> bool:
    """Whether all servers that hold this push were found to, by their digests or a comparison."""
    return bool(report["num_verified"] or report["compared"]) and not report["unverified"]


class Fleet:
    """Example: fleet.push(7); then, while completions are awaited, fleet.tend() every second or oftener."""

    def __init__(self, servers: Servers, stream: Trusts, push: Push, warn: Callable[[str], None]) -> None:
        self._servers, self._stream, self._push, self._warn = servers, stream, push, warn
        self.version: int | None = None  # of the last push
        self.holding: set[str] = set()  # servers that hold it, verified
        self.counts: Counter[str] = Counter(failed=0, repaired=0, servers_died=0, fallbacks=0)
        self._failures: Counter[str] = Counter()  # failed pushes in a row
        self._last_reason = ""
        self._tended = 0.0

    def push(self, version: int) -> dict[str, Any]:
        """The trainer's weights into every server that lives; returns the report, once at least one holds them.

        Raises ServerDied when no server is left.
        """
        self.version, self.holding = version, set()
        self._look()
        report = self._deliver(self._serving())
        while not self.holding:
            time.sleep(_TEND_EVERY_S)
            report = self._repair() or report
        return report

    def tend(self) -> None:
        """Look after the servers; cheap while there is nothing to do, a push where a server lags behind.

        Call it only while the trainer holds the weights of the last push.
        """
        if time.monotonic() - self._tended >= _TEND_EVERY_S:
            self._repair()

    def metrics(self, report: dict[str, Any]) -> dict[str, float]:
        """Numbers for the log of a step, whose push gave this report; what is counted is counted since the start."""
        out = {f"push/{name}": float(count) for name, count in self.counts.items()}
        out["push/servers"] = float(len(self.holding))
        out["push/compared"] = float(len(report["compared"]))
        return out | {"push/tensors_verified": float(report["num_verified"])}

    def _repair(self) -> dict[str, Any] | None:
        """Push to servers that came back or failed; the report of that, if there were any."""
        self._look()
        lagging = [url for url in self._serving() if url not in self.holding]
        report = self._deliver(lagging) if lagging and self.version is not None else None
        self.counts["repaired"] += len(set(lagging) & self.holding)
        self._tended = time.monotonic()
        return report

    def _serving(self) -> list[str]:
        return [
            url for url, state in zip(self._servers.urls, self._servers.states, strict=True) if state is State.SERVING
        ]

    def _look(self) -> None:
        """Take dead servers out of service."""
        self._note(self._servers.poll())
        if all(state is State.OUT for state in self._servers.states):
            raise ServerDied(f"no server is left; {self._last_reason}")

    def _note(self, events: Sequence[ServerEvent]) -> None:
        for event in events:
            if event.state is not State.SERVING:
                self.counts["servers_died"] += 1
                self._fence(event.url, event.reason)

    def _deliver(self, urls: Sequence[str]) -> dict[str, Any]:
        assert self.version is not None, "there is nothing to push before the first version"
        report = self._push(urls, self.version)
        for url, sentences in report["fallbacks"].items():
            self.counts["fallbacks"] += len(sentences)
            for sentence in sentences:
                self._warn(f"{url} took a slower way of the push: {sentence}")
        for url in urls:
            if url in report["ways"]:
                self._failures.pop(url, None)
                self.holding.add(url)
                self._stream.trust(url, self.version, report.get("adapter"))
            else:
                self._failed(url, report["failed"][url])
        return report

    def _failed(self, url: str, reason: str) -> None:
        self.counts["failed"] += 1
        self._failures[url] += 1
        self._fence(url, f"the push of weights version {self.version} failed: {reason}")
        if self._failures[url] >= _PATIENCE:
            del self._failures[url]
            self._note(self._servers.restart(self._servers.urls.index(url), reason))

    def _fence(self, url: str, reason: str) -> None:
        self.holding.discard(url)
        self._stream.fence(url)
        self._last_reason = reason
        self._warn(f"{url} is out of service: {reason}")
