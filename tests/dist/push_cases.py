"""Servers of the push tests, and what their ranks run.

Faults are put in where bytes leave the trainer, or into the server itself.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist

from megarl.arch.layout import Layout
from megarl.mcore.models.model import build_model
from megarl.mcore.setup import make_groups
from megarl.mcore.training.step import Outputs, forward_only
from megarl.rollout.client import ServerClient, ServerError
from megarl.samples.batch import Batch, MicroBatch
from megarl.servers.launch import TOKEN_VARIABLE
from megarl.servers.nccl import VARIABLES, paired_variables
from megarl.servers.supervisor import free_ports
from megarl.weights.hf.export import hf_tensors
from megarl.weights.hf.gather import local_parameters
from megarl.weights.hf.load import load_hf
from megarl.weights.push import routes, sharded
from megarl.weights.push import servers as push_servers
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.push import Canary, Pusher
from megarl.weights.push.report import PushError
from megarl.weights.push.servers import Server, ServerCapabilities
from megarl.weights.push.settings import PushSettings
from megarl.weights.push.shared import forget, message, payload, shared_buffer
from megarl.weights.reshard import exchange, relay
from megarl.weights.reshard.plan import Plan
from megarl.weights.verify.digests import digest


class HFServer:
    """A real server, whose process may be killed and started again at the same place.

    Example: with HFServer(folder) as server: server.url, server.pid; server.restart()
    """

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        (self._port,) = free_ports(["127.0.0.1"])
        self._folder, self._dtype = folder, dtype
        self.url = f"http://127.0.0.1:{self._port}"
        self.engine = ServerClient(self.url, TOKEN)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "megarl.hf_server.main", "--model-path", str(self._folder)]
        command += ["--dtype", self._dtype]
        command += ["--port", str(self._port), "--max-running-requests", "4", "--max-total-tokens", "512"]
        command += ["--group-timeout-s", "60"]
        environment = {**os.environ, **VARIABLES, TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, env=environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, limit_s: float = 240) -> Self:
        """Until it serves."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                self.engine.health()
                return self
            except ServerError:
                assert self._process.poll() is None and time.monotonic() < deadline, f"{self.url} did not start"
                time.sleep(0.1)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()
        self.wait()

    @property
    def is_paused(self) -> bool:
        return bool(self.engine.server_info()["is_paused"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.engine.close()


TOKEN = "secret"
K_PROJ, O_PROJ = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.o_proj.weight"
OUT_PROJ = "model.layers.0.linear_attn.out_proj.weight"  # in its place where the first layer has states

_held: dict[str, Any] = {}  # of this rank, from call to call


def build(folder: str, layout: Layout, dtype: str = "float32") -> None:
    """A model on these ranks, and no pusher yet."""
    make_groups(layout)
    config = json.loads((Path(folder) / "config.json").read_text())
    model = build_model(config, layout, dtype=dtype)
    load_hf(model, folder, config)
    _held.update(model=model, config=config, folder=folder, layout=layout, params=local_parameters(model))


def connect(urls: list[str], transport: str, settings: dict[str, Any]) -> None:
    """From now on pushes go to these servers by this way."""
    if "pusher" in _held:
        _held["pusher"].close()
    folder = settings.pop("source_folder", _held["folder"])
    settings = {"token": TOKEN, "timeout_s": 60, "bucket_bytes": 4096, "transport": transport} | settings
    _held["pusher"] = Pusher(PushSettings(urls, **settings), _held["config"], source_folder=folder)


def push(version: int, fault: str, how: dict[str, Any]) -> dict[str, Any]:
    """Change the weights and push them, with a fault under way; what was reported, and what the trainer then holds."""
    bare = how.pop("bare", False)  # without what a test does beside the push
    if not bare:
        for name in sorted(_held["params"]):
            _held["params"][name].mul_(1.01)
    if (error_of_canary := how.pop("canary_off_by", None)) is not None:
        how["canary"] = _canary(error_of_canary)
    name, _, argument = fault.partition(" ")
    with ExitStack() as stack:
        if (mode := how.pop("pause_mode", None)) is not None:
            settings = replace(_held["pusher"]._settings, pause_mode=mode)
            stack.enter_context(mock.patch.object(_held["pusher"], "_settings", settings))
        for patch in FAULTS[name](argument) if fault else ():
            stack.enter_context(patch)
        try:
            report, error = _held["pusher"].push(_held["model"], version, **how), ""
        except PushError as raised:
            report, error = raised.report, str(raised)
    expected, sizes = {}, []
    of_servers = _held["pusher"]._dtype
    for name, tensor in () if bare else hf_tensors(_held["model"], _held["config"], dtype=of_servers):
        expected[name] = digest(tensor)
        sizes.append(tensor.numel())
    return {"report": report, "error": error, "expected": expected, "sizes": sizes}


def _canary(error: float) -> Canary:
    """Of the trainer's weights as they are now; its log-probs are wrong by `error`."""
    ids = (3, 4, 5, 6, 7)
    micro = MicroBatch(Batch(torch.tensor(ids), torch.tensor([len(ids)])))
    outputs = Outputs(_held["layout"], _held["config"]["vocab_size"])
    found = forward_only(_held["model"], [micro], outputs, torch.device("cpu"))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, found[0]["log_probs"][1:].tolist() if found else None)
    log_probs = next(values for values in by_rank if values)  # only the last pipeline stage has them
    return Canary(ids, tuple(value + error for value in log_probs))


def ranks_that_go_on() -> int:
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


# ---- faults: each yields the patches that make it happen


def _corrupt_in_flight(url: str) -> list[Any]:
    """Flip a bit of k_proj on its way to one server."""
    send, start = Server._broadcast, exchange.begin

    def broadcast(self: Server, bucket: Bucket) -> Any:
        if self.url != url or K_PROJ not in bucket.names:
            return send(self, bucket)
        data, at = bucket.data.clone(), 0
        for name, raw in bucket.parts():
            data[at] ^= name == K_PROJ
            at += raw.numel()
        return send(self, Bucket(bucket.names, bucket.shapes, bucket.dtype, data, bucket.is_last))

    def isend(ops: Any, link: Any, ranks: Any = (1,)) -> Any:
        changed = []
        for op, raw, peer in ops:
            if op is dist.isend and dist.get_rank() in ranks:
                raw = raw.clone()
                raw[0] ^= 1
            changed.append((op, raw, peer))
        return start(changed, link)

    every = partial(isend, ranks=(0, 1))  # both receive for a guest
    sending = [mock.patch.object(exchange, "begin", isend), mock.patch.object(relay, "begin", every)]
    return [mock.patch.object(Server, "_broadcast", broadcast), *sending]


def _corrupt_in_server(argument: str) -> list[Any]:
    """Flip a bit of a tensor (k_proj) in a server after all has been sent and before it is asked what it holds."""
    url, _, name = argument.partition(" ")
    corrupted, read_checksums = name or K_PROJ, Server.read_checksums

    def corrupt(self: Server) -> Any:
        if self.url == url and not _held.get("corrupted"):
            _held["corrupted"] = True
            wrong = _held["tensors"][corrupted]
            buffer = shared_buffer(wrong.nbytes)
            buffer.copy_(wrong.reshape(-1).view(torch.uint8))
            buffer[0] ^= 1
            bad = Bucket([corrupted], [tuple(wrong.shape)], wrong.dtype, buffer, True)
            self.engine.update_from_tensor(
                [payload(bad) for _ in range(self.capabilities.layout.tp)], flush_cache=False
            )
        return read_checksums(self)

    _held["tensors"] = {name: tensor.clone() for name, tensor in hf_tensors(_held["model"], _held["config"])}
    _held["corrupted"] = False
    return [mock.patch.object(Server, "read_checksums", corrupt)]


def _drop_bucket(url: str) -> list[Any]:
    """One server neither is sent nor hears of the bucket with the first layer's output projection."""

    def skip(method: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(self: Server, bucket: Bucket, *args: Any) -> Any:
            is_dropped = self.url == url and not {O_PROJ, OUT_PROJ}.isdisjoint(bucket.names)
            return mock.MagicMock() if is_dropped else method(self, bucket, *args)

        return maybe

    return [mock.patch.object(Server, name, skip(getattr(Server, name))) for name in ("_receive", "_broadcast")]


def _drop_mapped(number: str) -> list[Any]:
    """No server hears of the bucket of this number, which is not the last, among those it is to map."""
    calls: dict[str, int] = {}
    map_ = Server.map

    def maybe(self: Server, **arguments: Any) -> Any:
        calls[self.url] = calls.get(self.url, -1) + 1
        return 0.0 if calls[self.url] == int(number) else map_(self, **arguments)

    return [mock.patch.object(Server, "map", maybe)]


def _drop_message(_: str) -> list[Any]:
    """The last message of rank 1 to each server does not leave it.  (Behind any other gloo ends a receiver that gets
    the next.)  Of what it has received for its guests it hands no last message over.
    """
    hand_over = relay.Guest.hand_over

    def all_but_the_last(self: relay.Guest, message: Any) -> None:
        if self._taken < len(self.messages):
            hand_over(self, message)

    def fewer(queue: Any, *args: Any, **named: Any) -> exchange.Sent:
        last = {link: i for i, (link, _) in enumerate(queue)}.values() if dist.get_rank() == 1 else ()
        return exchange.send([each for i, each in enumerate(queue) if i not in last], *args, **named)

    return [mock.patch.object(sharded, "send", fewer), mock.patch.object(relay.Guest, "hand_over", all_but_the_last)]


def _close_memory(_: str) -> list[Any]:
    """What a server is to map is gone before it opens it."""

    def gone(text: str, memory: torch.Tensor | None = None) -> str:
        if memory is None:
            return message(text)
        other = shared_buffer(memory.numel())
        made = message(text, other)
        forget(other)
        return made

    return [mock.patch.object(sharded, "message", gone)]


def _swap_experts(names: str) -> list[Any]:
    """The server takes the first two experts' tensors of these names for each other."""
    receive = Server._receive
    other = {names.format(i): names.format(1 - i) for i in (0, 1)}

    def swap(self: Server, bucket: Bucket, *args: Any) -> None:
        swapped = [other.get(name, name) for name in bucket.names]
        receive(self, Bucket(swapped, bucket.shapes, bucket.dtype, bucket.data, bucket.is_last), *args)

    return [mock.patch.object(Server, "_receive", swap)]


def _swap_places(names: str) -> list[Any]:
    """The table of what servers hold is wrong about these names: of experts or layers it takes the first two for each
    other, in a stack of experts the tensors that lie over one another.
    """
    table, other = routes.server_table, {names.format(i): names.format(1 - i) for i in (0, 1)}

    def swapped(*args: Any) -> list[Any]:
        ops = table(*args)
        if other.keys() <= {op.param for op in ops}:
            return [replace(op, param=other.get(op.param, op.param)) for op in ops]
        stack = next(op for op in ops if names.format(0) in op.hf_shapes)
        return [replace(op, names=tuple(reversed(op.names))) if op is stack else op for op in ops]

    return [mock.patch.object(routes, "server_table", swapped)]


def _leave_out(rank: str) -> list[Any]:
    """A rank of the trainer does not join, though it has something to send."""
    members = routes.members_of

    def fewer(claims: Any) -> dict[int, int]:
        return {other: place for other, place in members(claims).items() if other != int(rank)}

    return [mock.patch.object(routes, "members_of", fewer)]


def _describe_otherwise(rank: str) -> list[Any]:
    """A rank of the trainer derives another plan."""
    fingerprint = Plan.fingerprint

    def other(self: Plan, message_bytes: int) -> str:
        return fingerprint(self, message_bytes + (dist.get_rank() == int(rank)))

    return [mock.patch.object(Plan, "fingerprint", other)]


def _not_plain(_: str) -> list[Any]:
    """Servers say that they hold quantized weights, so that nobody computes what their checksums must be."""
    read = ServerCapabilities.read
    return [mock.patch.object(ServerCapabilities, "read", lambda *args: replace(read(*args), is_plain=False))]


def _full_disk(argument: str) -> list[Any]:
    """No file of an exported folder can be written; the servers are as said."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    patches = _not_plain("") if argument == "not-plain" else []
    return [mock.patch("megarl.weights.hf.folder.HFWriter.add", side_effect=full), *patches]


def _signal(number: int) -> Callable[[str], list[Any]]:
    """A process gets a signal when the second bucket, or the first message, is about to leave."""

    def patches(pid: str) -> list[Any]:
        calls = iter(range(10**6))
        act = lambda: os.kill(int(pid), number)  # noqa: E731

        def before(method: Callable[..., Any], when: int) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                if dist.get_rank() == 0 and next(calls) == when:
                    act()
                return method(*args, **kwargs)

            return wrapped

        return [
            mock.patch.object(Server, "send", before(Server.send, 2)),
            mock.patch.object(Server, "map", before(Server.map, 2)),
            mock.patch.object(sharded, "send", before(exchange.send, 0)),
            mock.patch.object(sharded, "relay", before(relay.relay, 0)),
        ]

    return patches


def record_order(version: int) -> list[tuple[str, Any]]:
    """Push, and tell in which order this rank used its groups: (collective | message | check, group, ...)."""
    order: list[tuple[str, Any]] = []
    agree, start = exchange.agree, exchange.begin

    def name(group: Any) -> str:
        return str(dist.distributed_c10d._world.pg_names[group])

    def agreeing(fingerprint: str, link: Any) -> None:
        order.append(("collective", name(link.group)))
        agree(fingerprint, link)

    def starting(ops: Any, link: Any) -> Any:
        kinds = {op for op, _, _ in ops}
        order.append(("message" if kinds == {dist.isend} else "check", name(link.group)))
        return start(ops, link)

    with mock.patch.object(sharded, "agree", agreeing), mock.patch.object(exchange, "begin", starting):
        _held["pusher"].push(_held["model"], version)
    return order


def count_requests(version: int) -> int:
    """Push, and tell how many requests the servers got."""
    with mock.patch.object(ServerClient, "_call", autospec=True, side_effect=ServerClient._call) as call:
        _held["pusher"].push(_held["model"], version)
    return call.call_count


def _misroute(_: str) -> list[Any]:
    """Every rank sends the wrong slice of k_proj, and takes what it sent for right."""
    view = exchange._view

    def other(params: Any, param_slice: Any, shape: Any) -> torch.Tensor:
        found = view(params, param_slice, shape)
        return found.flip(0) if "layers.1.self_attention.linear_qkv" in param_slice.param else found

    return [mock.patch.object(exchange, "_view", other)]


def _set(assignment: str) -> list[Any]:
    """A variable of the ranks' environment, NAME=VALUE."""
    return [mock.patch.dict(os.environ, [assignment.split("=")])]


def _set_for_nccl(assignment: str) -> list[Any]:
    """The same, and the servers are asked as where groups are made over NCCL."""
    asked = lambda _: paired_variables("nccl")  # noqa: E731
    return [*_set(assignment), mock.patch.object(push_servers, "paired_variables", asked)]


FAULTS: dict[str, Callable[[str], list[Any]]] = {
    "corrupt-in-flight": _corrupt_in_flight,
    "corrupt-in-server": _corrupt_in_server,
    "drop-bucket": _drop_bucket,
    "drop-mapped": _drop_mapped,
    "drop-message": _drop_message,
    "close-memory": _close_memory,
    "swap-experts": _swap_experts,
    "swap-places": _swap_places,
    "leave-out": _leave_out,
    "describe-otherwise": _describe_otherwise,
    "not-plain": _not_plain,
    "full-disk": _full_disk,
    "kill": _signal(signal.SIGKILL),
    "freeze": _signal(signal.SIGSTOP),
    "misroute": _misroute,
    "set": _set,
    "set-for-nccl": _set_for_nccl,
}
