"""The process group for weight sync from trainer ranks to one server: rank 0 sends, the others receive.

It is independent of torch's default group. Its members meet in a store that rank 0 hosts and that needs the servers'
key. SGLang without our plug-in knows only torch's own store, whose prefixes have the order of SGLang's
`init_custom_process_group`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megarl.io.auth import derived
from megarl.io.sockets import listen
from megarl.processes.channels.store import StorePlace, TlsStore, keep

KEY_VARIABLE = "MEGARL_WEIGHT_GROUPS_KEY"  # in the processes of a server
_environment = threading.Lock()


def groups_key(server_token: str) -> str:
    """The key of the stores of weight groups, from the servers' key: trainer and server both know it."""
    return derived(server_token, "weight groups")


def join_store(address: str, port: int, group_name: str, world_size: int, timeout_s: float, key: str) -> TlsStore:
    """Returns when all members have come; `key`: see groups_key.  Raises RuntimeError: torch's DistError is one."""
    return TlsStore(StorePlace(f"{address}:{port}", derived(key, group_name)), timeout_s, world_size)


class StockHost:
    """Hosts torch's own store for a server that knows no other.  Until it is closed, any process can write to it."""

    def __init__(self, address: str) -> None:
        listener = listen(address)
        self._address, self.port, *_ = listener.getsockname()
        self._descriptor = listener.detach()  # torch's from then on: it closes it with the store
        self._store: dist.Store | None = None

    def store(self, world_size: int, timeout_s: float) -> dist.Store:
        limit, fd = timedelta(seconds=timeout_s), self._descriptor
        self._store = dist.TCPStore(self._address, self.port, world_size, True, limit, master_listen_fd=fd)
        return self._store

    def shut(self) -> None:
        """Replace its listening socket by an unreachable one: torch has no call for this."""
        if self._store is not None:
            with socket.socket() as unreachable:
                os.dup2(unreachable.fileno(), self._descriptor, inheritable=False)
        self._store = None

    close = shut


def join_weight_group(
    store: dist.Store, rank: int, world_size: int, group_name: str, backend: str = "gloo", timeout_s: float = 300.0
) -> dist.ProcessGroup:
    """Join, and return when all `world_size` members have.

    `timeout_s`: of the rendezvous and of every later collective. Raises RuntimeError (torch's DistError is one) after
    the timeout, ValueError if this process has a group of that name. Use `dist.broadcast(tensor, src=0, group=group)`.
    """
    if group_name in c10d._world.pg_names.values():
        raise ValueError(f"group_name={group_name!r}: this process has such a group already, expected a new name")
    with _failures_survived() if backend == "nccl" else nullcontext():
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],  # no parent ranks: torch then needs no default group
            c10d.Backend(backend),
            c10d.PrefixStore(group_name, store),
            group_name=c10d.GroupName(group_name),
            timeout=timedelta(seconds=timeout_s),
        )
    # dist.broadcast translates `src` by this table: here the ranks of the group are also the global ranks.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    keep(group, store)
    return group


def leave_weight_group(group: dist.ProcessGroup) -> None:
    """Close the group on this side; its name can be used again.

    Drop all references to it: a group object that exists at Python's exit can abort the process in gloo's threads.
    """
    if dist.get_backend(group) == "nccl":
        c10d._abort_process_group(group)  # does not wait for a collective that hangs
    else:
        dist.destroy_process_group(group)


@contextmanager
def _failures_survived() -> Iterator[None]:
    """In NCCL groups made inside, a collective that fails or hangs ends in an error or a timeout of its wait.

    torch reads the variable when it makes a group. By its default torch's watchdog ends the process, here a rank of the
    trainer, when a server dies in a transfer. Without the watchdog `leave_weight_group` has to abort the group.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _environment:  # groups with several servers are made in threads; making one does not wait for the others
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
