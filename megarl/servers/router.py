"""The router `smg` in front of several servers: generation requests go to it, all other calls to the servers directly.

A server gets requests only while it is a worker: `remove` ends that (running requests still finish), `add` begins it.
The router is slow to notice dead servers: the driver, which health-checks the servers, has to remove them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.io.http_calls import Answer, Caller, CallFailed
from megarl.io.tls import authority_certificate
from megarl.rollout.protocol import ORDER_BYTES, ROUTING_KEY, auth_headers, error_message
from megarl.rollout.server_states import Phase, ServerState, Update
from megarl.servers.launch import EngineLaunch, ServerCommand, flags
from megarl.servers.server_process import ServerProcess, ThisMachine, free_ports
from megarl.servers.sglang_environment import foreign_environment, sglang_python

_POLL_S = 0.05
_ASK_S = 30.0
_START_S = 60.0
_WORKER_S = 60.0  # timeout of adding one server
_LONGER_S = 60  # by which a request's timeout in the router is longer than its client's
_READY = "ready"  # status of a worker that gets requests


class RouterError(RuntimeError):
    """The router refused a call or did not carry it out; one sentence."""


def smg_command(launch: EngineLaunch, folder: Path) -> ServerCommand:
    """The command of the router; it uses host, port, group_port (for its metrics), python and args of the launch."""
    python = sglang_python(launch.python)
    options = {"--host": launch.host, "--port": launch.port, "--log-level": "warn"}
    # A new key goes to the server with the fewest requests, which the router counts itself, and stays there.
    options |= {"--policy": "least_load", "--assignment-mode": "min_load", "--routing-key-headers": ROUTING_KEY}
    options |= {"--prometheus-host": launch.host, "--prometheus-port": launch.group_port}  # else on every interface
    argv = [str(python), "-m", "megarl.servers.router_server", str(os.getpid()), *flags(options)]
    argv += ["--routing-key-override", *launch.args]
    return ServerCommand(argv, foreign_environment(python, folder, launch.host))


class Router:
    """Example: with Router(token, Path("logs/router.log")) as router: router.start(servers.urls); ...

    Start it in a thread that lives as long as the router: see `lifetime`.
    """

    def __init__(self, token: str, log: Path, *, request_timeout_s: float = 120.0, python: str | None = None) -> None:
        """`request_timeout_s`: that of its client; the router waits longer for the servers, so the client decides."""
        authority = log.with_suffix(".pem")  # it trusts servers with https by this certificate
        authority.parent.mkdir(parents=True, exist_ok=True)
        authority.write_bytes(authority_certificate(token))
        own = {"--request-timeout-secs": math.ceil(request_timeout_s) + _LONGER_S, "--ca-cert-paths": authority}
        port, metrics_port = free_ports([EngineLaunch.host] * 2)
        launch = EngineLaunch("smg", "", port=port, group_port=metrics_port, python=python, args=tuple(flags(own)))
        self._token = token
        self._process = ServerProcess(launch, token, log, name="the router", machine=ThisMachine(smg_command))
        self._caller = Caller(auth_headers(token))

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
        """Start the router and add these servers, which must be serving.

        Raises ServerDied if the router does not serve, RouterError if it does not accept a server.
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
        self._caller.close()

    def check(self) -> None:
        """Raises ServerDied when the router has ended."""
        if not self._process.alive:
            raise self._process.died()

    def add(self, url: str) -> None:
        """Make the server at `url` a worker; returns when it is ready, which after `remove` takes some seconds.

        Raises RouterError after 60 s.
        """
        deadline = time.monotonic() + _WORKER_S
        status = self._status(url)
        while status != _READY:
            if status is None:  # not "draining": then its name is still in use
                self._ask("POST", "/workers", {"url": url, "api_key": self._token}, accept=(202, 409))
            if time.monotonic() > deadline:
                raise RouterError(f"the router did not begin to use {url} within {_WORKER_S:g} s")
            time.sleep(_POLL_S)
            status = self._status(url)

    def remove(self, url: str) -> None:
        """Send the server at `url` no more requests; returns when that is so. No error if it is not a worker.

        Raises RouterError if the router still uses it after 30 s.
        """
        worker = self._workers().get(url)
        if worker is None or worker["status"] != _READY:
            return
        self._ask("DELETE", f"/workers/{worker['id']}", accept=(202, 404))  # 202: it is going to
        deadline = time.monotonic() + _ASK_S
        while self._status(url) == _READY:
            if time.monotonic() > deadline:
                raise RouterError(f"the router still uses {url} {_ASK_S:g} s after it was told not to")
            time.sleep(_POLL_S)

    @property
    def urls(self) -> list[str]:
        """The servers that get requests."""
        return sorted(url for url, worker in self._workers().items() if worker["status"] == _READY)

    def _status(self, url: str) -> str | None:
        worker = self._workers().get(url)
        return None if worker is None else str(worker["status"])

    def _workers(self) -> dict[str, dict[str, Any]]:
        workers = json.loads(self._ask("GET", "/workers", accept=(200,)).content)["workers"]
        return {worker["url"]: worker for worker in workers}

    def _ask(self, method: str, path: str, body: object = None, *, accept: tuple[int, ...]) -> Answer:
        try:
            reply = self._caller.call(method, self.url + path, body, within_s=_ASK_S, most_bytes=ORDER_BYTES)
        except CallFailed as error:
            raise RouterError(f"the router: {method} {path} failed: {error}") from error
        if reply.status not in accept:
            message = error_message(reply.text, reply.reason)
            raise RouterError(f"the router: {method} {path} answered {reply.status}: {message}")
        return reply


class Routed:
    """Servers behind a router: only those that generate are its workers; the pools know only the router's url.

    Example: Routed(router, collectors.update).update(ServerState("http://10.0.0.3:30000", Phase.GENERATING, 7))
    """

    def __init__(self, router: Router, publish: Update) -> None:
        self._router, self._publish = router, publish
        self._versions: dict[str, int | None] = {}  # url -> version, of the workers
        for url in router.urls:  # those of an earlier life of the trainer, which the router outlives
            router.remove(url)

    def take_unfit(self) -> dict[str, str]:
        """None: behind a router it is not known which server failed."""
        return {}

    def update(self, state: ServerState) -> None:
        url, phase, version, adapter = state.url, state.phase, state.version, state.adapter
        assert adapter is None, "behind a router requests cannot select adapters: the configuration refuses it"
        if phase is Phase.GENERATING:  # the router may send it requests, and its completions count
            self._versions[url] = version
            self._router.add(url)
            self._announce(phase, version)
        elif phase is Phase.HELD:  # no new requests to any server, because which one the router chooses is unknown
            self._announce(phase)
        else:  # all running requests of the router are retried: which of them the server has is unknown
            self._router.remove(url)
            if self._versions.pop(url, None) is not None:
                self._announce(phase)
                for version in dict.fromkeys(self._versions.values()):
                    self._announce(Phase.GENERATING, version)

    def _announce(self, phase: Phase, version: int | None = None) -> None:
        self._publish(ServerState(self._router.url, phase, version))
