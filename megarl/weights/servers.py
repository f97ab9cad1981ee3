"""One rollout server as the sender of weights sees it: its orders, its weight group, and the check of what it holds."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from megarl.rollout.client import Engine
from megarl.rollout.protocol import DTYPE_NAMES
from megarl.rollout.weight_group import join_weight_group, leave_weight_group
from megarl.weights.buckets import Bucket
from megarl.weights.names import some_names

_numbers = itertools.count()  # a group's name is never used twice: a broken one keeps its name until the process ends


class PushError(RuntimeError):
    """The servers do not hold the trainer's weights; one sentence names the server, and the tensors where it can."""


class Server:
    """Each method raises EngineError, PushError or torch's RuntimeError within `timeout_s`."""

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        self.url, self._timeout_s = url, timeout_s
        self._engine = Engine(url, token, timeout_s=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""

    def join(self, backend: str, threads: Executor) -> list[Future[None]]:
        """Meet the server's ranks in a new group, rank 0 here: done when both futures are; nothing if done before."""
        if self._group is not None:
            return []
        tp_size = int(
            self._engine.server_info().get("tp_size", 1)
        )  # also finds a dead server before anyone waits for it
        address, port = _own_address(self.url), _free_port()
        self._group_name = f"weights_{os.getpid()}_{next(_numbers)}"
        settings: dict[str, Any] = {"group_name": self._group_name, "world_size": 1 + tp_size, "backend": backend}
        theirs = threads.submit(self._engine.init_group, address, port, rank_offset=1, **settings)
        return [theirs, threads.submit(self._join_here, address, port, settings)]

    def _join_here(self, address: str, port: int, settings: dict[str, Any]) -> None:
        self._group = join_weight_group(address, port, rank=0, timeout_s=self._timeout_s, **settings)

    def leave(self) -> None:
        """Close the group; a server that is gone cannot be told, and needs not be."""
        if self._group is not None:
            group, self._group = self._group, None
            leave_weight_group(group)
        self._engine.close()

    def open(self, pause_mode: str) -> None:
        self._engine.pause(pause_mode)
        self._engine.begin_update()

    def broadcast(self, bucket: Bucket) -> Any:
        """Start sending; the handle's wait() ends when all is sent."""
        assert self._group is not None, f"{self.url} has no weight group"
        return dist.broadcast(bucket.data, src=0, group=self._group, async_op=True)

    def receive(self, bucket: Bucket, version: int | None, flush_cache: bool) -> None:
        """Blocks until the server has received the broadcast and loaded the tensors."""
        self._engine.update_from_distributed(
            bucket.names,
            [DTYPE_NAMES[bucket.dtype]] * len(bucket.names),
            bucket.shapes,
            group_name=self._group_name,
            version=version,
            flattened=True,
            flush_cache=flush_cache,
        )

    def close_update(self) -> None:
        self._engine.end_update()

    def verify(self, digests: Mapping[str, str], twins: Mapping[str, str]) -> int:
        """Compare what the server holds with what was sent; the number of equal tensors, or PushError."""
        check_digests(self.url, self._engine.checksums(), digests, twins)
        return len(digests)

    def resume(self) -> None:
        self._engine.resume()


def check_digests(url: str, held: Mapping[str, str], sent: Mapping[str, str], twins: Mapping[str, str]) -> None:
    """PushError unless the server holds exactly the tensors that were sent.

    `twins`: names that a server may hold besides, when they equal the tensor that they are tied to.
    """
    differ = [name for name in sent if name in held and held[name] != sent[name]]
    missing = [name for name in sent if name not in held]
    extra = [name for name in held if name not in sent and held[name] != sent.get(twins.get(name, ""))]
    parts = [("differ", differ), ("missing", missing), ("never sent", extra)]
    faults = [f"{what}: {some_names(names)}" for what, names in parts if names]
    if faults:
        raise PushError(f"{url} does not hold the weights that the trainer sent ({'; '.join(faults)})")


def _own_address(url: str) -> str:
    """The address under which the machine of `url` reaches this one (loopback when it is this one)."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: only asks the routing table
        return str(probe.getsockname()[0])


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
