"""The process of one server, with its log and its own folder: spawned, health-checked, ended with its children.

A server has its own session, so that Ctrl-C reaches only the driver, which stops the servers.  It also ends with the
process that started it.  It may run on another machine, or belong to another program (`external`).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megarl.io.sockets import ports_to_try
from megarl.io.tls import server_certificate
from megarl.processes import watchdog
from megarl.processes.lifetime import MemoryEnd, ProcessHandle, last_lines
from megarl.processes.programs import start_program
from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.launch import REFUSAL, REFUSED, TOKEN_VARIABLE, EngineLaunch, MakeCommand, flags, hf_command
from megarl.servers.sglang import sglang_command

# The server programs: a name of `rollout.engine` -> the function that makes its command line.
ENGINES: dict[str, MakeCommand] = {"hf": hf_command, "sglang": sglang_command}

PORT_TAKEN = "already in use"  # "address ..." of the system, "port is ..." of SGLang
_QUIET_PORTS = range(20_000, 32_000)  # ephemeral ports are 32768 and above on Linux, 49152 and above elsewhere
_POLL_S = 0.1
_QUESTION_S = 10.0


class ServerDied(RuntimeError):
    """A server ended, or does not serve; the message has the path and the last lines of its log."""


class MachineGone(OSError):
    """Nothing can be started on a machine until it is connected again."""


class Machine(Protocol):
    """A machine on which servers are started.  All raise OSError if that is not possible now."""

    @property
    def address(self) -> str | None:
        """Where its servers listen now; None: at the host of their launch."""
        ...

    def free_ports(self, hosts: Sequence[str]) -> list[int]: ...

    def start(self, launch: EngineLaunch, token: str, log: Path) -> ProcessHandle: ...


class LocalServer:
    """A server's process on this machine, a ProcessHandle.  Start it in a thread that lives as long: see `lifetime`.

    Raises ValueError for a launch that its engine does not support.
    """

    def __init__(self, launch: EngineLaunch, token: str, log: Path, make_command: MakeCommand | None = None) -> None:
        self._log, self._ended = log, False
        self._folder = tempfile.mkdtemp(prefix="server-", dir=os.environ.get("TMPDIR"))  # that of the run
        command = (make_command or ENGINES[launch.engine])(launch, Path(self._folder))
        self._memory = MemoryEnd()
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
        return last_lines(self._log, self._log_start, keep=PORT_TAKEN) + self._memory.words(self.exit_code())

    def end(self, grace_s: float) -> None:
        """Kill it and its children at once, because it has nothing to save, and delete its folder."""
        if self._ended:  # by now another process may have its pid
            return
        self._ended = True
        # Its session's process group has only it and its children.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _certified(launch: EngineLaunch, token: str) -> Iterator[tuple[list[str], list[int]]]:
    """The options of a server with https, and the open file that they name; none for a server with http.

    The file, in memory only, has the server's certificate and its private key.
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
                part = replace(launch, num_machines=len(self.parts), machine=number, meeting_host=launch.host)
                part_log = log.with_stem(f"{log.stem}_{number}") if number else log
                started.append(machine.start(replace(part, host=machine.address or address), token, part_log))
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

    def end(self, grace_s: float) -> None:
        for handle in self._handles:
            handle.end(grace_s)


