"""The protocol `Trusts`: which servers may generate, with which weights; pool, collector and router implement it."""

from __future__ import annotations

from typing import Protocol


class Trusts(Protocol):
    """Implemented by EnginePool, by Collectors, and by servers.router.Routed for servers behind a router."""

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """The server at `url` holds this version of the weights, verified: it may generate, and its completions count.

        `adapter`: the version is the adapter of this name on top of the server's weights.
        """

    def fence(self, url: str) -> None:
        """The weights of the server at `url` are not verified: its running requests are retried elsewhere or later."""

    def hold(self, url: str) -> None:
        """Send the server at `url` no new requests until the next `trust`; what runs comes back, also as aborted."""
