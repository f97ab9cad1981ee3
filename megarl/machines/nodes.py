"""The driver's side of a run's machines: sends requests to the agents of all machines except node 0.

The driver listens at one address.  Agents connect there with the run's token, and once more for every group whose calls
they relay.  When an agent is lost, its processes end too; after a restart it can join again.
"""

from __future__ import annotations

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
from megarl.processes.connection import HEARTBEAT_S, Connection, ConnectionLost
from megarl.processes.listener import Listener
from megarl.processes.ranks import END_S, RanksLaunch
from megarl.processes.signals import pass_on
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import HERE, Machine, MachineGone
from megarl.sockets import listen

SILENCE_S = 60.0  # a node without a heartbeat for this long counts as lost
JOIN_S = 1800.0  # a node may get its machine later than node 0
_ORDER_S = 60.0
_LONGEST_WHY = 2000  # characters of the reason that is sent to the agents
_FILES, _FILES_PER_NODE = 512, 8  # open files of the driver: an agent, a relay for each group, clients of servers
_FILES_PER_RANK = 4  # open files of the process that hosts a group's store: connections of two groups
_RELAY_S = 60.0  # time limit between the start of ranks on a node and the connection of their relay


class NodeLost(RuntimeError):
    """A node did not join, was lost, or could not carry out a request; one sentence."""


@dataclass
class RemoteJob:
    """A process on another node: a processes.handle.ProcessHandle."""

    member: _Member
    number: int
    pid: int = 0
    port: int = 0  # of the store that it hosts; 0 = none
    code: int | None = None
    words: str = ""

    def exit_code(self) -> int | None:
        """None while it runs; -1 if unknown because its node is lost."""
        return -1 if self.code is None and self.member.lost else self.code

    def log_tail(self) -> str:
        if self.code is None and not self.member.lost:
            with suppress(NodeLost):
                return str(self.member.order("words", job=self.number)["words"])
        return self.words or (f"\n    {self.member.lost}" if self.member.lost else "")

    def ask_to_end(self) -> None:
        with suppress(NodeLost):
            self.member.order("ask", job=self.number)

    def end(self, grace_s: float) -> None:
        with suppress(NodeLost):  # it ended with its node
            self.member.order("end", job=self.number, grace_s=grace_s)


class _Member:
    """The connection to one agent."""

    def __init__(self, node: int, connection: Connection, address: str) -> None:
        self.node, self.address = node, address
        self.lost = ""  # the reason, after the node was lost
        self._connection = connection
        self._numbers = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._jobs: dict[int, RemoteJob] = {}
        connection.sock.settimeout(SILENCE_S)
        threading.Thread(target=self._listen, daemon=True, name=f"node {node}").start()

    def order(self, what: str, *, limit_s: float = _ORDER_S, **arguments: Any) -> dict[str, Any]:
        """Send a request to the agent and return its answer.  Raises: NodeLost."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        try:
            if self.lost:
                raise NodeLost(self.lost)
            self._connection.send({"id": number, "do": what, **arguments})
            found = answer.get(timeout=limit_s)
        except (ConnectionLost, queue.Empty) as error:
            raise NodeLost(self.lost or f"node {self.node} did not answer within {limit_s:.0f} s") from error
        finally:
            del self._answers[number]
        if "error" in found:
            raise NodeLost(f"node {self.node}: {found['error']}")
        return found

    def start(self, what: str, number: int, **arguments: Any) -> RemoteJob:
        job = self._jobs[number] = RemoteJob(self, number)
        told = self.order(what, job=number, **arguments)
        job.pid, job.port = told["pid"], told.get("port", 0)
        return job

    def beat(self) -> None:
        with suppress(ConnectionLost):
            self._connection.send({"beat": 1})

    def leave(self, why: str | None = None) -> None:
        with suppress(ConnectionLost):
            self._connection.send({"do": "leave"} if why is None else {"do": "leave", "why": why[:_LONGEST_WHY]})
        self.lost = self.lost or f"node {self.node} was sent away"
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                said, _ = self._connection.receive()
                if "ended" in said:
                    job = self._jobs[said["ended"]]
                    job.words, job.code = said["words"], said["code"]
                elif "signal" in said:  # a scheduler takes that machine away, or asks for a save
                    pass_on(int(said["signal"]))
                elif "id" in said and said["id"] in self._answers:
                    self._answers[said["id"]].put(said)
        except ConnectionLost as error:
            self.lost = self.lost or f"node {self.node} ({self.address}) is lost: {error}"
            for answer in list(self._answers.values()):
                answer.put({"error": "it is lost"})


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


def address_of(host: str) -> str:
    """The first address of a name.  Raises OSError for one that is not known."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


