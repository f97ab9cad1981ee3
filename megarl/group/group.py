"""The driver's side of a group of ranks: calls a method on every rank and gets an answer from every replica.

The driver is an ordinary program; `Group` sends its calls to the ranks that it started.  A call is a Message, a small
header to every rank.  Tensors are sent once to the first rank of each data-parallel replica, which broadcasts them
inside the replica; results come only from each replica's reporter (its last pipeline stage).  Every rank ends every
call with a status, so an exception reaches the driver with its rank.  A dead rank is detected at once, a silent one
after `silence_s`, one that goes on for too long after the limit of its call; `close` leaves none of them.
"""

from __future__ import annotations

import queue
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megarl.arch.layout import Layout
from megarl.group.failures import GONE, Places, RankError, may_follow
from megarl.group.limits import CallLimits
from megarl.group.message import Message, Place, Setup, decoded
from megarl.io.durable_files import number_of
from megarl.io.sockets import listen
from megarl.machines.nodes import SILENCE_S, Nodes
from megarl.metrics.computing.timeline import TimedCall
from megarl.processes import watchdog
from megarl.processes.channels.connection import Connection, ConnectionLost, Tensors
from megarl.processes.channels.links import Direct, Inbox, Link, RankMessage, Relayed
from megarl.processes.channels.listener import Listener
from megarl.processes.channels.store import StoreHost
from megarl.processes.channels.waiting import HEARTBEAT_S
from megarl.processes.lifetime import KILLED, ProcessHandle
from megarl.processes.ranks import END_S, RanksLaunch, RanksProcess, Share, shares

GRACE_S = 1.0  # after the first error, wait this long for other errors: the root cause is often not the first
_SIGNS = 2  # of life, after which a rank is not the cause of an error before them: the first may be an earlier one
_LOOK_S = 0.1
_CALLS = 256  # that are remembered until somebody takes them: the last


@dataclass(frozen=True)
class Reply:
    """What a replica's reporter returned."""

    result: dict[str, Any]
    tensors: Tensors
    seconds: float = 0.0  # that the rank worked


@dataclass(frozen=True)
class GroupSettings:
    """How ranks run, and how long they are waited for.  `call_*`, `outside`: the limit of a call, see `CallLimits`."""

    device: str = "auto"
    seed: int = 0
    call_timeout_s: float = 600.0
    call_factor: float | None = None
    call_floor_s: float = 0.0
    outside: tuple[str, ...] = ()
    silence_s: float = SILENCE_S
    start_timeout_s: float = 180.0
    environment: Mapping[str, str] = field(default_factory=dict)  # of the ranks, where the user has not set them
    worker: str = "megarl.roles.worker"
    has_neighbours: bool = False  # servers work on the ranks' GPUs at the same time
    is_mapped: bool = False  # servers map memory of the ranks' GPUs


