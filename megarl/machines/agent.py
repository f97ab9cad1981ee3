"""The agent of a node other than node 0: starts ranks and servers on the driver's request, and ends with the driver.

Ranks run only `megarl.roles.worker`.  A server runs with the interpreter and the arguments that the run's settings
give.  So anyone who has the run's token can run programs here with the rights of the agent's user.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.io.auth import server_token
from megarl.machines.nodes import JOIN_S, SILENCE_S
from megarl.processes.channels.connection import Connection, ConnectionLost, WireRefused, connect
from megarl.processes.channels.links import Relay
from megarl.processes.channels.waiting import Heartbeat, Wait
from megarl.processes.lifetime import ProcessHandle
from megarl.processes.ranks import RanksLaunch, RanksProcess
from megarl.processes.signals import Terminated
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import LocalServer, free_ports

WORKERS = ("megarl.roles.worker",)
_CONNECT_S = 10.0
_LOOK_S = 0.2


class DriverLost(RuntimeError):
    """Node 0 is gone, does not answer, or refused this agent; one sentence."""


@dataclass
class Ranks:
    """The ranks of a group on this node and their relay, as a ProcessHandle."""

    process: RanksProcess
    relay: Relay

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        return self.process.exit_code()

    def log_tail(self) -> str:
        return self.process.log_tail()

    def end(self, grace_s: float) -> None:
        self.process.end(grace_s)
        self.relay.close()


class Agent:
    """Example: Agent(1, "10.0.0.1:29500", token).serve()"""

    def __init__(
        self,
        node: int,
        address: str | Callable[[], str],
        token: str,
        *,
        source: str | None = None,
        silence_s: float = SILENCE_S,
        workers: Sequence[str] = WORKERS,
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`address`: of the driver; a function finds it anew for each try, and raises OSError while it is not known.

        `source`: this node's own address, if it differs from the one that routes to the driver.  `silence_s`: a driver
        without a heartbeat for this long counts as lost.  `workers`: modules that ranks may run.
        `say`: gets a sentence while it waits for the driver.
        """
        self._find = address if callable(address) else None
        self._address = "" if callable(address) else address
        self._node = node
        self._token = token
        self._source = source
        self._silence_s = silence_s
        self._workers = workers
        self._say = say
        self._own = ""  # the address of this node, known after it has connected to the driver
        self._jobs: dict[int, ProcessHandle] = {}
        self._told: set[int] = set()  # jobs whose end was reported to the driver
        self._done = threading.Event()
        self._signals: list[int] = []  # that the driver does not know yet
        self._orders: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "ports": self._ports, "ranks": self._ranks, "server": self._server,
            "words": self._words, "end": self._end,
        }  # fmt: skip

    def take_signal(self, number: int, _: object = None) -> None:
        """A handler of job_signals.ASKS: tell the driver, which saves and ends the run.  Never waits.

        Raises Terminated before this agent has joined a run.
        """
        if self._own:
            self._signals.append(number)
        elif number == signal.SIGTERM:
            raise Terminated("SIGTERM: this machine had not joined a run")

    def serve(self, join_s: float = JOIN_S) -> None:
        """Carry out requests until the driver sends "leave", then end all processes that were started.

        Raises: DriverLost if the driver is lost or has failed, Terminated if SIGTERM has ended the run.
        Call it from a thread that lives as long as the process: see processes.lifetime.
        """
        connection = self._join(join_s)
        self._own = str(connection.sock.getsockname()[0])
        connection.sock.settimeout(self._silence_s)
        heartbeat = Heartbeat(lambda: [connection])
        threading.Thread(target=self._watch, args=(connection,), daemon=True, name="watch").start()
        try:
            while (order := connection.receive()[0]).get("do") != "leave":
                if "beat" not in order:
                    self._take(order, connection)
            if "why" in order:
                raise (Terminated if order.get("terminated") else DriverLost)(str(order["why"]))
        except ConnectionLost as error:
            raise DriverLost(f"the driver at {self._address} is lost: {error}") from error
        finally:
            self._done.set()
            heartbeat.stop()
            self._end_all()
            connection.close()

    def _join(self, limit_s: float) -> Connection:
        wait = Wait(limit_s, self._say)
        while True:
            try:
                if self._find is not None:
                    self._address = self._find()
                return self._connect({"version": __version__, "host": socket.gethostname()})
            except OSError as error:  # the driver may not have started yet; what was found may be another run's address
                if isinstance(error, WireRefused) and self._find is None:
                    raise DriverLost(str(error)) from error
                why = f"no driver{' at' if self._address else ''} {self._address}".rstrip()
                why = f"machine {self._node}: {why} yet ({error.strerror or error})"
                if wait.is_over:
                    raise DriverLost(f"{why}, within {limit_s:g} s") from error
                wait.tell(f"{why}; it tries again")
                time.sleep(1.0)

    def _connect(self, hello: dict[str, Any]) -> Connection:
        whole = {"node": self._node, **hello}
        return connect(self._address, self._token, whole, timeout_s=_CONNECT_S, source=self._source)

    def _take(self, order: dict[str, Any], connection: Connection) -> None:
        if order.get("do") == "end":  # this may take a while, and other requests must not wait for it
            threading.Thread(target=self._answer, args=(order, connection), daemon=True).start()
        else:
            self._answer(order, connection)

    def _answer(self, order: dict[str, Any], connection: Connection) -> None:
        try:
            if (carry_out := self._orders.get(str(order.get("do")))) is None:
                raise ValueError(f"{order.get('do')} is no order; expected one of {', '.join(self._orders)}")
            answer = carry_out(order)
        except Exception as error:  # a failed request must not stop the others
            answer = {"error": f"{type(error).__name__} {error}"}
        with suppress(ConnectionLost):  # `serve` handles it
            connection.send({"id": order.get("id"), **answer})

    def _ports(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"ports": free_ports(order["hosts"])}

    def _ranks(self, order: dict[str, Any]) -> dict[str, Any]:
        launch = RanksLaunch(**order["launch"])
        if launch.worker not in self._workers:
            raise ValueError(f"worker={launch.worker}: expected {' or '.join(self._workers)}")
        relay = Relay(self._connect({"relay": order["job"]}), launch.num_ranks)
        try:
            process = RanksProcess(replace(launch, address=self._own or launch.address), relay.address, relay.token)
        except BaseException:
            relay.close()
            raise
        job = self._jobs[order["job"]] = Ranks(process, relay)
        return {"pid": job.pid}

    def _server(self, order: dict[str, Any]) -> dict[str, Any]:
        launch = EngineLaunch(**order["launch"])
        job = self._jobs[order["job"]] = LocalServer(launch, server_token(os.environ, self._token), Path(order["log"]))
        return {"pid": job.pid}

    def _words(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"words": self._jobs[order["job"]].log_tail()}

    def _end(self, order: dict[str, Any]) -> dict[str, Any]:
        self._jobs[order["job"]].end(order["grace_s"])
        return {}

    def _watch(self, connection: Connection) -> None:
        """Report signals, and jobs that have ended."""
        with suppress(ConnectionLost):
            while not self._done.wait(_LOOK_S):
                while self._signals:
                    connection.send({"signal": int(self._signals.pop(0))})
                for number, job in list(self._jobs.items()):
                    code = job.exit_code()
                    if code is not None and number not in self._told:
                        self._told.add(number)
                        connection.send({"ended": number, "code": code, "words": job.log_tail()})

    def _end_all(self) -> None:
        for job in self._jobs.values():
            if isinstance(job, Ranks):
                job.relay.close()  # they end with its connections
        threads = [threading.Thread(target=job.end, args=(5.0,)) for job in self._jobs.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
