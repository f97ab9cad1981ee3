"""A worker without Megatron: what the tests of Group call."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from echo_messages import Double, Eat, Fail, Gradient, Hang, Kill, Meet, Pid, Where

from megarl.group.follow import Answer, follow
from megarl.group.message import Place, Setup
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


def setup(message: Setup, _: Tensors) -> Answer:
    """Replicas of `tp` ranks each; the last of a replica reports."""
    join_world("gloo", message.timeout_s)
    tp = message.layout.tp
    global group
    for first in range(0, WORLD, tp):
        made = dist.new_group(list(range(first, first + tp)))
        group = made if first <= RANK < first + tp else group
    return asdict(Place(RANK // tp, RANK % tp == tp - 1)), {}


def double(message: Double, tensors: Tensors) -> Answer:
    return {"rank": RANK, "said": message.say}, {name: 2 * t for name, t in tensors.items()}


def gradient(_: Gradient, tensors: Tensors) -> Answer:
    weights = torch.zeros(3, requires_grad=True)
    (weights @ tensors["row"] / WORLD).backward()
    dist.all_reduce(weights.grad)
    return {}, {"gradient": weights.grad}


def pid(_: Pid, tensors: Tensors) -> Answer:
    return {"pid": os.getpid()}, {}


def where(_: Where, tensors: Tensors) -> Answer:
    return {"rank": RANK, "first_gpu": int(os.environ[FIRST_GPU]), "local_rank": int(os.environ["LOCAL_RANK"])}, {}


def fail(message: Fail, _: Tensors) -> Answer:
    if message.rank == RANK:
        raise KINDS[message.kind](message.text)
    time.sleep(message.others_sleep_s)
    return {}, {}


def hang(message: Hang, _: Tensors) -> Answer:
    if message.rank == RANK:
        time.sleep(60)
    return {}, {}


def meet(message: Meet, _: Tensors) -> Answer:
    for how, rank in vars(message).items():
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


def kill(message: Kill, _: Tensors) -> Answer:
    if message.rank == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
    return {}, {}


def eat(message: Eat, _: Tensors) -> Answer:
    eaten = []
    while message.rank == RANK:
        eaten.append(os.urandom(2**20) * 16)
    time.sleep(60)
    return {}, {}


group: Any = None

if __name__ == "__main__":
    handlers = {Setup: setup, Double: double, Gradient: gradient, Pid: pid, Where: where, Fail: fail, Hang: hang}
    follow({**handlers, Meet: meet, Kill: kill, Eat: eat}, lambda: group, lambda: dist.get_rank(group) == 0)
