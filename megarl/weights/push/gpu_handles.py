"""CUDA memory that servers map: each trainer rank shares its own GPU's copy of a bucket with the server rank there.

So no bucket crosses from one GPU to another, nor to another machine.  Who stands where tells whoever started them
(`Gpus`); without it a server is taken to be on the machine of rank 0.  Trainer and servers must number the GPUs of a
machine alike.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megarl.weights.push.agreement import gather_json
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.servers import Server
from megarl.weights.push.shared import payload


@dataclass(frozen=True)
class Gpus:
    """Example: Gpus(trainer=("0/0", "0/1"), servers={url: ("0/0", "0/1")}), a server on the GPUs of both ranks.

    A GPU is named by its machine and its number there.
    """

    trainer: Sequence[str] = ()  # of each rank; empty: nobody said
    servers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # url -> of each rank


def gpus_of(server: Server) -> list[str]:
    """The GPU of each rank of a server; none of one without GPUs."""
    first = server.nature.first_gpu
    if first is None:
        return []
    return list(server.gpus or (_name(first + rank) for rank in range(len(server.nature.coordinates))))


def wanted_handles(servers: Iterable[Server]) -> dict[str, int]:
    """GPU -> how many ranks of servers want its memory; each handle is opened once."""
    return dict(Counter(gpu for server in servers for gpu in gpus_of(server)))


def exchange(bucket: Bucket, wanted: Mapping[str, int], trainer: Sequence[str]) -> dict[str, list[str]]:
    """GPU -> handles of the bucket in its memory; a collective of all ranks, each of which has filled its own.

    `trainer`: their GPUs, where they were told.
    """
    mine = trainer[dist.get_rank()] if trainer else _name(torch.cuda.current_device())
    torch.cuda.synchronize()
    return dict(gather_json((mine, [payload(bucket) for _ in range(wanted.get(mine, 0))])))


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
