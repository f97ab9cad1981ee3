"""A weight group of the trainer and one server: how it is met, and how it is left when the other side may be gone."""

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

import torch.distributed as dist

from megarl.rollout.client import ServerClient, ServerError
from megarl.servers.weight_group import join_weight_group, leave_weight_group
from megarl.sockets import listen

_numbers = itertools.count()  # a group's name is never used twice: a broken one keeps its name until the process ends


@dataclass(frozen=True)
class Meeting:
    """Where and as what a group is met; the trainer's ranks come first, then those of the server.

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
        """A new one, hosted by this process for the server at `url`, and the socket with which rank 0 joins.

        It listens at one address: `address`, or the one under which the server reaches this machine.
        """
        listener = listen(address or own_address(url))
        host, port = listener.getsockname()[:2]
        name = f"weights_{os.getpid()}_{next(_numbers)}"
        return cls(name, host, port, world_size, backend, timeout_s), listener

    def join(self, rank: int, listener: socket.socket | None = None) -> dist.ProcessGroup:
        """Blocks until all have come; RuntimeError past the limit."""
        return join_weight_group(
            self.address, self.port, rank, self.world_size, self.name, self.backend, self.timeout_s, listener
        )


def meet(meeting: Meeting, listener: socket.socket, invite: Callable[[], Any]) -> dist.ProcessGroup:
    """Join as rank 0 while `invite` has the server join, and answers when it has.

    The first failure of the two is raised at once.  What the other side of it still does ends by its own limit, and a
    group that comes together then is left again.
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
    """Close a group on both sides; a server that is gone or refuses cannot be helped, and needs not be."""
    with suppress(ServerError):
        engine.destroy_group(name)
    with suppress(RuntimeError):
        leave_weight_group(group)


def own_address(url: str) -> str:
    """The address under which the machine of `url` reaches this one (loopback when it is this one)."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: only asks the routing table
        return str(probe.getsockname()[0])


def is_here(url: str) -> bool:
    """Whether the server at `url` runs on this machine: it is reached from the very address it has."""
    host = urlsplit(url).hostname or "127.0.0.1"
    found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    return own_address(url) in found
