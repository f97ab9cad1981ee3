"""The router `smg` in front of several servers: completions are asked of it, orders go to the servers themselves.

A server behind it writes only while it is a worker: `remove` fences it (what it is writing is still delivered), `add`
gives it work again. After `remove` the router keeps a server's name for some seconds, so `add` may have to wait.
The router does not soon notice a server that is gone: whoever watches the servers removes it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from megarl.rollout.protocol import auth_headers, error_message
from megarl.rollout.trust import Trusts
from megarl.servers.launch import EngineLaunch, ServerCommand, flags
from megarl.servers.server_process import ServerProcess, ThisMachine, free_ports
from megarl.servers.sglang_environment import foreign_environment, sglang_python

_POLL_S = 0.05
_START_S = 60.0
_WORKER_S = 60.0  # limit of adding or removing one server
_READY = "ready"  # a worker's status when it is given work


class RouterError(RuntimeError):
    """The router refused an order or did not carry it out; one sentence."""


def smg_command(launch: EngineLaunch, folder: Path) -> ServerCommand:
    """The command of the router; of the launch it needs host, port, group_port (where it shows its metrics), python."""
    python = sglang_python(launch.python)
    options = {"--host": launch.host, "--port": launch.port, "--log-level": "warn", "--policy": "least_load"}
    options |= {"--prometheus-host": launch.host, "--prometheus-port": launch.group_port}  # else on every interface
    argv = [str(python), "-m", "megarl.servers.router_server", str(os.getpid()), *flags(options), *launch.args]
    # Asked to end, it waits for 5 s; it has nothing to save.
    return ServerCommand(argv, foreign_environment(python, folder, launch.host), stop_signal=signal.SIGKILL)


class Router:
    """Example:

        with Router(token, Path("logs/router.log")) as router:
            router.start(servers.urls)
            pool = EnginePool([router.url], token, timeout_s=120)

    Start it from a thread that lives as long as it shall: see `lifetime`.
    """

    def __init__(
        self, token: str, log: Path, *, host: str = "127.0.0.1", python: str | None = None, args: tuple[str, ...] = ()
    ) -> None:
        port, metrics_port = free_ports([host] * 2)
        launch = EngineLaunch("smg", "", host=host, port=port, group_port=metrics_port, python=python, args=args)
        self._token = token
        self._process = ServerProcess(launch, token, log, name="the router", machine=ThisMachine(smg_command))
        self._http = httpx.Client(headers=auth_headers(token), timeout=30.0, trust_env=False)

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return self._process.launch.url

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self, urls: Sequence[str]) -> None:
        """Start the router and give it these servers, which must be serving.

        Raises ServerDied when it does not serve, RouterError when it does not take a server.
        """
        try:
            self._process.spawn()
            self._process.wait_until_serving(_START_S)
            for url in urls:
                self.add(url)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._process.end()
        self._http.close()

    def check(self) -> None:
        """Raises ServerDied when the router has ended."""
        if not self._process.alive:
            raise self._process.died()

    def add(self, url: str) -> None:
        """Have the server at `url` work; returns when it does. Raises RouterError when that does not happen."""
        deadline = time.monotonic() + _WORKER_S
        status = self._status(url)
        while status != _READY:
            if status is None:  # not "draining", where its name would still be taken
                self._ask("POST", "/workers", {"url": url, "api_key": self._token}, accept=(202, 409))
            if time.monotonic() > deadline:
                raise RouterError(f"the router did not begin to use {url} within {_WORKER_S:g} s")
            time.sleep(_POLL_S)
            status = self._status(url)

    def remove(self, url: str) -> None:
        """Give the server at `url` no more work; returns at once. No error where it has none."""
        worker = self._workers().get(url)
        if worker is not None and worker["status"] == _READY:
            self._ask("DELETE", f"/workers/{worker['id']}", accept=(202, 404))

    @property
    def urls(self) -> list[str]:
        """The servers that are given work."""
        return sorted(url for url, worker in self._workers().items() if worker["status"] == _READY)

    def _status(self, url: str) -> str | None:
        worker = self._workers().get(url)
        return None if worker is None else str(worker["status"])

    def _workers(self) -> dict[str, dict[str, Any]]:
        return {worker["url"]: worker for worker in self._ask("GET", "/workers", accept=(200,)).json()["workers"]}

    def _ask(self, method: str, path: str, body: object = None, *, accept: tuple[int, ...]) -> httpx.Response:
        try:
            reply = self._http.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise RouterError(f"the router: {method} {path} failed: {type(error).__name__} {error}") from error
        if reply.status_code not in accept:
            message = error_message(reply.text, reply.reason_phrase)
            raise RouterError(f"the router: {method} {path} answered {reply.status_code}: {message}")
        return reply


class Routed:
    """Trust in servers behind the router, of which alone `collector` asks: one that is not trusted gets no work there.

    Example: Routed(router, collector).trust("http://10.0.0.3:30000", 7)
    """

    def __init__(self, router: Router, collector: Trusts) -> None:
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
