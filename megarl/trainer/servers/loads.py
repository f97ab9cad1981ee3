"""How full the servers are: running and waiting requests, and the part of the KV cache that is in use."""

from __future__ import annotations

import threading
from contextlib import suppress
from statistics import mean
from types import TracebackType
from typing import Self

from megarl.rollout.client import Load, ServerClient, ServerError

LOOK_S = 1.0
_ANSWER_S = 2.0  # a busy server may take longer; then this look goes without it


class ServerLoads:
    """Asks all servers in service, again and again, in a thread; a server that does not answer is left out.

    It does not judge whether a server is healthy: the pool and the supervisor do.

        with ServerLoads(token) as loads: loads.servers = urls; ...; metrics |= loads.of_step()
    """

    def __init__(self, token: str, every_s: float = LOOK_S) -> None:
        self.servers: tuple[str, ...] = ()  # in service; set by the owner
        self._token, self._every_s = token, every_s
        self._looks: list[list[Load]] = []  # since the last step; of each look the servers' parts
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="server loads", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def of_step(self) -> dict[str, float]:
        """Metrics of the time since the last call; {} if no server answered.

        servers/running, servers/waiting: requests of all servers together, mean over the looks.  servers/kv_share:
        that of the fullest server at its fullest.
        """
        with self._lock:
            looks, self._looks = self._looks, []
        if not looks:
            return {}
        return {
            "servers/running": mean(sum(load.running for load in look) for look in looks),
            "servers/waiting": mean(sum(load.waiting for load in look) for look in looks),
            "servers/kv_share": max(load.kv_share for look in looks for load in look),
        }

    def _watch(self) -> None:
        clients: dict[str, ServerClient] = {}
        while not self._ended.wait(self._every_s):
            look: list[Load] = []
            for url in self.servers:
                if url not in clients:
                    clients[url] = ServerClient(url, self._token, timeout_s=_ANSWER_S)
                with suppress(ServerError):
                    look += clients[url].loads()
            if look:
                with self._lock:
                    self._looks.append(look)
        for client in clients.values():
            client.close()