class Nodes:
    """Example: with Nodes(2, 8, "10.0.0.1", 29500, token) as nodes: nodes.wait(); Group(..., nodes=nodes)"""

    def __init__(self, num_nodes: int, ranks_per_node: int, host: str, port: int, token: str) -> None:
        self.num_nodes, self.ranks_per_node = num_nodes, ranks_per_node
        self._host, self._port, self._token = host, port, token
        self._members: dict[int, _Member] = {}
        self._relays: dict[int, queue.SimpleQueue[Connection]] = {}
        self._jobs = itertools.count()
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the members
        self._listener: Listener

    def __enter__(self) -> Nodes:
        allow_files(self.num_nodes, self.ranks_per_node)
        try:
            name, self._host = self._host, address_of(self._host)
            if name not in (self._host, "localhost") and ipaddress.ip_address(self._host).is_loopback:
                raise ValueError(
                    f"trainer.master_addr={name}: on this machine the name means {self._host}, which no other machine "
                    "reaches; expected node 0's address in their network"
                )
            listener = listen(self._host, self._port)
        except OSError as error:
            raise ValueError(
                f"trainer.master_addr={self._host} trainer.master_port={self._port}: {error.strerror}; expected an "
                "address of this machine, node 0, under which the others reach it, and a free port"
            ) from error
        self._port = int(listener.getsockname()[1])
        self._listener = Listener(listener, self._token, self._let_in, name="nodes")
        threading.Thread(target=self._beat, daemon=True, name="nodes beat").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Send "leave" to the agents; after a failure with its reason, so that their commands fail too."""
        self._closed.set()
        self._listener.close()
        failed = kind is not None and issubclass(kind, Exception)
        why = f"the driver stopped: {' '.join(str(error).split())}" if failed else None
        for member in self._members.values():
            member.leave(why)

    @property
    def port(self) -> int:
        return self._port

    def wait(self, limit_s: float = JOIN_S, on_wait: Callable[[list[int]], None] | None = None) -> None:
        """Wait until every node has joined; `on_wait` gets the missing nodes whenever they change.

        Raises: NodeLost after the limit.
        """
        deadline = time.monotonic() + limit_s
        told: list[int] = []
        while missing := [k for k in range(1, self.num_nodes) if k not in self._members or self._members[k].lost]:
            if time.monotonic() > deadline:
                raise NodeLost(f"nodes {missing} of {self.num_nodes} did not come within {limit_s:.0f} s")
            if on_wait is not None and missing != told:
                on_wait(missing)
            told = missing
            time.sleep(0.1)

    def address(self, node: int) -> str:
        """The address at which other nodes reach this node."""
        return self._host if node == 0 else self._member(node).address

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
            raise NodeLost(f"node {node} opened no connection for its ranks") from error
        finally:
            del self._relays[number]

    def machine(self, node: int) -> Machine:
        """The machine of a node, on which servers can be started."""
        return HERE if node == 0 else RemoteMachine(self, node)

    def start_server(self, node: int, launch: EngineLaunch, log: Path) -> RemoteJob:
        return self._member(node).start("server", next(self._jobs), launch=asdict(launch), log=str(log.absolute()))

    def order(self, node: int, what: str, **arguments: Any) -> dict[str, Any]:
        return self._member(node).order(what, **arguments)

    def _member(self, node: int) -> _Member:
        member = self._members.get(node)
        if member is None or member.lost:
            raise NodeLost(member.lost if member else f"node {node} has not come")
        return member

    def _let_in(self, connection: Connection, hello: dict[str, Any]) -> None:
        if "relay" in hello:
            if (waiting := self._relays.get(int(hello["relay"]))) is not None:
                waiting.put(connection)
            else:
                connection.close()  # start_ranks has given up waiting
            return
        with self._lock:
            self._let_member_in(int(hello["node"]), connection, str(hello.get("version", "")))

    def _let_member_in(self, node: int, connection: Connection, version: str) -> None:
        known = self._members.get(node)
        reason = ""
        if not 0 < node < self.num_nodes:
            reason = f"trainer.node_rank={node}: this run has nodes 0 to {self.num_nodes - 1}"
        elif known is not None and not known.lost:
            reason = f"trainer.node_rank={node}: that node is here already"
        elif version != __version__:
            reason = f"node {node} has megarl {version}, node 0 has {__version__}; expected the same"
        if reason:
            with suppress(ConnectionLost):
                connection.send({"do": "leave", "why": reason})
            connection.close()
        else:
            self._members[node] = _Member(node, connection, str(connection.sock.getpeername()[0]))

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT_S):
            for member in list(self._members.values()):
                member.beat()


@dataclass(frozen=True)
class RemoteMachine:
    """Another node, in the form that servers.supervisor uses."""

    nodes: Nodes = field(repr=False)
    node: int

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
