"""The rendezvous store of a process group: only processes that know its token can use it, over TLS.

torch's own TCPStore takes orders from everybody who reaches its port.  Gloo reads the addresses of its peers from the
store in C++, and NCCL the identifier of a communicator, so both must be the words of the group's members.  Nothing in
a store is unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megarl.io.sockets import listen
from megarl.processes.channels.connection import Connection, ConnectionLost, WireRefused, connect
from megarl.processes.channels.listener import Listener
from megarl.processes.ranks import OWN_ADDRESS, STORE, STORE_TOKEN

MOST_KEYS = 2**18  # a group of 4,096 ranks has some 100,000
LARGEST = 2**20  # bytes of a key or a value, such as the addresses of a rank's sockets for each other rank
_CONNECT_S = 20.0
_RETRY_S = 0.2
WELCOME: dict[str, Any] = {}  # the first message to who was let in: in a crowd he may be turned away after his proof

_kept: WeakKeyDictionary[dist.ProcessGroup, dist.Store] = WeakKeyDictionary()


class Unreachable(dist.DistNetworkError):
    """This process cannot connect to an address, or what listens there does not let it in; one sentence."""


class StorePlace(NamedTuple):
    """Where a store is, and its secret."""

    address: str  # host:port
    token: str


class StoreHost:
    """Holds the values of a group's store; members connect with `TlsStore`.

    Example: host = StoreHost("127.0.0.1"); TlsStore(host.place); ...; host.shut(); ...; host.close()
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        """Listens at this address alone; `token` None: a new one.  Raises OSError if it cannot listen there."""
        listener = listen(address)
        self.port = int(listener.getsockname()[1])
        self.place = StorePlace(f"{address}:{self.port}", token or secrets.token_hex(16))
        self._values = values = dist.HashStore()  # within this process
        self._orders: dict[str, Callable[..., Any]] = {
            "set": lambda key, value: values.set(key, _bytes(value)),  # type: ignore[arg-type]  # it takes bytes, too
            "get": values.get,
            "wait": lambda keys, limit_s: values.wait(keys, timedelta(seconds=limit_s)),
            "add": values.add,
            "compare_set": lambda key, *both: values.compare_set(key, *map(_bytes, both)),  # type: ignore[arg-type]
            "delete_key": values.delete_key,
            "check": values.check,
        }
        self._connections: list[Connection] = []
        self._listener = Listener(listener, self.place.token, self._serve, name="store")

    def store(self, num_members: int, timeout_s: float) -> TlsStore:
        """The side of the member that hosts it."""
        return TlsStore(self.place, timeout_s, num_members)

    def shut(self) -> None:
        """Let nobody in any more: the group is made, and its members keep their connections."""
        self._listener.close()

    def close(self) -> None:
        self.shut()
        for connection in self._connections:
            connection.close()

    def _serve(self, connection: Connection, _: Mapping[str, Any]) -> None:
        self._connections.append(connection)
        try:
            connection.send(WELCOME)
            while True:
                order, _ = connection.receive()
                try:
                    self._check(order["with"])
                    result = self._orders[order["do"]](*order["with"])
                except (RuntimeError, ValueError) as error:  # torch's, after a wait
                    connection.send({"error": str(error).partition("\n")[0]})
                else:
                    connection.send({"result": _text(result) if isinstance(result, bytes) else result})
        except ConnectionLost:
            connection.close()  # the member has ended

    def _check(self, words: list[Any]) -> None:
        if self._values.num_keys() >= MOST_KEYS or any(len(each) > LARGEST for each in words if isinstance(each, str)):
            raise ValueError(f"a store takes fewer than {MOST_KEYS} keys, and at most {LARGEST} bytes in a word")


