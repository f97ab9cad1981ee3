"""The servers of a run: started, watched, named when they die, ended with the run.

A server is a process of its own session: Ctrl-C reaches only the driver, which then stops the servers. They also end
when the driver is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.rollout import ENGINES
from megarl.rollout.client import Engine, EngineError
from megarl.rollout.launch import TOKEN_VARIABLE, EngineLaunch
from megarl.rollout.lifetime import last_lines

_POLL_S = 0.1
_STOP_S = 5.0
_HEALTH_S = 10.0  # of one question: a stock server answers it by generating a token
_PORT_TRIES = 3


class ServerDied(RuntimeError):
    """A server ended, or never began to serve; the message names its log and shows its last lines."""


class Servers:
    """Example:

        with Servers([EngineLaunch("cpu", "/models/tiny")], token, "runs/x/logs") as servers:
            servers.start()
            use(servers.urls); servers.check()

    Start it from a thread that lives as long as the servers shall: see `lifetime`.
    """

    def __init__(
        self, launches: Sequence[EngineLaunch], token: str, log_dir: str | Path, *, start_timeout_s: float = 300.0
    ) -> None:
        for launch in launches:
            if launch.engine not in ENGINES:
                raise ValueError(f"rollout.engine={launch.engine!r}: want one of {', '.join(sorted(ENGINES))}")
        self._launches = [_with_own_seed(launch, index) for index, launch in enumerate(launches)]
        self._token, self._start_timeout_s = token, start_timeout_s
        self._logs = [Path(log_dir) / f"server_{i}.log" for i in range(len(launches))]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * len(launches)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        return [launch.url for launch in self._launches]

    @property
    def pids(self) -> list[int | None]:
        return [process.pid if process else None for process in self._processes]

    def start(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Start all, and return when all serve; `on_progress(ready, total)` is told as they come up.

        Raises ServerDied when one ends or does not serve within the limit; then all are stopped.
        """
        try:
            self._launches = _with_ports(self._launches)
            for index in range(len(self._launches)):
                self._spawn(index)
            deadline = time.monotonic() + self._start_timeout_s
            for index in range(len(self._launches)):
                self._wait_or_move(index, deadline)
                if on_progress is not None:
                    on_progress(index + 1, len(self._launches))
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raises ServerDied when a server has ended."""
        for index, process in enumerate(self._processes):
            if process is None or process.poll() is not None:
                raise self._died(index)

    def restart(self, index: int) -> None:
        """End server `index` if it lives and start it anew at the same url, with the weights of its model folder."""
        self._end(index)
        self._spawn(index)
        self._wait_until_serving(index, time.monotonic() + self._start_timeout_s)

    def stop(self) -> None:
        """End all: first asked, then killed."""
        for process in self._processes:
            if process is not None and process.poll() is None:
                process.terminate()
        for index in range(len(self._processes)):
            self._end(index)

    def _spawn(self, index: int) -> None:
        launch = self._launches[index]
        self._logs[index].parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, TOKEN_VARIABLE: self._token, "OMP_NUM_THREADS": str(launch.num_threads)}
        with self._logs[index].open("ab") as log:
            self._processes[index] = subprocess.Popen(
                ENGINES[launch.engine](launch),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _wait_until_serving(self, index: int, deadline: float) -> None:
        engine = Engine(self._launches[index].url, self._token, timeout_s=_HEALTH_S)
        while True:
            process = self._processes[index]
            if process is None or process.poll() is not None:
                raise self._died(index)
            try:
                engine.health()
                break
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise ServerDied(
                        f"server {index} did not serve within {self._start_timeout_s:g} s ({error.message}); its log: "
                        f"{self._logs[index]}{last_lines(self._logs[index])}"
                    ) from error
                time.sleep(_POLL_S)
        engine.close()

    def _wait_or_move(self, index: int, deadline: float) -> None:
        """Between our choice of a free port and the server's use of it, another may take it: then choose again."""
        for _ in range(_PORT_TRIES):
            try:
                return self._wait_until_serving(index, deadline)
            except ServerDied:
                if "address already in use" not in last_lines(self._logs[index]).lower():
                    raise
            self._launches[index] = _with_ports([replace(self._launches[index], port=None)])[0]
            self._spawn(index)
        self._wait_until_serving(index, deadline)

    def _end(self, index: int) -> None:
        process = self._processes[index]
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the group holds it and its children only
            process.wait()

    def _died(self, index: int) -> ServerDied:
        process = self._processes[index]
        how = "was never started" if process is None else f"(pid {process.pid}) ended with exit code {process.poll()}"
        log = self._logs[index]
        return ServerDied(f"server {index} {how}; its log: {log}{last_lines(log)}")


def _with_own_seed(launch: EngineLaunch, index: int) -> EngineLaunch:
    """Servers of one seed would draw the same random numbers for different prompts."""
    return launch if launch.random_seed is None else replace(launch, random_seed=launch.random_seed + index)


def _with_ports(launches: Sequence[EngineLaunch]) -> list[EngineLaunch]:
    """Give every launch without a port a free one."""
    ports = iter(free_ports([launch.host for launch in launches if launch.port is None]))
    return [launch if launch.port is not None else replace(launch, port=next(ports)) for launch in launches]


def free_ports(hosts: Sequence[str]) -> list[int]:
    """One free port on each of these hosts; all are held until all are chosen, so they differ."""
    with contextlib.ExitStack() as held:
        ports = []
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            chosen = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
            chosen.bind((host, 0))
            ports.append(chosen.getsockname()[1])
        return ports
