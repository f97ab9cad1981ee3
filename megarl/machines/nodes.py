"""The driver's side of a run's machines: sends requests to the agents of all machines except node 0.

The driver listens at one address.  Agents connect there with the run's token, and once more for every group whose calls
they relay.  When an agent is lost, its processes end too; after a restart it can join again.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import queue
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.io.sockets import listen, ports_to_try
from megarl.machines.member import Member, NodeLeft, NodeLost, RemoteJob
from megarl.processes import watchdog
from megarl.processes.channels.connection import Connection, ConnectionLost
from megarl.processes.channels.listener import Listener
from megarl.processes.channels.waiting import Heartbeat, Wait
from megarl.processes.ranks import END_S, RanksLaunch
from megarl.processes.signals import Terminated, pass_on
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import HERE, Machine, MachineGone

SILENCE_S = 60.0  # a rank or a machine without a heartbeat for this long counts as lost
USUAL_PORT = 29500  # of the driver
JOIN_S = 1800.0  # a node may get its machine later than node 0
_FILES, _FILES_PER_NODE = 512, 8  # open files of the driver: an agent, a relay for each group, clients of servers
_FILES_PER_RANK = 4  # open files of the process that hosts a group's store: connections of two groups
_PORT_FILE = "driver_port"  # in the run's folder
_NAME_S = 60.0  # until node 0 must know its own name
_ASK_S = 1.0  # between two questions for it
_RELAY_S = 60.0  # time limit between the start of ranks on a node and the connection of their relay


def check_files(num_nodes: int, ranks_per_node: int) -> None:
    """Raises ValueError if this process may open fewer files than these machines and ranks need."""
    wanted = _FILES + (_FILES_PER_NODE + _FILES_PER_RANK * ranks_per_node) * num_nodes
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != hard < wanted:
        raise ValueError(
            f"trainer.nnodes={num_nodes}: node 0 may open {hard} files; expected `ulimit -Hn` of {wanted} or more, "
            "each node and each rank is some connections"
        )


def listen_at(host: str, port: int | None) -> socket.socket:
    """Listen at this port; None: at USUAL_PORT, or at a free one if another run has it.  Raises OSError."""
    return listen(host, *(ports_to_try(host, (USUAL_PORT, 0)) if port is None else (port,)))


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


def announce(run_dir: Path, port: int) -> None:
    """Write the driver's port into the run's folder, for machines to which nobody named one.

    A wrong port there does no harm: both sides prove that they have the run's token.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    part = run_dir / f".{_PORT_FILE}.{os.getpid()}"
    part.write_text(f"{port}\n")
    part.rename(run_dir / _PORT_FILE)


def announced(run_dir: Path) -> int:
    """The port of the run's driver, or of one that has ended.  Raises OSError, one sentence, if there was none yet."""
    try:
        return int((run_dir / _PORT_FILE).read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"its port is not in {error.filename}; expected its recipe and trainer.experiment_name here too and a "
            "folder that both machines see, or trainer.master_port on both"
        ) from error


