"""The process of one server, with its log and its own folder: spawned, health-checked, ended with its children.

A server has its own session: Ctrl-C reaches only the driver, which then stops the servers. It also ends when the
process that started it is killed.  It may run on another machine, or belong to another program (`external`).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megarl.network.tls import server_certificate
from megarl.processes.handle import ProcessHandle
from megarl.processes.lifetime import last_lines
from megarl.processes.presence import show_life
from megarl.processes.programs import start_program
from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.engines import ENGINES
from megarl.servers.launch import REFUSAL, REFUSED, TOKEN_VARIABLE, EngineLaunch, MakeCommand, flags

PORT_TAKEN = "already in use"  # "address ..." of the system, "port is ..." of SGLang
_QUIET_PORTS = range(20_000, 32_000)  # ephemeral ports are 32768 and above on Linux, 49152 and above elsewhere
_POLL_S = 0.1
_STOP_S = 5.0
_QUESTION_S = 10.0


class ServerDied(RuntimeError):
    """A server ended, or does not serve; the message has the path of its log and the last lines of it."""


class MachineGone(OSError):
    """Nothing can be started on a machine until it is connected again."""


class Machine(Protocol):
    """A machine on which servers are started.  All raise OSError if that is not possible now."""

    @property
    def address(self) -> str | None:
        """At which its servers listen now; None: at the host of their launch."""
        ...

    def free_ports(self, hosts: Sequence[str]) -> list[int]: ...

    def start(self, launch: EngineLaunch, token: str, log: Path) -> ProcessHandle: ...


class LocalServer:
    """A server's process on this machine, a ProcessHandle.  Raises ValueError for a launch its engine does not support.

    Start it in a thread that lives as long as the server: see `lifetime`.
    """

    def __init__(self, launch: EngineLaunch, token: str, log: Path, make_command: MakeCommand | None = None) -> None:
        self._log, self._ended = log, False
        self._folder = tempfile.mkdtemp(prefix="megarl-server-")
        command = (make_command or ENGINES[launch.engine])(launch, Path(self._folder))
        self._stop_signal = command.stop_signal
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out, _certified(launch, token) as (options, files):
            self._log_start = out.tell()  # bytes in the log before this process
            variables = {**command.environment, TOKEN_VARIABLE: token}
            self._process = start_program([*command.argv, *options], env=variables, log=out, pass_fds=files)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def log_tail(self) -> str:
        """The last lines of its log, and the line about a taken port, after which SGLang logs more lines."""
        return last_lines(self._log, self._log_start, keep=PORT_TAKEN)

    def ask_to_end(self) -> None:
        if self.exit_code() is None:
            self._process.send_signal(self._stop_signal)

    def end(self, grace_s: float) -> None:
        """Send the stop signal, kill it after `grace_s`, kill its children, and delete its folder."""
        if self._ended:  # by now another process may have its pid
            return
        self._ended = True
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        # Its session's process group has only it and its children, which may outlive it for a moment.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _certified(launch: EngineLaunch, token: str) -> Iterator[tuple[list[str], list[int]]]:
    """The options of a server with https, and the open file that they name; none for a server with http.

    The file has the server's certificate and its private key.  It is in memory, so that no disk ever has the key.
    """
    if not launch.has_tls:
        yield [], []
        return
    with os.fdopen(os.memfd_create("certificate"), "wb", buffering=0) as file:
        file.write(server_certificate(token, list(dict.fromkeys([launch.host, launch.name or launch.host]))))
        path = f"/proc/self/fd/{file.fileno()}"
        yield flags({"--ssl-certfile": path, "--ssl-keyfile": path}), [file.fileno()]


@dataclass(frozen=True)
class ThisMachine:
    make_command: MakeCommand | None = None  # None: that of the launch's engine
    address: None = None

    def free_ports(self, hosts: Sequence[str]) -> list[int]:
        return free_ports(hosts)

    def start(self, launch: EngineLaunch, token: str, log: Path) -> ProcessHandle:
        return LocalServer(launch, token, log, self.make_command)


HERE = ThisMachine()


@dataclass(frozen=True)
class Machines:
    """Several machines for one server; HTTP is served by the first, whose address is the launch's host."""

    parts: tuple[tuple[Machine, str], ...]  # each with its address at first

    @property
    def address(self) -> str | None:
        return self.parts[0][0].address

    def free_ports(self, hosts: Sequence[str]) -> list[int]:
        return self.parts[0][0].free_ports(hosts)

    def start(self, launch: EngineLaunch, token: str, log: Path) -> ProcessHandle:
        started: list[ProcessHandle] = []
        try:
            for number, (machine, address) in enumerate(self.parts):
                where: dict[str, Any] = {
                    "num_machines": len(self.parts),
                    "machine": number,
                    "meeting_host": launch.host,
                }
                own_log = log.with_stem(f"{log.stem}_{number}") if number else log
                placed = replace(launch, host=machine.address or address, **where)
                started.append(machine.start(placed, token, own_log))
        except BaseException:
            _Together(started).end(0)
            raise
        return _Together(started)


