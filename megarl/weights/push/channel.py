"""Rendezvous of a weight group of the trainer and one server, and leaving it when the other side may be gone."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megarl.io.auth import derived
from megarl.processes.channels.store import StoreHost
from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.weight_group import StockHost, join_store, join_weight_group, leave_weight_group

Host = StoreHost | StockHost
_numbers = itertools.count()  # group names are never reused: a broken group keeps its name until the process ends


def backend() -> str:
    """The backend of the groups that this process has with servers."""
    return "nccl" if torch.cuda.is_available() else "gloo"


@dataclass(frozen=True)
class Meeting:
    """Address and name of a group's rendezvous; the trainer's ranks come first, then those of the server.

    Example: meeting, host = Meeting.host(url, 2, "gloo", 60.0, key); meeting.join(0, host)
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    timeout_s: float

    @classmethod
    def host(
        cls, url: str, world_size: int, backend: str, timeout_s: float, key: str | None, address: str | None = None
    ) -> tuple[Meeting, Host]:
        """A new rendezvous for the server at `url`, and its store, hosted by this process, which is rank 0.

        It listens at one address only: `address`, or the address under which the server reaches this machine.
        `key`: of the stores of weight groups; None: for a server that has none.
        """
        name, own = f"weights_{os.getpid()}_{next(_numbers)}", address or own_address(url)
        host = StockHost(own) if key is None else StoreHost(own, derived(key, name))
        return cls(name, own, host.port, world_size, backend, timeout_s), host

    def join(self, rank: int, host: Host | str) -> dist.ProcessGroup:
        """Block until all members have joined; RuntimeError after the timeout.

        `host`: the store's, on rank 0; on other ranks the key of the stores of weight groups.
        """
        try:
            store: dist.Store
            if isinstance(host, str):
                store = join_store(self.address, self.port, self.name, self.world_size, self.timeout_s, host)
            else:
                store = host.store(self.world_size, self.timeout_s)
            return join_weight_group(store, rank, self.world_size, self.name, self.backend, self.timeout_s)
        finally:
            if not isinstance(host, str):
                host.shut()


def meet(meeting: Meeting, host: Host, invite: Callable[[], Any]) -> dist.ProcessGroup:
    """Join as rank 0 while `invite` asks the server to join; `invite` returns when the server has joined.

    The first failure of the two is raised at once.  The other call then ends at its own timeout; if the group is
    completed after all, it is left again.
    """
    threads = ThreadPoolExecutor(2, thread_name_prefix="meet")
    ours, theirs = threads.submit(meeting.join, 0, host), threads.submit(invite)
    threads.shutdown(wait=False)
    done, _ = wait([ours, theirs], return_when=FIRST_EXCEPTION)
    for one in done:
        if (error := one.exception()) is not None:
            ours.add_done_callback(_leave_late)
            raise error
    return ours.result()


def _leave_late(ours: Future[dist.ProcessGroup]) -> None:
    if ours.exception() is None:
        leave_weight_group(ours.result())


def leave(engine: ServerClient, name: str, group: dist.ProcessGroup) -> None:
    """Close a group on both sides; errors are ignored, because the server may be gone."""
    with suppress(ServerError):
        engine.destroy_group(name)
    with suppress(RuntimeError):
        leave_weight_group(group)


def own_address(url: str) -> str:
    """The address under which the machine of `url` reaches this machine (loopback if it is the same machine)."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: it only queries the routing table
        return str(probe.getsockname()[0])


def is_here(url: str) -> bool:
    """Whether the server at `url` runs on this machine: the source address of the route to it is its own address."""
    host = urlsplit(url).hostname or "127.0.0.1"
    found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    try:
        return own_address(url) in found
    except OSError:  # no route leads there: not this machine
        return False
