"""Servers that join a run while it goes on, and leave it: the driver's `Door`, and `Membership`, the servers' side.

A program that owns servers (`megarl serve`) connects with the run's token, which also seals what they say, and names
its servers: {"urls": [...]}.  When it wants to end, it says {"leave": 1} and waits for the answer {"do": "leave"}.  The
driver sends that also at the end of the run, and with a reason, "why", to servers that it does not take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from megarl import __version__
from megarl.machines.nodes import SILENCE_S, address_of
from megarl.network.sockets import listen
from megarl.processes.connection import HEARTBEAT_S, Connection, ConnectionLost, WireRefused
from megarl.processes.greeting import connect
from megarl.processes.listener import Listener

_CONNECT_S = 10.0


class JoinFailed(RuntimeError):
    """The run did not take the servers, or its driver is gone; one sentence."""


class Party:
    """The servers of one program, as the driver sees them."""

    def __init__(self, connection: Connection) -> None:
        self.urls: tuple[str, ...] = ()  # empty: it has not named them yet
        self.wants_to_leave = False
        self.lost = ""  # the reason, after the connection broke
        self._connection = connection
        connection.sock.settimeout(SILENCE_S)

    def listen(self) -> None:
        """Returns when the connection ends."""
        try:
            while True:
                said, _ = self._connection.receive()
                if "urls" in said:
                    self.urls = _urls(said["urls"])
                self.wants_to_leave |= "leave" in said
        except (ConnectionLost, ValueError) as error:
            self.lost = str(error)
        finally:
            self.lost = self.lost or "nobody hears it any more"

    def beat(self) -> None:
        with suppress(ConnectionLost):
            self._connection.send({"beat": 1})

    def dismiss(self, why: str = "") -> None:
        """Its servers are not used, or not any more; `why`: it has not asked for that."""
        with suppress(ConnectionLost):
            self._connection.send({"do": "leave", "why": why})
        self._connection.close()


def _urls(said: object) -> tuple[str, ...]:
    if not isinstance(said, list) or not all(isinstance(url, str) for url in said):
        raise ValueError(f"it names {str(said)[:200]} as its servers; expected a list of urls")
    return tuple(said)


class Door:
    """Example: with Door("10.0.0.1:29400", token) as door: ... for party in door.parties: ...

    `address`: where the driver listens.  Raises ValueError if it cannot listen there.
    """

    def __init__(self, address: str, token: str) -> None:
        self._address, self._token = address, token
        self._parties: list[Party] = []
        self._lock = threading.Lock()  # of the parties
        self._closed = threading.Event()
        self._listener: Listener

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
        threading.Thread(target=self._beat, daemon=True, name="servers' beat").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Send all away; after a failure with its reason."""
        self._closed.set()
        self._listener.close()
        failed = kind is not None and issubclass(kind, Exception)
        for party in self.parties:
            party.dismiss(f"the run stopped: {' '.join(str(error).split())[:2000]}" if failed else "")

    @property
    def parties(self) -> list[Party]:
        """All that have come and are not forgotten."""
        with self._lock:
            return list(self._parties)

    def forget(self, party: Party) -> None:
        with self._lock:
            self._parties.remove(party)

    def _let_in(self, connection: Connection, hello: dict[str, object]) -> None:
        party = Party(connection)
        if hello.get("version") != __version__:
            party.dismiss(f"it has megarl {hello.get('version')}, the run {__version__}; expected the same")
            return
        with self._lock:
            self._parties.append(party)
        party.listen()  # this thread is of this caller alone

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            for party in self.parties:
                party.beat()


class Membership:
    """The connection of a program with servers to the driver of a run.  Raises JoinFailed if the driver refuses it.

    Example: membership = Membership("10.0.0.1:29400", token); membership.name(urls); ...; membership.leave(600)
    """

    def __init__(self, address: str, token: str, *, limit_s: float, source: str | None = None) -> None:
        """`limit_s`: the driver may start later.  `source`: the own address; None: that which routes to the driver."""
        self._address, self._ended = address, threading.Event()
        self._why = ""  # why it has ended, if nobody wanted that
        self._connection = self._connect(token, source, time.monotonic() + limit_s)
        self._connection.sock.settimeout(SILENCE_S)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True, name="membership").start()

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
        self._ended.set()
        self._connection.close()

    def _connect(self, token: str, source: str | None, deadline: float) -> Connection:
        while True:
            try:
                return connect(self._address, token, {"version": __version__}, timeout_s=_CONNECT_S, source=source)
            except WireRefused as error:
                raise JoinFailed(str(error)) from error
            except OSError as error:  # the driver may not have started yet
                if time.monotonic() > deadline:
                    raise JoinFailed(f"rollout.join={self._address}: nobody listens there ({error})") from error
                time.sleep(1.0)

    def _listen(self) -> None:
        try:
            while (said := self._connection.receive()[0]).get("do") != "leave":
                pass
            self._why = str(said.get("why") or "")
        except ConnectionLost as error:
            self._why = f"the driver at {self._address} is lost: {error}"
        self._ended.set()

    def _beat(self) -> None:
        with suppress(ConnectionLost):
            while not self._ended.wait(HEARTBEAT_S):
                self._connection.send({"beat": 1})