class _Together:
    """The processes of one server as one ProcessHandle: alive while all of them are."""

    def __init__(self, handles: Sequence[ProcessHandle]) -> None:
        self._handles = handles

    @property
    def pid(self) -> int:
        return self._handles[0].pid

    def exit_code(self) -> int | None:
        return next((code for handle in self._handles if (code := handle.exit_code()) is not None), None)

    def log_tail(self) -> str:
        """The tail of the first log whose process ended; if none ended, of the first log."""
        ended = [handle for handle in self._handles if handle.exit_code() is not None]
        return (ended or self._handles)[0].log_tail()

    def ask_to_end(self) -> None:
        for handle in self._handles:
            handle.ask_to_end()

    def end(self, grace_s: float) -> None:
        self.ask_to_end()
        for handle in self._handles:
            handle.end(grace_s)


class ServerProcess:
    """Example: server = ServerProcess(launch, token, Path("x.log"), name="server 0"); server.spawn(); ...; server.end()

    Spawn it in a thread that lives as long as the server: see `lifetime`.
    """

    def __init__(self, launch: EngineLaunch, token: str, log: Path, *, name: str, machine: Machine = HERE) -> None:
        self.launch, self.log, self.name, self.machine = launch, log, name, machine
        self.incarnation = 0  # counts the processes of this server
        self._token = token
        self._handle: ProcessHandle | None = None

    @property
    def pid(self) -> int | None:
        return None if self._handle is None else self._handle.pid

    @property
    def alive(self) -> bool:
        return self._handle is not None and self._handle.exit_code() is None

    def spawn(self) -> None:
        """Start the process; it does not serve yet. Raises ValueError for a launch its engine does not support."""
        assert not self.alive, f"{self.name} is running already"
        if self._handle is not None:
            self._handle.end(0)
        self._handle = self._start()
        self.incarnation += 1

    def _start(self) -> ProcessHandle:
        return self.machine.start(self.launch, self._token, self.log)

    def move(self) -> None:
        """Take over the address that its machine has now, if it is another one; then its ports are to be chosen."""
        address = self.machine.address
        if address not in (None, self.launch.host):
            self.launch = replace(self.launch, host=address, port=None, group_port=None)

    def wait_until_serving(self, limit_s: float) -> None:
        """Return when the server's health check succeeds. Raises ServerDied if it ends, or after the limit."""
        self._wait_for(ServerClient.health, "did not serve", limit_s)

    def wait_for_answer(self, limit_s: float) -> None:
        """Return when the server's scheduler answers /server_info; SGLang's health check does not involve it."""
        self._wait_for(ServerClient.server_info, "did not answer", limit_s)

    def _wait_for(self, question: Callable[[ServerClient], Any], failing: str, limit_s: float) -> Any:
        """Repeat `question` until it succeeds; returns the answer."""
        deadline = time.monotonic() + limit_s
        engine = ServerClient(self.launch.url, self._token, timeout_s=min(_QUESTION_S, limit_s))
        with contextlib.closing(engine):
            while self.alive:
                show_life()
                try:
                    return question(engine)
                except ServerError as error:
                    if time.monotonic() > deadline:
                        raise self.died(f"{failing} within {limit_s:g} s ({error.message})") from error
                time.sleep(_POLL_S)
        raise self.died()

    def died(self, how: str | None = None) -> ServerDied:
        """The error for a server that is not usable: because of `how`, or because its process ended."""
        if how is None:
            code = None if self._handle is None else self._handle.exit_code()
            how = "was never started" if code is None else f"(pid {self.pid}) ended with exit code {code}"
        return ServerDied(f"{self.name} {how}; its log: {self.log}{self.log_tail()}")

    @property
    def refusal(self) -> str:
        """Why its process refused to serve this model, or with these options; "" if it did not."""
        if self._handle is None or self._handle.exit_code() != REFUSED:
            return ""
        last = self.log_tail().rpartition("\n")[2].strip()
        return last.removeprefix(REFUSAL) if last.startswith(REFUSAL) else ""

    def log_tail(self) -> str:
        """The last lines in the log of the current process."""
        return "" if self._handle is None else self._handle.log_tail()

    def ask_to_end(self) -> None:
        if self._handle is not None:
            self._handle.ask_to_end()

    def end(self, grace_s: float = _STOP_S) -> None:
        """End the process: with its stop signal, and with SIGKILL after `grace_s`; its children end too."""
        if self._handle is not None:
            self._handle.end(grace_s)


def free_ports(hosts: Sequence[str]) -> list[int]:
    """One free port on each of these hosts; all are held until all are chosen, so they differ.

    They are below the ephemeral ports: while a server starts, which may take a minute, any outgoing connection could
    take an ephemeral port.
    """
    with contextlib.ExitStack() as held:
        return [_hold_port(host, held) for host in hosts]


def _hold_port(host: str, held: contextlib.ExitStack) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (*random.SystemRandom().sample(_QUIET_PORTS, 100), 0):  # 0: at last, any port that the system chooses
        chosen = socket.socket(family, socket.SOCK_STREAM)
        try:
            chosen.bind((host, port))
        except OSError:
            chosen.close()
            continue
        held.enter_context(chosen)
        return int(chosen.getsockname()[1])
    raise OSError(f"rollout.host={host}: no port of it can be had; expected an address of this machine")
