"""Which servers may generate: the one protocol of all who are told so, from the pool of requests up to the driver."""

from __future__ import annotations

from typing import Protocol


class Trusts(Protocol):
    """An EnginePool, the CollectorClient before it, or the servers.router.Routed between it and a router."""

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """The server at `url` holds this version of the weights, verified: it may generate, and what it did counts.

        `adapter`: the version is the adapter of this name over the server's weights.
        """

    def fence(self, url: str) -> None:
        """Nobody knows what the server at `url` holds: what it is generating is asked for again, elsewhere or later."""
