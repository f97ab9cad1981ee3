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

from megarl.network.sockets import listen
from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.weight_group import join_weight_group, leave_weight_group

_numbers = itertools.count()  # group names are never reused: a broken group keeps its name until the process ends


def backend() -> str:
    """Of the groups of this process with servers."""
    return "nccl" if torch.cuda.is_available() else "gloo"


@dataclass(frozen=True)
class Meeting:
    """Address and name of a group's rendezvous; the trainer's ranks come first, then those of the server.

    Example: meeting, listener = Meeting.host(url, 2, "gloo", 60.0); meeting.join(0, listener)
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    timeout_s: float

    @classmethod
    def host(
        cls, url: str, world_size: int, backend: str, timeout_s: float, address: str | None = None
    ) -> tuple[Meeting, socket.socket]:
        """A new rendezvous, hosted by this process for the server at `url`, and the socket with which rank 0 joins.

        It listens at one address only: `address`, or the address under which the server reaches this machine.
        """
        listener = listen(address or own_address(url))
        host, port = listener.getsockname()[:2]
        name = f"weights_{os.getpid()}_{next(_numbers)}"
        return cls(name, host, port, world_size, backend, timeout_s), listener

    def join(self, rank: int, listener: socket.socket | None = None) -> dist.ProcessGroup:
        """Block until all members have joined; RuntimeError after the timeout."""
        return join_weight_group(
            self.address, self.port, rank, self.world_size, self.name, self.backend, self.timeout_s, listener
        )


def meet(meeting: Meeting, listener: socket.socket, invite: Callable[[], Any]) -> dist.ProcessGroup:
    """Join as rank 0 while `invite` asks the server to join; `invite` returns when the server has joined.

    The first failure of the two is raised at once.  The other call then ends at its own timeout; if the group is
    completed after all, it is left again.
    """
    threads = ThreadPoolExecutor(2, thread_name_prefix="meet")
    ours, theirs = threads.submit(meeting.join, 0, listener), threads.submit(invite)
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
