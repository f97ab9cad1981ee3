"""The process group over which weights travel from trainer ranks to one server: rank 0 sends, the others receive.

It is a world of its own beside torch's default group (which may exist or not) and meets the others through a store at
`master_address:master_port`, hosted by rank 0 at that address alone. The order of store prefixes is the wire format,
that of SGLang's `init_custom_process_group`, so a stock server joins it.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


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

    `listener`: of rank 0, a socket that listens there, which is used up; without one torch would listen on every
    interface. `timeout_s` limits the meeting and every later collective. Raises RuntimeError (torch's DistError is one)
    past the limit, ValueError when this process has a group of that name. Use
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
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],  # no parent ranks: torch then asks for no default group
        c10d.Backend(backend),
        c10d.PrefixStore(group_name, store),
        group_name=c10d.GroupName(group_name),
        timeout=timeout,
    )
    # Lets dist.broadcast translate `src`: ranks of this group are their own global ranks.
    c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def leave_weight_group(group: dist.ProcessGroup) -> None:
    """Close the group on this side; its name can be used again.

    Let go of it then: one that lives on until Python ends can end the process with an abort of gloo's threads.
    """
    dist.destroy_process_group(group)
