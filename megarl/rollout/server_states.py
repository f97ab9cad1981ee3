"""Which servers may generate, and with which weights: `ServerTable` decides it, all others read snapshots of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    GENERATING = "generating"
    HELD = "held"  # it gets no new requests; what runs comes back, also as aborted
    FENCED = "fenced"  # its weights are not verified: its running requests are retried elsewhere or later


@dataclass(frozen=True)
class ServerState:
    """A snapshot of one server.

    `version`: of the weights that it holds, verified: its completions count.  `adapter`: this version is the adapter of
    this name on top of the server's weights.  Requests then select it, and all their tokens have this version: a server
    never changes the adapter of a running request.
    """

    url: str
    phase: Phase
    version: int | None = None
    adapter: str | None = None


Update = Callable[[ServerState], None]


class Requester(Protocol):
    """Sends requests to servers."""

    def update(self, state: ServerState) -> None: ...

    def take_unfit(self) -> Mapping[str, str]:
        """url -> why, of servers that, since the last call, hang, or have answered wrongly again and again."""
        ...


class ServerTable:
    """The states of all servers by url; `publish` gets every change.  A server that it does not know is fenced.

    Example: table = ServerTable(collectors.update); table.trust(url, 7); table.hold(url); table.fence(url)
    """

    def __init__(self, publish: Update) -> None:
        self._publish = publish
        self._states: dict[str, ServerState] = {}

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        """The server holds this version of the weights, verified: it may generate."""
        self._set(ServerState(url, Phase.GENERATING, version, adapter))

    def hold(self, url: str, *, for_push: bool = False) -> None:
        """Send a server that generates no new requests until `trust`.  `for_push`: it loses its weights."""
        state = self._states.get(url)
        if state is not None and state.phase is not Phase.FENCED:
            self._set(replace(state, phase=Phase.HELD, version=None if for_push else state.version))

    def fence(self, url: str) -> None:
        """The weights of the server are not verified."""
        self._set(ServerState(url, Phase.FENCED))

    def forget(self, url: str) -> None:
        """The server has left."""
        self._states.pop(url, None)

    def holding(self, version: int) -> set[str]:
        """The servers that hold this version, verified."""
        return {url for url, state in self._states.items() if state.version == version}

    def _set(self, state: ServerState) -> None:
        self._states[state.url] = state
        self._publish(state)
