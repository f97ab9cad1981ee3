"""The driver's side of a run's machines: sends requests to the agents of all machines except node 0.

The driver listens at one address.  Agents connect there with the run's token, and once more for every group whose calls
they relay.  When an agent is lost, its processes end too; after a restart it can join again.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.machines.member import Member, NodeLost, RemoteJob
from megarl.network.sockets import listen
from megarl.processes.connection import HEARTBEAT_S, Connection, ConnectionLost
from megarl.processes.listener import Listener
from megarl.processes.presence import show_life
from megarl.processes.ranks import END_S, RanksLaunch
from megarl.processes.signals import Terminated
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import HERE, Machine, MachineGone

SILENCE_S = 60.0  # a rank or a machine without a heartbeat for this long counts as lost
USUAL_PORT = 29500  # of the driver
JOIN_S = 1800.0  # a node may get its machine later than node 0
_FILES, _FILES_PER_NODE = 512, 8  # open files of the driver: an agent, a relay for each group, clients of servers
_FILES_PER_RANK = 4  # open files of the process that hosts a group's store: connections of two groups
_NAME_S = 60.0  # until node 0 must know its own name
_ASK_S = 1.0  # between two questions for it
_RELAY_S = 60.0  # time limit between the start of ranks on a node and the connection of their relay


def allow_files(num_nodes: int, ranks_per_node: int) -> None:
    """Raise the limit of open files of this process and its children to what these machines and ranks need.

    Raises ValueError if the hard limit is too low.
    """
    wanted = _FILES + (_FILES_PER_NODE + _FILES_PER_RANK * ranks_per_node) * num_nodes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < wanted:
        raise ValueError(
            f"trainer.nnodes={num_nodes}: node 0 may open {hard} files; expected `ulimit -Hn` of {wanted} or more, "
            "each node and each rank is some connections"
        )
    if resource.RLIM_INFINITY != soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allow_all_files() -> None:
    """Raise this process's limit of open files to the hard limit: it may host stores of many ranks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listen_at(host: str, port: int | None) -> socket.socket:
    """Listen at this port; None: at USUAL_PORT, or at a free one if another run has it.  Raises OSError."""
    if port is not None:
        return listen(host, port)
    try:
        return listen(host, USUAL_PORT)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return listen(host)