class Group:
    """The ranks of one world (torch.distributed).

    Example: with Group("ranks", 2, Layout(tp=2), log_dir=logs) as group: group.start(); group.call(Load(...))
    Entering the context starts the processes and returns at once, `start` waits for them, leaving ends them.

    The ranks use the GPUs (or CPU processes) from `first_rank` on, counted over the machines of `nodes`.  nodes None:
    this machine only, where the ranks listen at `address`.
    """

    def __init__(
        self,
        name: str,
        num_ranks: int,
        layout: Layout,
        settings: GroupSettings = GroupSettings(),
        *,
        log_dir: Path,
        nodes: Nodes | None = None,
        first_rank: int = 0,
        address: str = "127.0.0.1",
    ) -> None:
        self.name = name
        self.num_ranks = num_ranks
        self.settings = settings
        self._layout = layout
        self._limits = CallLimits(
            settings.call_timeout_s, settings.call_factor, settings.call_floor_s, settings.outside
        )
        self._log_dir = log_dir.absolute()
        self._nodes = nodes
        self._address = address
        self._shares = shares(first_rank, num_ranks, nodes.ranks_per_node if nodes else first_rank + num_ranks)
        self._places = Places(name, self._shares, self._log_dir, self._how_memory_ended)
        self._token = secrets.token_hex(16)
        self._links: list[Link] = []
        self._processes: list[ProcessHandle] = []  # one per share
        self._home = ""  # the address to which the ranks of this machine connect
        self._listener: Listener | None = None
        self._store: StoreHost | None = None  # in which the ranks find each other
        self._arrivals: queue.SimpleQueue[tuple[Connection, dict[str, Any]]] = queue.SimpleQueue()
        self._call_id = 0
        self._calls: deque[TimedCall] = deque(maxlen=_CALLS)
        self.num_replicas = 0
        self.device_name = ""  # of rank 0's GPU, or "cpu"
        self._first_of_replica: dict[int, int] = {}  # replica -> the rank that receives its tensors
        self._reporters: dict[int, int] = {}  # rank -> the replica for which it reports

    def __enter__(self) -> Group:
        try:
            self.launch()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self) -> None:
        """Start the ranks' processes and return at once; `start` waits for them.  Raises: RankError."""
        listener = listen("127.0.0.1")
        self._home = f"127.0.0.1:{listener.getsockname()[1]}"
        self._listener = Listener(listener, self._token, lambda *arrival: self._arrivals.put(arrival), name=self.name)
        is_far = self._nodes is not None and any(share.node for share in self._shares)
        self._store = StoreHost(self._nodes.address(0) if self._nodes is not None and is_far else "127.0.0.1")
        for share in self._shares:
            logs = self._places.logs_of(share)
            address = self._nodes.address(share.node) if self._nodes is not None else self._address
            launch = RanksLaunch(
                self.settings.worker, self.settings.device, str(logs), share.num_ranks, share.first_gpu,
                share.first_rank, self.num_ranks, address, *self._store.place,
                environment=tuple(self.settings.environment.items()),
            )  # fmt: skip
            try:
                self._start_share(share, launch)
            except OSError as error:
                if number_of(error):  # it would come again
                    raise
                raise RankError(f"group {self.name}: its ranks could not be started: {error}") from error

    def _start_share(self, share: Share, launch: RanksLaunch) -> None:
        if share.node == 0 or self._nodes is None:
            self._processes.append(RanksProcess(launch, self._home, self._token))
            return
        process, connection = self._nodes.start_ranks(share.node, launch)
        self._processes.append(process)
        connection.sock.settimeout(self.settings.silence_s)
        ranks = range(share.first_rank, share.first_rank + share.num_ranks)
        self._links.append(Relayed(connection, tuple(ranks)))

    def start(self) -> None:
        """Wait until each rank has connected, and create the process groups."""
        assert self._listener is not None and self._store is not None, "launch() comes first"
        self._welcome()
        self._listener.close()
        how = self.settings
        setup = Setup(
            self._layout, how.device, how.seed, how.call_timeout_s, how.has_neighbours, is_mapped=how.is_mapped
        )
        places = [decoded(Place, result) for result in self.call_each(setup)]
        self._store.shut()
        for rank, place in enumerate(places):
            self._first_of_replica.setdefault(place.replica, rank)
            if place.is_reporter:
                self._reporters[rank] = place.replica
        self.device_name = places[0].device_name
        self.num_replicas = len(self._first_of_replica)
        assert len(self._reporters) == self.num_replicas, "each replica has exactly one reporter"

    def _welcome(self) -> None:
        deadline = time.monotonic() + self.settings.start_timeout_s
        here: set[int] = set()
        with Inbox(self._links) as inbox:
            while len(here) < self.num_ranks:
                watchdog.heartbeat()
                self._check_processes()
                if time.monotonic() > deadline:
                    raise RankError(
                        f"group {self.name}: {len(here)} of {self.num_ranks} ranks came up in "
                        f"{self.settings.start_timeout_s:.0f} s; see {self._log_dir}"
                    )
                for message in inbox.messages(_LOOK_S):
                    here |= self._arrived(message)
                here |= self._let_in()

    def _let_in(self) -> set[int]:
        """Accept the ranks of this machine that have connected."""
        ranks: set[int] = set()
        with suppress(queue.Empty):
            while True:
                connection, hello = self._arrivals.get_nowait()
                # A process that stops during a message closes no connection.
                connection.sock.settimeout(self.settings.silence_s)
                self._links.append(Direct(connection, int(hello["rank"])))
                self._places.note(int(hello["rank"]), hello)
                ranks.add(int(hello["rank"]))
        return ranks

    def _arrived(self, message: RankMessage) -> set[int]:
        """The rank of another machine that connected to its relay."""
        if message.header is None:
            raise self._places.died(message.rank, "its start", message.lost)
        self._places.note(message.rank, message.header)
        return {message.rank}

    def _check_processes(self) -> None:
        for share, process in zip(self._shares, self._processes, strict=True):
            if (code := process.exit_code()) is not None:
                where = f" on {self._nodes.name(share.node)}" if self._nodes is not None else ""
                ended = f"group {self.name}: its ranks{where} ended with status {code}"
                raise self._places.gone(ended, share, self._places.logs_of(share))

    def _how_memory_ended(self, share: Share) -> str:
        """How the kernel killed one of these ranks, whose connection may end before its process; "" otherwise."""
        process = self._processes[self._shares.index(share)]
        deadline = time.monotonic() + GRACE_S
        while process.exit_code() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        last = process.log_tail().rpartition("\n")[2].strip()
        return last if last.startswith(KILLED) else ""

    def call(
        self,
        message: Message,
        payloads: Sequence[Tensors] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Reply]:
        """Call every rank; `payloads` has one entry per replica.  Returns one reply per replica, in order.

        Raises ValueError if a rank raised ValueError (a mistake of the user), StorageError if files are not taken,
        after which the ranks can go on, RankError for every other failure.
        """
        assert payloads is None or len(payloads) == self.num_replicas, "one payload a replica"
        by_rank = {self._first_of_replica[i]: tensors for i, tensors in enumerate(payloads or ())}
        answers = self._call_all(message, by_rank, bool(payloads), timeout_s)
        return [answers[rank] for rank, _ in sorted(self._reporters.items(), key=lambda item: item[1])]

    def call_each(self, message: Message) -> list[dict[str, Any]]:
        """Call every rank and return the result of each, in order of ranks; raises as `call` does."""
        answers = self._call_all(message, {})
        return [answers[rank].result for rank in range(self.num_ranks)]

    def call_leader(self, message: Message) -> Reply:
        """Call every rank and return the reply of rank 0, which communicates with the servers."""
        return self._call_all(message, {})[0]

    def _call_all(
        self,
        message: Message,
        payloads: dict[int, Tensors],
        has_payload: bool = False,
        timeout_s: float | None = None,
    ) -> dict[int, Reply]:
        self._call_id += 1
        sent = time.perf_counter()  # before the first rank has the call
        method, label, num_bytes = message.method(), message.label, _num_bytes(payloads)
        header = {"id": self._call_id, "method": method, "arguments": asdict(message), "has_payload": has_payload}
        for link in self._links:
            try:
                link.send(header, payloads)
            except ConnectionLost as error:
                lost = str(error) if isinstance(link, Relayed) else ""
                raise self._places.died(link.ranks[0], method, lost) from error
        begun = time.monotonic()
        answers = self._collect(method, timeout_s or self._limits.of(label, num_bytes))
        self._limits.took(label, num_bytes, time.monotonic() - begun)
        self._calls.append(TimedCall(self.name, label, sent, {rank: a.seconds for rank, a in answers.items()}))
        return answers

    def take_calls(self) -> list[TimedCall]:
        """The last calls that ended since this was asked before."""
        calls = list(self._calls)
        self._calls.clear()
        return calls

    def _collect(self, method: str, timeout_s: float) -> dict[int, Reply]:
        answers: dict[int, Reply] = {}
        errors: dict[int, dict[str, Any]] = {}
        begun = time.monotonic()
        last_sign = dict.fromkeys(range(self.num_ranks), begun)
        signs: Counter[int] = Counter()  # since the first error
        deadline, next_look = begun + timeout_s, begun
        with Inbox(self._links) as inbox:
            while len(answers) + len(errors) < self.num_ranks:
                watchdog.heartbeat()
                for message in inbox.messages(0.5):
                    last_sign[message.rank] = time.monotonic()
                    signs[message.rank] += bool(errors)
                    self._take(message, answers, errors, method)
                now = time.monotonic()
                if errors and not self._may_be_explained(answers, errors, signs):
                    deadline = min(deadline, now + GRACE_S)
                if now > deadline:
                    break
                if now < next_look:  # checking all ranks at every message would be quadratic in their number
                    continue
                next_look = now + HEARTBEAT_S
                silence_s = self.settings.silence_s
                unheard = [rank for rank, at in last_sign.items() if now - at > silence_s]
                if silent := [rank for rank in unheard if rank not in answers and rank not in errors]:
                    raise self._places.hangs(silent, f"gave no sign for {silence_s:.0f} s in {method}", errors)
        if errors:
            raise self._places.failed(method, errors)
        if len(answers) < self.num_ranks:
            late = sorted(set(range(self.num_ranks)) - set(answers))
            raise self._places.hangs(late, f"did not end {method} within {timeout_s:.0f} s")
        return answers

    def _may_be_explained(
        self, answers: Mapping[int, Reply], errors: Mapping[int, dict[str, Any]], signs: Counter[int]
    ) -> bool:
        """Whether all errors may follow from the end of a rank, and one that has not answered may have ended.

        When a machine is lost, its peers' collectives can fail seconds before the driver's own connection to it does.
        Each rank that works sends a sign every HEARTBEAT_S; one that sends none is found silent.
        """
        others = (rank for rank in range(self.num_ranks) if rank not in answers and rank not in errors)
        return may_follow(errors.values()) and any(signs[rank] < _SIGNS for rank in others)

    def _take(
        self, message: RankMessage, answers: dict[int, Reply], errors: dict[int, dict[str, Any]], method: str
    ) -> None:
        rank, header = message.rank, message.header
        if header is None:
            if errors:  # other ranks already reported the reason
                errors.setdefault(rank, {"type": GONE, "message": "", "traceback": "", "lost": message.lost})
                return
            raise self._places.died(rank, method, message.lost)
        if "beat" in header or header["id"] < self._call_id:  # or a late answer to a call that failed on another rank
            return
        assert header["id"] == self._call_id, f"rank {rank} answered call {header['id']}, not {self._call_id}"
        if header["ok"]:
            answers[rank] = Reply(header["result"], message.tensors, header["seconds"])
        else:
            errors[rank] = header

    def close(self) -> None:
        """End the ranks: send "close"; those that have not ended within END_S write their stacks, and are killed."""
        for link in self._links:
            try:
                link.send({"method": "close"}, {})
            except ConnectionLost:
                continue  # the rank has ended already
        if self._processes:
            with ThreadPoolExecutor(len(self._processes)) as threads:
                list(threads.map(lambda process: process.end(END_S), self._processes))
        for link in self._links:
            link.connection.close()
        if self._listener is not None:
            self._listener.close()
        if self._store is not None:
            self._store.close()
        self._links.clear()
        self._processes.clear()


def _num_bytes(payloads: Mapping[int, Tensors]) -> int:
    return sum(tensor.nbytes for tensors in payloads.values() for tensor in tensors.values())
