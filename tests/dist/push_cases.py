"""What the ranks of the push tests run: pushes into servers that the test has started."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megarl.mcore.model import build_model
from megarl.mcore.setup import Layout, make_groups
from megarl.rollout.client import Engine
from megarl.rollout.protocol import tensor_digest
from megarl.weights.buckets import Bucket
from megarl.weights.export import hf_tensors
from megarl.weights.gather import local_parameters
from megarl.weights.load import load_hf
from megarl.weights.push import Pusher, PushReport
from megarl.weights.servers import PushError, Server

TOKEN = "secret"


def all_cases(folder: str, urls: list[str], pids: list[int]) -> dict[str, Any]:
    """Two ranks, TP=2.  Of the two servers the second is frozen and killed at the end."""
    make_groups(Layout(tp=2))
    config = json.loads((Path(folder) / "config.json").read_text())
    model = build_model(config, Layout(tp=2))
    load_hf(model, folder, config)
    params = local_parameters(model)
    first, second = urls
    found: dict[str, Any] = {}

    def change() -> None:
        for param in params.values():
            param.mul_(1.01)

    pusher = Pusher([first, second], TOKEN, config, timeout_s=20)
    change()
    found["first"] = pusher.push(model, 1)
    change()
    found["warm"] = pusher.push(model, 2, pause_mode="in_place")
    want = {name: tensor_digest(tensor) for name, tensor in hf_tensors(model, config)}
    found["want"] = want
    if dist.get_rank() == 0:
        found["held"] = [Engine(url, TOKEN).checksums() for url in (first, second)]
        found["info"] = [Engine(url, TOKEN).server_info() for url in (first, second)]
    change()
    with mock.patch.object(Server, "broadcast", _corrupting(Server.broadcast)):
        found["corrupted"] = _error(lambda: pusher.push(model, 3))
    if dist.get_rank() == 0:
        found["paused"] = [Engine(url, TOKEN).server_info()["is_paused"] for url in (first, second)]
    found["repaired"] = pusher.push(model, 4)
    pusher.close()

    small = Pusher([first], TOKEN, config, bucket_bytes=4096, timeout_s=20)
    found["buckets"] = small.push(model, 5)
    change()
    with (
        mock.patch.object(Server, "receive", _dropping(Server.receive)),
        mock.patch.object(Server, "broadcast", _dropping(Server.broadcast)),
    ):
        found["dropped"] = _error(lambda: small.push(model, 6))
    small.close()

    frozen = Pusher([first, second], TOKEN, config, timeout_s=2)
    frozen.push(model, 7)
    if dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGSTOP)
    found["frozen"] = _error(lambda: frozen.push(model, 8))
    if dist.get_rank() == 0:
        os.kill(pids[1], signal.SIGKILL)
    again = Pusher([second], TOKEN, config, timeout_s=2)
    found["dead"] = _error(lambda: again.push(model, 9))
    found["stranger"] = _error(lambda: Pusher([first], "wrong", config, timeout_s=2).push(model, 10))
    sum_of_ranks = torch.ones(1)
    dist.all_reduce(sum_of_ranks)
    found["ranks that go on"] = int(sum_of_ranks)
    return found


def _error(call: Callable[[], PushReport | None]) -> tuple[str, float]:
    """The sentence of the PushError ("" where none was raised), and the seconds until then."""
    start = time.monotonic()
    try:
        call()
    except PushError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def _corrupting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Flip the lowest bit of the first element of k_proj in layer 1, on the way to whoever."""

    def corrupt(self: Server, bucket: Bucket) -> Any:
        data = bucket.data.clone()
        at = 0
        for name, raw in bucket.parts():
            if name == "model.layers.1.self_attn.k_proj.weight":
                data[at] ^= 1
            at += raw.numel()
        return broadcast(self, Bucket(bucket.names, bucket.shapes, bucket.dtype, data, bucket.is_last))

    return corrupt


def _dropping(method: Callable[..., Any]) -> Callable[..., Any]:
    """Do nothing for the bucket that holds the first layer's o_proj."""

    def drop(self: Server, bucket: Bucket, *args: Any) -> Any:
        if "model.layers.0.self_attn.o_proj.weight" in bucket.names:
            return mock.Mock()
        return method(self, bucket, *args)

    return drop
