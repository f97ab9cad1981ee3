"""The rank's side of a Group: receives calls from the driver, runs them and answers each with a status."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from megarl.group.message import Message, decoded
from megarl.io.durable_files import number_of
from megarl.processes.channels.connection import ConnectionLost, Tensors, connect
from megarl.processes.channels.waiting import Heartbeat
from megarl.processes.lifetime import die_with_parent
from megarl.processes.ranks import ADDRESS, FLIGHT_RECORDS, PARENT, TOKEN
from megarl.processes.stacks import write_on_request

Answer = tuple[dict[str, Any], Tensors]
Handler = Callable[..., Answer]


def follow(handlers: Mapping[type[Message], Handler], share: Callable[[], Any], is_first: Callable[[], bool]) -> None:
    """Serve until the driver sends "close" or the parent process ends; each handler gets its messages, and tensors.

    `share()` is the process group of this rank's replica and `is_first()` tells whether this rank receives the
    replica's tensors; both are called only after the setup call.
    """
    kinds = {kind.method(): kind for kind in handlers}
    die_with_parent(int(os.environ[PARENT]))
    write_on_request(record_collectives)
    me = {"rank": int(os.environ["RANK"]), "host": socket.gethostname(), "pid": os.getpid()}
    connection = connect(os.environ[ADDRESS], os.environ[TOKEN], me, timeout_s=60.0)
    busy = threading.Event()
    # Where the driver is gone, this rank may hang in a collective.
    Heartbeat(lambda: [connection] if busy.is_set() else [], on_lost=lambda: os._exit(1))
    while True:
        busy.clear()
        try:
            header, tensors = connection.receive()
        except ConnectionLost:
            os._exit(1)  # the driver is gone: nothing of this rank is needed any more
        if header["method"] == "close":
            return
        busy.set()
        try:
            if header["has_payload"]:
                tensors = share_payload(tensors, share(), is_first())
            begin, kind = time.perf_counter(), kinds[header["method"]]
            result, out = handlers[kind](decoded(kind, header["arguments"]), tensors)
            seconds = time.perf_counter() - begin
            connection.send({"id": header["id"], "ok": True, "result": result, "seconds": seconds}, out)
        except (
            BaseException
        ) as error:  # the driver handles every error; torch's CheckpointException is not an Exception
            what = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            storage = 0 if isinstance(error, dist.DistError) else number_of(error)  # networks have EIO too
            connection.send({"id": header["id"], "ok": False, "storage": storage, **what})


def share_payload(tensors: Tensors, group: Any, is_first: bool) -> Tensors:
    """Broadcast the tensors that a replica's first rank received to all its ranks: the length, then the data."""
    if group.size() == 1:
        return tensors
    source = dist.get_global_rank(group, 0)
    body = bytearray(safetensors.torch.save(tensors)) if is_first else bytearray()
    size = torch.tensor([len(body)])
    dist.broadcast(size, src=source, group=group)
    data = torch.frombuffer(body, dtype=torch.uint8) if is_first else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, src=source, group=group)
    return tensors if is_first else safetensors.torch.load(data.numpy().tobytes())


def record_collectives() -> None:
    """Write the last collectives of this rank, finished or not, as torch's flight recorder has them: a pickle.

    It is for `python -m torch.distributed.flight_recorder.fr_trace FOLDER`; nothing here reads it.  Without stacks, for
    which torch would first import its compiler.
    """
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace" if dist.is_nccl_available() else "_dump_fr_trace")
    Path(os.environ[FLIGHT_RECORDS] + os.environ["RANK"]).write_bytes(dump(includeStackTraces=False))
