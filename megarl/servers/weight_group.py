"""The process group for weight sync from trainer ranks to one server: rank 0 sends, the others receive.

It is independent of torch's default group, which may exist or not. The rendezvous is a store at
`master_address:master_port`, which rank 0 hosts at that address only. The store prefixes have the same order as in
SGLang's `init_custom_process_group`, so that a stock server can join.
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

_environment = threading.Lock()


def join_weight_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str,
    backend: str = "gloo",
    timeout_s: float = 300.0,
    listener: socket.socket | None = None,
) -> dist.ProcessGroup:
    """Join, and return when all `world_size` members have.

    `listener`: required from rank 0, a socket that listens at that address; it is consumed. Without one torch would
    listen on every interface. `timeout_s`: of the rendezvous and of every later collective. Raises RuntimeError
    (torch's DistError is one) after the timeout, ValueError if this process has a group of that name. Use
    `dist.broadcast(tensor, src=0, group=group)`.
    """
    if group_name in c10d._world.pg_names.values():
        raise ValueError(f"group_name={group_name!r}: this process has such a group already, expected a new name")
    timeout = timedelta(seconds=timeout_s)
    if (listener is not None) != (rank == 0):
        raise ValueError(f"rank={rank}: expected a listener from rank 0, which hosts the store, and from no other")
    descriptor = None if listener is None else listener.detach()
    store = dist.TCPStore(
        master_address, master_port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=descriptor
    )
    with _failures_survived() if backend == "nccl" else nullcontext():
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],  # no parent ranks: torch then needs no default group
            c10d.Backend(backend),
            c10d.PrefixStore(group_name, store),
            group_name=c10d.GroupName(group_name),
            timeout=timeout,
        )
    # dist.broadcast translates `src` by this table: here the ranks of the group are also the global ranks.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
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
    with _environment:  # groups with several servers are made in threads; making one waits for nobody
        before = os.environ.get(name)
        os.environ[name] = "0"
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
