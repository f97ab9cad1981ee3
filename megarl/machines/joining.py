"""Servers that join a run while it goes on, and leave it: `JoinListener` of the driver, `Membership` of the servers.

A program that owns servers (`megarl serve`) connects with the token of the run and names its servers: {"urls": [...]}.
When it wants to end, it says {"leave": 1} and waits for the answer {"do": "leave"}.  The driver sends that also at the
end of the run, and with a reason, "why", to servers that it does not use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from megarl import __version__
from megarl.io.sockets import listen
from megarl.machines.nodes import SILENCE_S, address_of
from megarl.processes.channels.connection import Connection, ConnectionLost, WireRefused, connect
from megarl.processes.channels.listener import Listener
from megarl.processes.channels.waiting import Heartbeat, Wait

_CONNECT_S = 10.0


class JoinFailed(RuntimeError):
    """The run did not take the servers, or its driver is gone; one sentence."""


class JoinedProgram:
    """The servers of one program, as the driver sees them."""

    def __init__(self, connection: Connection) -> None:
        self.urls: tuple[str, ...] = ()  # empty: it has not named them yet
        self.wants_to_leave = False
        self.lost = ""  # the reason, after the connection broke
        self.connection = connection
        connection.sock.settimeout(SILENCE_S)

    def listen(self) -> None:
        """Returns when the connection ends."""
        try:
            while True:
                said, _ = self.connection.receive()
                if "urls" in said:
                    self.urls = _urls(said["urls"])
                self.wants_to_leave |= "leave" in said
        except (ConnectionLost, ValueError) as error:
            self.lost = str(error)
        finally:
            self.lost = self.lost or "nobody hears it any more"

    def dismiss(self, why: str = "") -> None:
        """Its servers are not used, or not any more; `why`: it has not asked for that."""
        with suppress(ConnectionLost):
            self.connection.send({"do": "leave", "why": why})
        self.connection.close()


def _urls(said: object) -> tuple[str, ...]:
    if not isinstance(said, list) or not all(isinstance(url, str) for url in said):
        raise ValueError(f"it names {str(said)[:200]} as its servers; expected a list of urls")
    return tuple(said)


class JoinListener:
    """Example: with JoinListener("10.0.0.1:29400", token) as joins: ... for program in joins.programs: ...

    `address`: where the driver listens.  Raises ValueError if it cannot listen there.
    """

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._programs: list[JoinedProgram] = []
        self._lock = threading.Lock()  # of the programs
        self._listener: Listener
        self._heartbeat: Heartbeat

    def __enter__(self) -> Self:
        host, port = self._address.rsplit(":", 1)
        try:
            listener = listen(address_of(host), int(port))
        except OSError as error:
            raise ValueError(
                f"rollout.join={self._address}: {error.strerror}; expected an address of the machine that runs `megarl "
                "train`, and a free port"
            ) from error
        self.port = int(listener.getsockname()[1])
        self._listener = Listener(listener, self._token, self._let_in, name="servers join")
        self._heartbeat = Heartbeat(lambda: [program.connection for program in self.programs])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Send all away; after a failure with its reason."""
        self._heartbeat.stop()
        self._listener.close()
        failed = kind is not None and issubclass(kind, Exception)
        for program in self.programs:
            program.dismiss(f"the run stopped: {' '.join(str(error).split())[:2000]}" if failed else "")

    @property
    def programs(self) -> list[JoinedProgram]:
        """All that have come and are not forgotten."""
        with self._lock:
            return list(self._programs)

    def forget(self, program: JoinedProgram) -> None:
        with self._lock:
            self._programs.remove(program)

    def _let_in(self, connection: Connection, hello: dict[str, object]) -> None:
        program = JoinedProgram(connection)
        if hello.get("version") != __version__:
            program.dismiss(f"it has megarl {hello.get('version')}, the run {__version__}; expected the same")
            return
        with self._lock:
            self._programs.append(program)
        program.listen()  # this thread is of this caller alone


class Membership:
    """The connection of a program with servers to the driver of a run.  Raises JoinFailed if the driver refuses it.

    Example: membership = Membership("10.0.0.1:29400", token, Wait(1800, print)); membership.name(urls); ...
    """

    def __init__(self, address: str, token: str, wait: Wait, *, source: str | None = None) -> None:
        """`wait`: the driver may start later.  `source`: the own address; None: that which routes to the driver."""
        self._address, self._ended = address, threading.Event()
        self._why = ""  # why it has ended, if nobody wanted that
        self._connection = self._connect(token, source, wait)
        self._connection.sock.settimeout(SILENCE_S)
        self._heartbeat = Heartbeat(lambda: [self._connection])
        threading.Thread(target=self._listen, daemon=True, name="membership").start()

    @property
    def own_address(self) -> str:
        return str(self._connection.sock.getsockname()[0])

    @property
    def has_ended(self) -> bool:
        """Whether the run is over, or the driver has sent these servers away.  Raises JoinFailed if it has failed."""
        if self._ended.is_set() and self._why:
            raise JoinFailed(self._why)
        return self._ended.is_set()

    def name(self, urls: Sequence[str]) -> None:
        """The servers serve."""
        with suppress(ConnectionLost):  # `has_ended` tells
            self._connection.send({"urls": list(urls)})

    def leave(self, limit_s: float) -> bool:
        """Ask to leave; returns whether the driver has let the servers go within the limit."""
        with suppress(ConnectionLost):
            self._connection.send({"leave": 1})
        return self._ended.wait(limit_s)

    def close(self) -> None:
        self._heartbeat.stop()
        self._ended.set()
        self._connection.close()

    def _connect(self, token: str, source: str | None, wait: Wait) -> Connection:
        while True:
            try:
                return connect(self._address, token, {"version": __version__}, timeout_s=_CONNECT_S, source=source)
            except WireRefused as error:
                raise JoinFailed(str(error)) from error
            except OSError as error:  # the driver may not have started yet
                why = f"rollout.join={self._address}: no driver is there yet ({error.strerror or error})"
                if wait.is_over:
                    raise JoinFailed(why) from error
                wait.tell(f"{why}; it tries again")
                time.sleep(1.0)

    def _listen(self) -> None:
        try:
            while (said := self._connection.receive()[0]).get("do") != "leave":
                pass
            self._why = str(said.get("why") or "")
        except ConnectionLost as error:
            self._why = f"the driver at {self._address} is lost: {error}"
        self._heartbeat.stop()
        self._ended.set()
