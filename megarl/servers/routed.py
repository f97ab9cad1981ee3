"""Servers behind the router, for whoever decides which may write: one that is not trusted gets no work there."""

from __future__ import annotations

from typing import Protocol

from megarl.servers.router import Router


class Asks(Protocol):
    """Who asks for completions, of the router alone: a rollout.collector_client.CollectorClient."""

    def trust(self, url: str, version: int, adapter: str | None = None) -> None: ...

    def fence(self, url: str) -> None: ...


class Routed:
    """Example: Routed(router, collector).trust("http://10.0.0.3:30000", 7)."""

    def __init__(self, router: Router, collector: Asks) -> None:
        self._router, self._collector = router, collector
        self._trusted: dict[str, tuple[int, str | None]] = {}

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """The server holds this version, verified: the router may give it work, and what it wrote counts."""
        self._trusted[url] = version, adapter
        self._router.add(url)
        self._collector.trust(self._router.url, version, adapter)

    def fence(self, url: str) -> None:
        """No work for it.  Nobody knows what of the router's work it has: all of it is asked for again."""
        self._router.remove(url)
        if self._trusted.pop(url, None) is not None:
            self._collector.fence(self._router.url)
            for version, adapter in dict.fromkeys(self._trusted.values()):
                self._collector.trust(self._router.url, version, adapter)
