"""A worker without Megatron: what the tests of Group call."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from megarl.group.follow import Answer, follow
from megarl.processes.channels.connection import Tensors
from megarl.processes.channels.store import join_world
from megarl.processes.ranks import FIRST_GPU

KINDS = {
    "value": ValueError,
    "runtime": RuntimeError,
    "network": dist.DistBackendError,
    "no exception": type("Stop", (BaseException,), {}),
}
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def setup(arguments: dict[str, Any], _: Tensors) -> Answer:
    """Replicas of `tp` ranks each; the last of a replica reports."""
    join_world("gloo", arguments["timeout_s"])
    tp = arguments["layout"]["tp"]
    global group
    for first in range(0, WORLD, tp):
        made = dist.new_group(list(range(first, first + tp)))
        group = made if first <= RANK < first + tp else group
    return {"replica": RANK // tp, "is_reporter": RANK % tp == tp - 1}, {}


def double(arguments: dict[str, Any], tensors: Tensors) -> Answer:
    return {"rank": RANK, "said": arguments.get("say")}, {name: 2 * t for name, t in tensors.items()}


def gradient(arguments: dict[str, Any], tensors: Tensors) -> Answer:
    """That of the mean of a linear model's outputs, over all ranks: the mean of the rows."""
    weights = torch.zeros(3, requires_grad=True)
    (weights @ tensors["row"] / WORLD).backward()
    dist.all_reduce(weights.grad)
    return {}, {"gradient": weights.grad}


def pid(arguments: dict[str, Any], _: Tensors) -> Answer:
    return {"pid": os.getpid()}, {}


def where(arguments: dict[str, Any], _: Tensors) -> Answer:
    return {"rank": RANK, "first_gpu": int(os.environ[FIRST_GPU]), "local_rank": int(os.environ["LOCAL_RANK"])}, {}


def fail(arguments: dict[str, Any], _: Tensors) -> Answer:
    if arguments["rank"] == RANK:
        raise KINDS[arguments["kind"]](arguments.get("text", "the shelf is empty"))
    time.sleep(arguments.get("others_sleep_s", 0.0))
    return {}, {}


def hang(arguments: dict[str, Any], _: Tensors) -> Answer:
    if arguments["rank"] == RANK:
        time.sleep(60)
    return {}, {}


def meet(arguments: dict[str, Any], _: Tensors) -> Answer:
    """A collective; `arguments`: what the ranks do that never join it."""
    for how, rank in arguments.items():
        if rank == RANK:
            {"stopped": stop, "holds": hold, "loops": loop, "fails": fall}[how]()
    dist.barrier()
    return {}, {}


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold() -> None:
    """Wait with the interpreter's lock in hand, as PyDLL does, so that no thread runs Python code, signal or not."""
    mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def fall() -> None:
    raise RuntimeError("Connection reset by peer")


def loop() -> None:
    while True:
        pass


def kill(arguments: dict[str, Any], _: Tensors) -> Answer:
    if arguments["rank"] == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
    return {}, {}


def eat(arguments: dict[str, Any], _: Tensors) -> Answer:
    """Take memory until the kernel kills this rank, where its cgroup has a limit."""
    eaten = []
    while arguments["rank"] == RANK:
        eaten.append(os.urandom(2**20) * 16)
    time.sleep(60)
    return {}, {}


group: Any = None

if __name__ == "__main__":
    follow(
        {f.__name__: f for f in (setup, double, gradient, pid, where, fail, hang, meet, kill, eat)},
        lambda: group,
        lambda: dist.get_rank(group) == 0,
    )
