"""CUDA memory that servers map: each trainer rank shares its own GPU's copy of a bucket with the server rank there.

So no bucket crosses from one GPU to another.  Trainer and servers must number the GPUs of a machine alike.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from megarl.weights.buckets import Bucket
from megarl.weights.servers import Server
from megarl.weights.shared import payload


def gpus_of(server: Server) -> list[str]:
    """The GPU of each rank of a server on this machine; none of one without GPUs."""
    first = server.nature.first_gpu
    return [] if first is None else [_name(first + rank) for rank in range(len(server.nature.spots))]


def wanted_handles(servers: Iterable[Server]) -> dict[str, int]:
    """GPU -> how many ranks of servers want its memory; each handle is opened once."""
    return dict(Counter(gpu for server in servers for gpu in gpus_of(server)))


def exchange(bucket: Bucket, wanted: Mapping[str, int]) -> dict[str, list[str]]:
    """GPU -> handles of the bucket in its memory; a collective of all ranks, each of which has filled its own."""
    mine = _name(torch.cuda.current_device())
    torch.cuda.synchronize()
    found: list[tuple[str, list[str]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (mine, [payload(bucket) for _ in range(wanted.get(mine, 0))]))
    return dict(entry for entry in found if entry is not None)


def take(handles: Mapping[str, list[str]], server: Server) -> Sequence[str]:
    """One handle for each rank of the server; ValueError if no trainer rank uses one of its GPUs."""
    texts = []
    for gpu in gpus_of(server):
        if not handles.get(gpu):
            raise ValueError(f"no rank of the trainer uses {gpu}, where {server.url} has a rank")
        texts.append(handles[gpu].pop())
    return texts


def _name(gpu: int) -> str:
    return f"{socket.gethostname()}/{gpu}"
