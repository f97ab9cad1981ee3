"""The servers of a run: started together, health-checked, restarted when they die, ended with the run.

`start` brings all servers to SERVING; afterwards `poll` changes their states:

    SERVING --it ends, or does not answer--> RESTING --after a rest--> STARTING --it answers--> SERVING
    STARTING --it ends, or takes too long--> RESTING
    a server that has used up its restarts goes OUT instead of RESTING

A restarted server has the same url, and the weights of its start.  Servers that run already (`at`) are health-checked
too, but never ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path

from megarl.processes import watchdog
from megarl.processes.restarts import Restarts
from megarl.servers.external import RunningServer
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import (
    ENGINES,
    HERE,
    PORT_TAKEN,
    Machine,
    MachineGone,
    ServerDied,
    ServerProcess,
    choose_ports,
    free_ports,
    spawn,
    spawn_elsewhere,
)

__all__ = ["ServerDied", "ServerEvent", "Servers", "State", "Supervision", "free_ports"]

_PORT_TRIES = 3
_LOOK_S = 0.1
_WAIT_S = 1.0  # at most, before the thread that drives shows that it goes on
_MOST_OTHERS = 1024  # servers of other programs that are asked at the same time


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    RESTING = "resting"  # its process has ended, and is restarted after a rest
    OUT = "out"  # its process has ended, and is not restarted


@dataclass(frozen=True)
class ServerEvent:
    """A server stopped serving (RESTING or OUT), serves again (SERVING), or could not be restarted (OUT)."""

    index: int
    url: str
    state: State
    incarnation: int  # number of the process, from 1
    reason: str = ""  # why it does not serve: a sentence, and the tail of its log


@dataclass(frozen=True)
class Supervision:
    """Timeouts and limits of `Servers`."""

    start_timeout_s: float = 1800.0  # includes loading the model
    answer_within_s: float = 180.0  # timeout of a health check; after it a serving server counts as dead
    ask_every_s: float = 5.0  # interval of health checks
    max_restarts: int = 3  # of one server; the count is reset after it has served for `settled_after_s`
    settled_after_s: float = 600.0
    rest_s: float = 1.0  # before the first restart; doubles with each

    @property
    def restarts(self) -> Restarts:
        return Restarts(self.max_restarts, self.rest_s, settled_after_s=self.settled_after_s)


@dataclass(eq=False)
class _Watched:
    process: ServerProcess
    restarts: Restarts
    state: State = State.STARTING
    since: float = 0.0  # time.monotonic() when this state began
    answer: Future[None] | None = None  # of the running health check
    asked: float = 0.0  # time.monotonic() of the last health check


class Servers:
    """Example:

        with Servers([EngineLaunch("hf", "/models/tiny")], token, "runs/x/logs") as servers:
            servers.start()
            for event in servers.poll(): ...

    Start and poll it in a thread that lives as long as the servers: see `lifetime`.
    """

    def __init__(
        self,
        launches: Sequence[EngineLaunch],
        token: str,
        log_dir: str | Path,
        supervision: Supervision | None = None,
        machines: Sequence[Machine] | None = None,
    ) -> None:
        """`machines`: of each server; None: this machine."""
        for launch in launches:
            if launch.engine not in ENGINES:
                raise ValueError(f"rollout.engine={launch.engine!r}: expected one of {', '.join(sorted(ENGINES))}")
        processes = [
            ServerProcess(
                _numbered(launch, index),
                token,
                Path(log_dir) / f"server_{index}.log",
                name=f"server {index}",
                machine=machines[index] if machines else HERE,
            )
            for index, launch in enumerate(launches)
        ]
        self._patience, self._token = supervision or Supervision(), token
        self.joined: set[str] = set()  # urls of those that came with `add`
        self._servers = [_Watched(process, self._patience.restarts) for process in processes]
        self._is_spawned = False
        self._companions: list[Callable[[], None]] = []
        self._last_reason = "all were out before"  # why one does not serve
        self._askers = ThreadPoolExecutor(len(processes) + _MOST_OTHERS, thread_name_prefix="ask")

    @classmethod
    def at(cls, urls: Sequence[str], token: str, supervision: Supervision | None = None) -> Servers:
        """Servers that another program starts and ends."""
        servers = cls([], token, "", supervision)
        running = [RunningServer(url, token, index) for index, url in enumerate(urls)]
        servers._servers = [_Watched(process, servers._patience.restarts) for process in running]
        return servers

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        return [server.process.launch.url for server in self._servers]

    @property
    def serving(self) -> list[str]:
        """Urls of those that serve."""
        return [server.process.launch.url for server in self._servers if server.state is State.SERVING]

    @property
    def states(self) -> list[State]:
        return [server.state for server in self._servers]

    @property
    def pids(self) -> list[int | None]:
        return [server.process.pid for server in self._servers]

    def start(self, on_progress: Callable[[int, int], None] = lambda ready, total: None) -> None:
        """Start all that are not started, and return when all serve; calls `on_progress(ready, total)` after each.

        Raises ValueError if one refuses its model or its options, ServerDied if one ends or does not serve in time;
        then all are stopped.
        """
        try:
            if not self._is_spawned:
                self.spawn()
            for server in self._servers:
                self._await_start(server)
            for ready, (server, failure) in enumerate(self._settled(self._servers), start=1):
                if failure is not None:
                    if reason := server.process.refusal:
                        raise ValueError(reason) from failure
                    raise failure
                self._enter(server, State.SERVING)
                on_progress(ready, len(self._servers))
        except BaseException:
            self.stop()
            raise

    def spawn(self) -> None:
        """Start the processes of all; `start` then waits for them."""
        processes = [server.process for server in self._servers]
        self._is_spawned = True
        try:
            choose_ports(processes)
            for process in processes:
                process.spawn()
        except BaseException:
            self.stop()
            raise

    def add(self, url: str) -> None:
        """Also watch a server of another program: when it answers, `poll` reports that it serves."""
        index = 1 + max((server.process.launch.index for server in self._servers), default=-1)
        server = _Watched(RunningServer(url, self._token, index), self._patience.restarts)
        server.process.spawn()
        self._servers.append(server)
        self.joined.add(server.process.launch.url)
        self._await_start(server)

    def remove(self, url: str) -> None:
        """Stop watching a server that came with `add`."""
        server = self._named(url)
        server.process.end()
        self._servers.remove(server)
        self.joined.discard(url)

    def _named(self, url: str) -> _Watched:
        return {server.process.launch.url: server for server in self._servers}[url]

    def revive(self) -> list[str]:
        """Restart the servers that have ended, each on the machine that now has its place; returns when they serve.

        For a run whose ranks start again.  Servers of another program are not waited for.  One that cannot start rests,
        or is out, as with `poll`; returns why each of these does not serve.  Raises ServerDied if no server is left,
        MachineGone if a machine is not connected, OSError if it has no port.
        """
        ours = [server for server in self._servers if not isinstance(server.process, RunningServer)]
        ended = [server for server in ours if server.state is not State.OUT and not server.process.alive]
        for server in ended:
            server.answer = None
            self._forgive(server)
            self._enter(server, State.STARTING)
            server.process.move()
        choose_ports([server.process for server in ended])
        reasons: list[str] = []
        not_started: dict[_Watched, ServerDied] = {}
        for server in ended:
            if failure := spawn(server.process):
                not_started[server] = failure
            else:
                self._await_start(server)
        started = [server for server in ended if server not in not_started]
        for server, failure in chain(not_started.items(), self._settled(started)):
            if failure:
                reasons.append(str(failure))
                self._fail(server, failure)
            else:
                self._enter(server, State.SERVING)
        return [*reasons, *self.wait_for_one()]

    def wait_for_one(self) -> list[str]:
        """Return when a server serves; returns why others have ended.  Raises ServerDied if no server is left."""
        reasons: list[str] = []
        while State.SERVING not in self.states:
            if all(state is State.OUT for state in self.states):
                raise ServerDied(f"no server is left; {self._last_reason}")
            time.sleep(_LOOK_S)
            watchdog.heartbeat()
            reasons += [event.reason for event in self.poll() if event.reason]
        return reasons

    def _settled(self, servers: Sequence[_Watched]) -> Iterator[tuple[_Watched, ServerDied | None]]:
        """Yield each of these servers, which are starting, once it serves, or with its failure.

        New ports are chosen, up to 3 times, for one whose port another process has taken.
        """
        waiting, moved = list(servers), Counter[_Watched]()
        while waiting:
            wait([server.answer for server in waiting if server.answer is not None], _WAIT_S, FIRST_COMPLETED)
            watchdog.heartbeat()
            for server in [server for server in waiting if server.answer is not None and server.answer.done()]:
                failure, _ = _news(server)
                server.answer = None
                if failure and moved[server] < _PORT_TRIES and PORT_TAKEN in server.process.log_tail().lower():
                    moved[server] += 1
                    failure = spawn_elsewhere(server.process)
                    if failure is None:
                        self._await_start(server)
                        continue
                waiting.remove(server)
                yield server, failure

    def watch_too(self, check: Callable[[], None]) -> None:
        """Let `poll` also call `check`, which may raise ServerDied."""
        self._companions.append(check)

    def poll(self, *, starts: bool = True) -> list[ServerEvent]:
        """The changes since the last call, without waiting.  `starts`: restart servers whose rest is over."""
        for check in self._companions:
            check()
        events: list[ServerEvent] = []
        for server in self._servers:
            lasted_s = time.monotonic() - server.since
            if server.state in (State.STARTING, State.SERVING):
                events += self._look_at(server)
            elif starts and server.state is State.RESTING and lasted_s >= server.restarts.next_rest_s:
                events += self._start_again(server)
        return events

    def restart(self, url: str, reason: str) -> list[ServerEvent]:
        """End a server; `poll` restarts it as if it had died.  Returns the event of its end, if it was serving."""
        server = self._named(url)
        if server.state in (State.STARTING, State.SERVING):
            return self._fail(server, server.process.died(f"is to start again: {reason}"), settles=False)
        return []

    def stop(self) -> None:
        """End all, at the same time."""
        with ThreadPoolExecutor(max(1, len(self._servers)), thread_name_prefix="end") as threads:
            watchdog.wait_for([threads.submit(server.process.end) for server in self._servers])
        self._askers.shutdown(wait=False, cancel_futures=True)

    def _look_at(self, server: _Watched) -> list[ServerEvent]:
        failure, answered = _news(server)
        if failure is not None:
            return self._fail(server, failure)
        if answered:
            server.answer = None
            return [self._enter(server, State.SERVING)] if server.state is State.STARTING else []
        if server.answer is None and time.monotonic() - server.asked >= self._patience.ask_every_s:
            self._ask(server, server.process.wait_for_answer, self._patience.answer_within_s)
        return []

    def _ask(self, server: _Watched, question: Callable[[float], None], limit_s: float) -> None:
        server.asked = time.monotonic()
        server.answer = self._askers.submit(question, limit_s)

    def _fail(self, server: _Watched, failure: ServerDied, *, settles: bool = True) -> list[ServerEvent]:
        """End a server, for a restart if it has one left.  `settles`: False for a restart on request."""
        was_serving = server.state is State.SERVING
        if settles:
            self._forgive(server)
        server.process.end()
        server.answer = None
        if server.restarts.are_used_up:
            return [self._enter(server, State.OUT, f"after {server.restarts.count} restarts, {failure}")]
        event = self._enter(server, State.RESTING, str(failure))
        return [event] if was_serving else []

    def _forgive(self, server: _Watched) -> None:
        """Count its restarts anew if it has served for long."""
        if server.state is State.SERVING:
            server.restarts.note_run(time.monotonic() - server.since)

    def _start_again(self, server: _Watched) -> list[ServerEvent]:
        try:
            failure = spawn(server.process)
        except MachineGone:  # not counted as a restart: wait for its machine
            server.since = time.monotonic()
            return []
        server.restarts.count += 1
        if failure:
            return self._fail(server, failure)
        self._await_start(server)
        return []

    def _await_start(self, server: _Watched) -> None:
        self._enter(server, State.STARTING)
        self._ask(server, server.process.wait_until_serving, self._patience.start_timeout_s)

    def _enter(self, server: _Watched, state: State, reason: str = "") -> ServerEvent:
        server.state, server.since = state, time.monotonic()
        self._last_reason = reason or self._last_reason
        launch = server.process.launch
        return ServerEvent(launch.index, launch.url, state, server.process.incarnation, reason)


def _news(server: _Watched) -> tuple[ServerDied | None, bool]:
    """(failure of the server, or None; whether the last health check has succeeded)."""
    if not server.process.alive:
        return server.process.died(), False
    if server.answer is None or not server.answer.done():
        return None, False
    error = server.answer.exception()
    assert error is None or isinstance(error, ServerDied), f"asking a server failed: {error!r}"
    return error, error is None


def _numbered(launch: EngineLaunch, index: int) -> EngineLaunch:
    """With its index and its own seed: with one seed all servers would draw the same random numbers."""
    seed = None if launch.random_seed is None else launch.random_seed + index
    return replace(launch, index=index, random_seed=seed)