class TlsStore(dist.Store):
    """A member's side: a torch.distributed.Store whose calls go to a StoreHost.  Several threads may use it.

    A call that waits holds the others up, as in torch's TCPStore.  Raises DistStoreError for a refusal and where a key
    does not come in time, DistNetworkError if the host is gone.
    """

    def __init__(self, place: StorePlace, timeout_s: float = 300.0, num_members: int = 0) -> None:
        """`timeout_s`: of a wait for a key.  Raises Unreachable.

        `num_members`: returns when so many have come, as torch's TCPStore does; 0: at once.  NCCL's groups are made
        before anybody has come.
        """
        super().__init__()
        self._timeout_s, self._lock = timeout_s, threading.Lock()
        self._connection = reach(place)
        if num_members:
            self.meet(num_members)

    def meet(self, count: int) -> None:
        """Wait until so many members have called this, which each does once."""
        if self.add("have come", 1) == count:
            self.set("all have come", "")
        self.wait(["all have come"])

    def _ask(self, do: str, *arguments: Any) -> Any:
        try:
            with self._lock:
                self._connection.send({"do": do, "with": arguments})
                reply, _ = self._connection.receive()
        except ConnectionLost as error:
            raise dist.DistNetworkError(f"the store of the group is gone: {error}") from error
        if "error" in reply:
            raise dist.DistStoreError(reply["error"])
        return reply["result"]

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return _bytes(self._ask("get", key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: bytes | str, wanted: bytes | str) -> bytes:
        return _bytes(self._ask("compare_set", key, _text(expected), _text(wanted)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    deleteKey = delete_key  # noqa: N815  # the name by which torch's C++ calls it

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> TlsStore:
        return self


def keep(group: dist.ProcessGroup, store: dist.Store) -> None:
    """The store stays as long as the group: torch's C++ keeps its half of this object, but not the half in Python."""
    _kept[group] = store


def join_world(backend: str, timeout_s: float) -> None:
    """Make torch's default group of all ranks, which `processes.ranks` describes in environment variables.

    Raises Unreachable if a machine of theirs cannot connect to another.

    `timeout_s`: of the wait for other ranks, and of each collective.
    """
    place = StorePlace(os.environ[STORE], os.environ[STORE_TOKEN])
    store = TlsStore(place, timeout_s)
    rank, here, num_ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if here < num_ranks and os.environ["LOCAL_RANK"] == "0":
        _reach_all(store, place.token, rank, here, num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s))
    keep(dist.distributed_c10d._get_default_group(), store)


def _reach_all(store: TlsStore, token: str, rank: int, here: int, num_ranks: int) -> None:
    """Connect to the first rank of each other machine, at any free port, such as gloo and NCCL take.

    They would wait in C++ for many minutes.
    """
    listener = listen(os.environ[OWN_ADDRESS], 0)
    address = f"{os.environ[OWN_ADDRESS]}:{listener.getsockname()[1]}"
    with closing(Listener(listener, token, lambda connection, _: connection.send(WELCOME), name="peers")):
        store.set(f"peer of rank {rank}", json.dumps([address, here]))
        first, num_machines = 0, 0
        while first < num_ranks:
            peer, its = json.loads(store.get(f"peer of rank {first}"))
            if first != rank:
                reach(StorePlace(peer, token)).close()
            first, num_machines = first + its, num_machines + 1
        store.meet(num_machines)


def reach(place: StorePlace) -> Connection:
    """Connect to what listens there with that token, and sends WELCOME.  Raises Unreachable."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            connection = connect(place.address, place.token, {}, timeout_s=_CONNECT_S)
            connection.receive(time.monotonic() + _CONNECT_S)  # WELCOME
            connection.sock.settimeout(None)
            return connection
        except WireRefused as error:
            raise Unreachable(str(error)) from error
        except (ConnectionLost, ConnectionResetError, BrokenPipeError) as error:
            if time.monotonic() > deadline:
                raise Unreachable(f"{place.address} lets nobody in: {error}") from error
            time.sleep(_RETRY_S)  # many came at once, and this one was turned away
        except OSError as error:
            host, _, port = place.address.rpartition(":")
            there = f"[{host}]:{port}" if ":" in host else place.address
            raise Unreachable(
                f"{there} cannot be reached from here ({error.strerror or error}); expected that all ports between the "
                "machines are open, as ranks and servers take any free one (docs/several_machines.md, Ports): "
                f"`megarl doctor --listen {there}` there and `--peer {there}` here show it"
            ) from error


def _text(value: bytes | str) -> str:
    """As JSON holds it."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