def address_of(host: str, limit_s: float = 0.0) -> str:
    """The first address of a name.  Raises OSError for one that is not known, also after `limit_s`.

    In Kubernetes a pod may start some seconds before the others, and it itself, can look up its name.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror:
            if time.monotonic() > deadline:
                raise
            time.sleep(_ASK_S)


class Nodes:
    """Example: with Nodes(2, 8, "10.0.0.1", 29500, token) as nodes: nodes.wait(); Group(..., nodes=nodes)"""

    def __init__(
        self,
        num_nodes: int,
        ranks_per_node: int,
        host: str,
        port: int | None,
        token: str,
        *,
        spares: int = 0,
        silence_s: float = SILENCE_S,
    ) -> None:
        """`port` None: USUAL_PORT if it is free, else another.  `spares`: machines that may wait for a place."""
        self.num_nodes, self.ranks_per_node = num_nodes, ranks_per_node
        self._host, self._wanted_port, self._token = host, port, token
        self._num_spares, self._silence_s = spares, silence_s
        self._members: dict[int, Member] = {}  # by their places, those that are lost too
        self._spares: list[Member] = []
        self._relays: dict[int, queue.SimpleQueue[Connection]] = {}
        self._jobs = itertools.count()
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the members
        self._listener: Listener

    def __enter__(self) -> Nodes:
        allow_files(self.num_nodes + self._num_spares, self.ranks_per_node)
        try:
            name, self._host = self._host, address_of(self._host, _NAME_S)
            if name not in (self._host, "localhost") and ipaddress.ip_address(self._host).is_loopback:
                raise ValueError(
                    f"trainer.master_addr={name}: on this machine the name means {self._host}, which no other machine "
                    "reaches; expected node 0's address in their network"
                )
            listener = listen_at(self._host, self._wanted_port)
        except OSError as error:
            port = "" if self._wanted_port is None else f" trainer.master_port={self._wanted_port}"
            raise ValueError(
                f"trainer.master_addr={self._host}{port}: {error.strerror}; expected an address of this machine, node "
                "0, under which the others reach it, and a free port (trainer.master_port=null takes one)"
            ) from error
        self.port = int(listener.getsockname()[1])
        self._listener = Listener(listener, self._token, self._let_in, name="nodes")
        threading.Thread(target=self._beat, daemon=True, name="nodes beat").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Send "leave" to the agents.  After a failure or SIGTERM with the reason: their commands end as this one does.

        So what started them all, for example Kubernetes, starts them all again.
        """
        self._closed.set()
        self._listener.close()
        failed = isinstance(error, Exception | Terminated)
        why = f"the driver stopped: {' '.join(str(error).split())}" if failed else None
        for member in (*self._members.values(), *self._spares):
            member.leave(why, terminated=isinstance(error, Terminated))

    def wait(
        self,
        limit_s: float = JOIN_S,
        on_wait: Callable[[list[int]], None] | None = None,
        on_replaced: Callable[[str], None] | None = None,
    ) -> None:
        """Wait until every machine has joined, or a spare one has taken the place of a lost one.

        `on_wait` gets the missing machines whenever they change, `on_replaced` a sentence about each replacement.
        Raises: NodeLost after the limit.
        """
        deadline = time.monotonic() + limit_s
        told: list[int] = []
        while missing := self._missing(on_replaced):
            show_life()
            if time.monotonic() > deadline:
                raise NodeLost(f"machines {missing} of {self.num_nodes} did not come within {limit_s:.0f} s")
            if on_wait is not None and missing != told:
                on_wait(missing)
            told = missing
            time.sleep(0.1)

    def _missing(self, on_replaced: Callable[[str], None] | None) -> list[int]:
        """The places without a machine, after spare machines took those of lost ones."""
        with self._lock:
            self._spares = [spare for spare in self._spares if not spare.lost]
            for place, lost in list(self._members.items()):
                if lost.lost and self._spares:
                    spare = self._members[place] = self._spares.pop(0)
                    spare.node = place
                    if on_replaced is not None:
                        on_replaced(f"{spare.name} takes the place of host {lost.host}, which is lost")
            return [k for k in range(1, self.num_nodes) if k not in self._members or self._members[k].lost]

    def address(self, node: int) -> str:
        """The address at which other nodes reach this node."""
        return self._host if node == 0 else self._member(node).address

    def name(self, node: int) -> str:
        """Example: "machine 1 (host gpu-07)"; also of a machine that is lost."""
        if node == 0:
            return f"machine 0 (host {socket.gethostname()})"
        member = self._members.get(node)
        return member.name if member is not None else f"machine {node}"

    def start_ranks(self, node: int, launch: RanksLaunch) -> tuple[RemoteJob, Connection]:
        """Start ranks of a group on a node; returns the job and the connection to its relay."""
        number = next(self._jobs)
        connections = self._relays[number] = queue.SimpleQueue()
        try:
            job = self._member(node).start("ranks", number, launch=asdict(launch))
            try:
                return job, connections.get(timeout=_RELAY_S)
            except queue.Empty:
                job.end(END_S)
                raise
        except queue.Empty as error:
            raise NodeLost(f"{self.name(node)} opened no connection for its ranks") from error
        finally:
            del self._relays[number]

    def machine(self, node: int) -> Machine:
        """The machine of a node, on which servers can be started."""
        return HERE if node == 0 else RemoteMachine(self, node)

    def start_server(self, node: int, launch: EngineLaunch, log: Path) -> RemoteJob:
        return self._member(node).start("server", next(self._jobs), launch=asdict(launch), log=str(log.absolute()))

    def order(self, node: int, what: str, **arguments: Any) -> dict[str, Any]:
        return self._member(node).order(what, **arguments)

    def _member(self, node: int) -> Member:
        member = self._members.get(node)
        if member is None or member.lost:
            raise NodeLost(member.lost if member else f"machine {node} has not come")
        return member

    def _let_in(self, connection: Connection, hello: dict[str, Any]) -> None:
        if "relay" in hello:
            if (waiting := self._relays.get(int(hello["relay"]))) is not None:
                waiting.put(connection)
            else:
                connection.close()  # start_ranks has given up waiting
            return
        with self._lock:
            self._let_member_in(hello, connection)

    def _let_member_in(self, hello: dict[str, Any], connection: Connection) -> None:
        """Give an agent its place.  One whose place is another's, or who has none, waits as a spare machine."""
        node, version, reason = int(hello["node"]), str(hello.get("version", "")), ""
        here = [member.number for member in (*self._members.values(), *self._spares) if not member.lost]
        if not 0 < node < self.num_nodes + self._num_spares:
            reason = f"trainer.node_rank={node}: this run has machines 0 to {self.num_nodes + self._num_spares - 1}"
        elif node in here:
            reason = f"trainer.node_rank={node}: that machine is here already"
        elif version != __version__:
            reason = f"machine {node} has megarl {version}, machine 0 has {__version__}; expected the same"
        if reason:
            with suppress(ConnectionLost):
                connection.send({"do": "leave", "why": reason})
            connection.close()
            return
        member, known = Member(hello, connection, self._silence_s), self._members.get(node)
        if node < self.num_nodes and (known is None or known.lost):
            self._members[node] = member
        else:
            self._spares.append(member)

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            for member in (*self._members.values(), *self._spares):
                member.beat()


@dataclass(frozen=True)
class RemoteMachine:
    """Another node, in the form that servers.supervisor uses."""

    nodes: Nodes = field(repr=False)
    node: int

    @property
    def address(self) -> str:
        try:
            return self.nodes.address(self.node)
        except NodeLost as error:
            raise MachineGone(str(error)) from error

    def free_ports(self, hosts: Sequence[str]) -> list[int]:
        try:
            return list(self.nodes.order(self.node, "ports", hosts=list(hosts))["ports"])
        except NodeLost as error:
            raise MachineGone(str(error)) from error

    def start(self, launch: EngineLaunch, token: str, log: Path) -> RemoteJob:
        """`token` is not sent: the agent derives it from the run's token."""
        try:
            return self.nodes.start_server(self.node, launch, log)
        except NodeLost as error:
            raise MachineGone(str(error)) from error
