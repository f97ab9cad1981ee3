"""The process of one server, with its log and a folder of its own: spawned, watched, ended together with its children.

A server is a session of its own: Ctrl-C reaches only the driver, which then stops the servers. It also ends when the
process that started it is killed.  It may run on another machine, or be somebody else's that is only watched.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from megarl.processes.handle import ProcessHandle
from megarl.processes.lifetime import last_lines
from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.engines import ENGINES
from megarl.servers.launch import TOKEN_VARIABLE, EngineLaunch, MakeCommand

PORT_TAKEN = "address already in use"
_QUIET_PORTS = range(20_000, 32_000)  # Linux hands out 32768 and above, other systems 49152 and above
_POLL_S = 0.1
_STOP_S = 5.0
_QUESTION_S = 10.0


class ServerDied(RuntimeError):
    """A server ended, or does not serve; the message names its log and shows its last lines."""


class MachineGone(OSError):
    """Nothing can be started there until the machine is back."""


class Machine(Protocol):
    """Where servers are started.  Both raise OSError where that cannot be done there now."""

    def free_ports(self, hosts: Sequence[str]) -> list[int]: ...

    def start(self, launch: EngineLaunch, token: str, log: Path) -> ProcessHandle: ...


class LocalServer:
    """A server's process on this machine, a ProcessHandle.  Raises ValueError for a launch that its engine cannot do.

    Start it from a thread that lives as long as the server shall: see `lifetime`.
    """

    def __init__(self, launch: EngineLaunch, token: str, log: Path, make_command: MakeCommand | None = None) -> None:
        self._log, self._ended = log, False
        self._folder = tempfile.mkdtemp(prefix="megarl-server-")
        command = (make_command or ENGINES[launch.engine])(launch, Path(self._folder))
        self._stop_signal = command.stop_signal
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._log_start = out.tell()  # bytes in the log before this process
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**command.environment, TOKEN_VARIABLE: token},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def log_tail(self) -> str:
        """The last lines that it logged, and whether its port was taken: SGLang has more to say behind that."""
        return last_lines(self._log, self._log_start, keep=PORT_TAKEN)

    def ask_to_end(self) -> None:
        if self.exit_code() is None:
            self._process.send_signal(self._stop_signal)

    def end(self, grace_s: float) -> None:
        """End it, first asked and then, after `grace_s`, killed; and whatever it left behind."""
        if self._ended:  # by now its number may be another process's
            return
        self._ended = True
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        # Its own session: the group holds it and its children only, which may outlive it for a moment.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class ThisMachine:
    make_command: MakeCommand | None = None  # None: that of the launch's engine

    def free_ports(self, hosts: Sequence[str]) -> list[int]:
        return free_ports(hosts)

    def start(self, launch: EngineLaunch, token: str, log: Path) -> ProcessHandle:
        return LocalServer(launch, token, log, self.make_command)


HERE = ThisMachine()


@dataclass(frozen=True)
class Machines:
    """Several machines for one server: it serves at the first, whose address is the launch's host."""

    parts: tuple[tuple[Machine, str], ...]  # each with its address

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
                started.append(machine.start(replace(launch, host=address, **where), token, own_log))
        except BaseException:
            _Together(started).end(0)
            raise
        return _Together(started)


class _Together:
    """The processes of one server as one ProcessHandle: it lives while all of them do."""

    def __init__(self, handles: Sequence[ProcessHandle]) -> None:
        self._handles = handles

    @property
    def pid(self) -> int:
        return self._handles[0].pid

    def exit_code(self) -> int | None:
        return next((code for handle in self._handles if (code := handle.exit_code()) is not None), None)

    def log_tail(self) -> str:
        """Of the one that ended, or else of the first."""
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

    Spawn it from a thread that lives as long as the server shall: see `lifetime`.
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
        """Start the process; it does not serve yet. Raises ValueError for a launch that its engine cannot do."""
        assert not self.alive, f"{self.name} is running already"
        if self._handle is not None:
            self._handle.end(0)
        self._handle = self._start()
        self.incarnation += 1

    def _start(self) -> ProcessHandle:
        return self.machine.start(self.launch, self._token, self.log)

    def wait_until_serving(self, limit_s: float) -> None:
        """Return when the server says that it can serve; ServerDied when it ends, or the limit passes, before that."""
        self._wait_for(ServerClient.health, "did not serve", limit_s)

    def wait_for_answer(self, limit_s: float) -> None:
        """Return when the server answers a question that its scheduler must answer, which health is not in SGLang."""
        self._wait_for(ServerClient.server_info, "did not answer", limit_s)

    def _wait_for(self, question: Callable[[ServerClient], Any], failing: str, limit_s: float) -> Any:
        """What it answered."""
        deadline = time.monotonic() + limit_s
        engine = ServerClient(self.launch.url, self._token, timeout_s=min(_QUESTION_S, limit_s))
        with contextlib.closing(engine):
            while self.alive:
                try:
                    return question(engine)
                except ServerError as error:
                    if time.monotonic() > deadline:
                        raise self.died(f"{failing} within {limit_s:g} s ({error.message})") from error
                time.sleep(_POLL_S)
        raise self.died()

    def died(self, how: str | None = None) -> ServerDied:
        """Why the server is of no use: `how`, or else how its process ended."""
        if how is None:
            code = None if self._handle is None else self._handle.exit_code()
            how = "was never started" if code is None else f"(pid {self.pid}) ended with exit code {code}"
        return ServerDied(f"{self.name} {how}; its log: {self.log}{self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines that this incarnation logged."""
        return "" if self._handle is None else self._handle.log_tail()

    def ask_to_end(self) -> None:
        if self._handle is not None:
            self._handle.ask_to_end()

    def end(self, grace_s: float = _STOP_S) -> None:
        """End the process, first asked and then, after `grace_s`, killed; and whatever it left behind."""
        if self._handle is not None:
            self._handle.end(grace_s)


def free_ports(hosts: Sequence[str]) -> list[int]:
    """One free port on each of these hosts; all are held until all are chosen, so they differ.

    They lie below those that a system hands out by itself: a server that starts for a minute would lose one of them to
    any connection that is made meanwhile.
    """
    with contextlib.ExitStack() as held:
        return [_hold_port(host, held) for host in hosts]


def _hold_port(host: str, held: contextlib.ExitStack) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in (*random.SystemRandom().sample(_QUIET_PORTS, 100), 0):  # 0: the system's own choice, at last
        chosen = socket.socket(family, socket.SOCK_STREAM)
        try:
            chosen.bind((host, port))
        except OSError:
            chosen.close()
            continue
        held.enter_context(chosen)
        return int(chosen.getsockname()[1])
    raise OSError(f"rollout.host={host}: no port of it can be had; expected an address of this machine")