class ServerProcess:
    """Example: server = ServerProcess(launch, token, Path("x.log"), name="server 0"); server.spawn(); ...; server.end()

    Spawn it in a thread that lives as long: see `lifetime`.
    """

    def __init__(self, launch: EngineLaunch, token: str, log: Path, *, name: str, machine: Machine = HERE) -> None:
        self.launch = launch
        self.log = log
        self.name = name
        self.machine = machine
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
        """Start the process, which does not serve yet."""
        assert not self.alive, f"{self.name} is running already"
        if self._handle is not None:
            self._handle.end(0)
        self._handle = self._start()
        self.incarnation += 1

    def _start(self) -> ProcessHandle:
        return self.machine.start(self.launch, self._token, self.log)

    def move(self) -> None:
        """Take over its machine's address, if that has changed; then its ports are to be chosen."""
        address = self.machine.address
        if address not in (None, self.launch.host):
            self.launch = replace(self.launch, host=address, port=None, group_port=None)

    def wait_until_serving(self, limit_s: float) -> None:
        """Return when the health check succeeds.  Raises ServerDied if the server ends, or after the limit."""
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
                watchdog.heartbeat()
                try:
                    return question(engine)
                except ServerError as error:
                    if time.monotonic() > deadline:
                        raise self.died(f"{failing} within {limit_s:g} s ({error.message})") from error
                time.sleep(_POLL_S)
        raise self.died()

    def died(self, how: str | None = None) -> ServerDied:
        """The error for a server that cannot be used; `how` None: its process has ended."""
        if how is None:
            code = None if self._handle is None else self._handle.exit_code()
            how = "was never started" if code is None else f"(pid {self.pid}) ended with exit code {code}"
        return ServerDied(f"{self.name} {how}; its log: {self.log}{self.log_tail()}")

    @property
    def refusal(self) -> str:
        """Why its process refused its model or its options; "" if it did not."""
        if self._handle is None or self._handle.exit_code() != REFUSED:
            return ""
        last = self.log_tail().rpartition("\n")[2].strip()
        return last.removeprefix(REFUSAL) if last.startswith(REFUSAL) else ""

    def log_tail(self) -> str:
        """The last lines in the log of the current process."""
        return "" if self._handle is None else self._handle.log_tail()

    def end(self) -> None:
        """End the process and its children."""
        if self._handle is not None:
            self._handle.end(0)


def choose_ports(processes: Sequence[ServerProcess]) -> None:
    """Set the missing ports of every launch: one for HTTP, and one for the rendezvous of its ranks."""
    by_machine: dict[Machine, list[ServerProcess]] = {}
    for process in processes:
        if process.launch.port is None or process.launch.group_port is None:
            by_machine.setdefault(process.machine, []).append(process)
    for machine, its in by_machine.items():
        ports = iter(machine.free_ports([process.launch.host for process in its for _ in range(2)]))
        for process in its:
            launch = process.launch
            port = next(ports)
            group_port = next(ports)
            process.launch = replace(launch, port=launch.port or port, group_port=launch.group_port or group_port)


def spawn(process: ServerProcess) -> ServerDied | None:
    """Start its process in this thread, which has to outlive the server.

    Returns why that was not possible, for example a full disk.  Raises MachineGone.
    """
    try:
        process.spawn()
    except MachineGone:
        raise
    except OSError as error:
        return ServerDied(f"server {process.launch.index} did not start: {error}")
    return None


def spawn_elsewhere(process: ServerProcess) -> ServerDied | None:
    """Start it again with other ports."""
    process.end()
    process.launch = replace(process.launch, port=None, group_port=None)
    choose_ports([process])
    return spawn(process)


def free_ports(hosts: Sequence[str]) -> list[int]:
    """One free port on each of these hosts; all are held until all are chosen, so they differ.

    They are below the ephemeral ports, which any outgoing connection could take while a server starts.
    """
    with contextlib.ExitStack() as held:
        return [_hold_port(host, held) for host in hosts]


def _hold_port(host: str, held: contextlib.ExitStack) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    quiet = random.SystemRandom().sample(_QUIET_PORTS, 100)
    for port in ports_to_try(host, (*quiet, 0)):  # 0: at last, any port that the system chooses
        chosen = socket.socket(family, socket.SOCK_STREAM)
        try:
            chosen.bind((host, port))
        except OSError:
            chosen.close()
            continue
        held.enter_context(chosen)
        return int(chosen.getsockname()[1])
    raise OSError(f"rollout.host={host}: no port of it can be had; expected an address of this machine")