def forget(run_dir: Path) -> None:
    (run_dir / _PORT_FILE).unlink(missing_ok=True)


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
        self._host = host
        self._wanted_port = port
        self._token = token
        self._num_spares, self._silence_s = spares, silence_s
        self._members: dict[int, Member] = {}  # by their places, those that are lost too
        self._spares: list[Member] = []
        self._relays: dict[int, queue.SimpleQueue[Connection]] = {}
        self._jobs = itertools.count()
        self._lock = threading.Lock()  # of the members
        self._listener: Listener
        self._heartbeat: Heartbeat

    def __enter__(self) -> Nodes:
        check_files(self.num_nodes + self._num_spares, self.ranks_per_node)
        try:
            name, self._host = self._host, address_of(self._host, _NAME_S)
            if name not in (self._host, "localhost") and ipaddress.ip_address(self._host).is_loopback:
                raise ValueError(
                    f"trainer.master_addr={name}: on this machine the name means {self._host}, which no other machine "
                    "reaches; expected node 0's address in their network: trainer.master_addr=ADDRESS on all machines, "
                    "or another line in /etc/hosts, where Debian gives a machine's own name 127.0.1.1"
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
        self._heartbeat = Heartbeat(lambda: [member.connection for member in (*self._members.values(), *self._spares)])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Send "leave" to the agents.  After a failure or SIGTERM with the reason: their commands end as this one does.

        So what started them all, for example Kubernetes, starts them all again.
        """
        self._heartbeat.stop()
        self._listener.close()
        failed = isinstance(error, Exception | Terminated)
        why = f"the driver stopped: {' '.join(str(error).split())}" if failed else None
        for member in (*self._members.values(), *self._spares):
            member.leave(why, terminated=isinstance(error, Terminated))

    def wait(
        self,
        limit_s: float = JOIN_S,
        on_wait: Callable[[str], object] = lambda _: None,
        on_replaced: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Wait until every machine has joined, or a spare one has taken the place of a lost one.

        `on_wait` gets a sentence of missing ones when they change and each minute, `on_replaced` one of a replacement.
        Raises: NodeLost after the limit.
        """
        wait = Wait(limit_s, on_wait)
        told: list[int] = []
        while missing := self._missing(on_replaced):
            watchdog.heartbeat()
            where = f"machines {missing} of {self.num_nodes} at {self._host}:{self.port}"
            if wait.is_over:
                raise NodeLost(f"{where} did not come within {limit_s:.0f} s")
            wait.tell(f"waiting for {where}", is_new=missing != told)
            told = missing
            time.sleep(0.1)

    def _missing(self, on_replaced: Callable[[str], object]) -> list[int]:
        """The places without a machine, after spare machines took those of lost ones."""
        with self._lock:
            self._spares = [spare for spare in self._spares if not spare.lost]
            for place, lost in list(self._members.items()):
                if lost.lost and self._spares:
                    spare = self._members[place] = self._spares.pop(0)
                    spare.node = place
                    gone = "has left" if lost.leaves else "is lost"
                    on_replaced(f"{spare.name} takes the place of host {lost.host}, which {gone}")
            return [k for k in range(1, self.num_nodes) if k not in self._members or self._members[k].lost]

    @property
    def leaving(self) -> list[Member]:
        """Those that got SIGTERM, whose places spare ones can take."""
        return [member for member in list(self._members.values()) if member.leaves and not member.lost]

    def let_go(self, saved: str) -> None:
        """Send away those that are leaving; raises NodeLeft, with which their ranks end.  `saved`: what is.

        Where too few spare machines are left by now, the run gets SIGTERM instead.
        """
        if not self._can_replace:
            return pass_on(signal.SIGTERM)
        gone = self.leaving
        for member in gone:
            member.leave(f"SIGTERM: {saved} is saved, and a spare machine takes this place", terminated=True)
        raise NodeLeft(f"{', '.join(member.name for member in gone)} got SIGTERM and leaves the run; {saved} is saved")

    @property
    def _can_replace(self) -> bool:
        return len(self.leaving) <= sum(not spare.lost for spare in self._spares)

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
        node = int(hello["node"])
        version = str(hello.get("version", ""))
        reason = ""
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
        member = Member(hello, connection, self._silence_s, self._signalled)
        known = self._members.get(node)
        if node < self.num_nodes and (known is None or known.lost):
            self._members[node] = member
        else:
            self._spares.append(member)

    def _signalled(self, member: Member, number: int) -> None:
        """SIGTERM takes that machine away: after a save a spare one gets its place; without one the run ends."""
        if number == signal.SIGTERM:
            with self._lock:
                if member in self._spares:
                    self._spares.remove(member)
                    member.leave("SIGTERM: this spare machine had no place in the run", terminated=True)
                else:
                    member.leaves = True
                if not self.leaving:
                    return
                if self._can_replace:
                    number = signal.SIGUSR1
        pass_on(number)


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
