"""CUDA IPC handles: each trainer rank shares its GPU's copy of a bucket with the server rank on the same GPU.

So no bucket is copied to another GPU or another machine.  The code that starts trainer and servers tells their GPUs
(`Gpus`); without it a server is assumed to be on the machine of rank 0.  Trainer and servers must number the GPUs of a
machine in the same way.

A server may write into what it maps: SGLang's loader of gpt-oss zeroes the biases of down projections that only its
first rank adds.  So a copy has one reader, and nothing is read from it after the push of its bucket.
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

_NOT_MAPPED = ("expandable_segments:True", "backend:cudaMallocAsync")


@dataclass(frozen=True)
class Gpus:
    """Example: Gpus(trainer=("0/0", "0/1"), servers={url: ("0/0", "0/1")}), a server on the GPUs of both ranks.

    A GPU is named by its machine and its number there.
    """

    trainer: Sequence[str] = ()  # GPU of each rank; empty: not known
    servers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # url -> GPU of each rank


def check_can_be_mapped(environment: Mapping[str, str]) -> None:
    """Raises ValueError if torch gives a process with these variables GPU memory that others may not be able to open.

    It hands expandable segments to them as file descriptors, which containers and ptrace_scope forbid, and has no
    handles at all of cudaMallocAsync's memory.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        options = "".join((given := environment.get(name, "")).split())  # torch skips blanks
        if found := next((option for option in _NOT_MAPPED if option in options), None):
            raise ValueError(
                f"{name}={given} on {socket.gethostname()}: servers on the actor's GPUs map memory of its ranks, and "
                f"such memory may not be opened by another process; expected no {found}, or servers on other GPUs"
            )


def gpus_of(server: Server) -> list[str]:
    """The GPU of each rank of a server; empty for a server without GPUs."""
    first = server.capabilities.first_gpu
    if first is None:
        return []
    return list(server.gpus or (_name(first + rank) for rank in range(server.capabilities.layout.tp)))


def wanted_handles(servers: Iterable[Server]) -> dict[str, int]:
    """GPU -> number of server ranks that map its memory; each needs a handle of its own."""
    return dict(Counter(gpu for server in servers for gpu in gpus_of(server)))


def own_seat(trainer: Sequence[str]) -> str:
    """The GPU of this rank, or without GPUs its machine; `trainer`: as in `Gpus`."""
    if not torch.cuda.is_available():
        return socket.gethostname()
    return trainer[dist.get_rank()] if trainer else _name(torch.cuda.current_device())


def exchange(bucket: Bucket, wanted: Mapping[str, int], trainer: Sequence[str]) -> dict[str, list[str]]:
    """GPU -> handles of the bucket in its memory; a collective of all ranks, and each has filled its own copy.

    `trainer`: the GPUs of the ranks, if they are known.
    """
    mine = own_seat(trainer)
    torch.cuda.current_stream().synchronize()  # the bucket is filled on this stream; others may go on
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
