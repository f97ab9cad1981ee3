"""Weights over real gloo: this process is the trainer's rank 0, the server is another process."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from shared_buckets import flat_bytes, in_shared_memory

from megarl.network.sockets import listen
from megarl.rollout.client import ServerError
from megarl.rollout.protocol import DTYPE_NAMES, Route, tensor_digest
from megarl.servers.weight_group import join_weight_group, leave_weight_group

numbers = itertools.count()


def read_weights(folder):
    with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture
def link(server):
    """A weight group with the server: a function that pushes tensors through it; `link.name` is the group's."""
    name = f"weights{next(numbers)}"
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(
            server.engine.init_group, "127.0.0.1", port, rank_offset=1, world_size=2, group_name=name, backend="gloo"
        )
        group = join_weight_group("127.0.0.1", port, 0, 2, name, "gloo", timeout_s=30, listener=listener)
        joined.result(30)

        def push(tensors, **options):
            names = list(tensors)
            dtypes = [DTYPE_NAMES[tensor.dtype] for tensor in tensors.values()]
            shapes = [list(tensor.shape) for tensor in tensors.values()]
            reply = threads.submit(
                server.engine.update_from_distributed, names, dtypes, shapes, group_name=name, **options
            )
            if options.get("flattened"):
                dist.broadcast(flat_bytes(tensors), src=0, group=group)
            else:
                for tensor in tensors.values():
                    dist.broadcast(tensor.contiguous(), src=0, group=group)
            reply.result(30)

        push.name = name
        yield push
        server.engine.destroy_group(name)
        leave_weight_group(group)


@pytest.mark.parametrize("flattened", [False, True])
def test_a_push_puts_exactly_these_bytes_into_the_server(server, link, flattened):
    tensors = read_weights(server.other_path)
    server.engine.pause("retract")
    server.engine.begin_update()
    link(tensors, version=9, flattened=flattened)
    server.engine.end_update()
    server.engine.resume()
    assert server.engine.checksums() == {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    assert server.engine.model_info()["weight_version"] == "9"


def test_buckets_without_a_version_leave_the_stamp_until_the_last(server, link):
    tensors = list(read_weights(server.other_path).items())
    server.engine.begin_update()
    link(dict(tensors[:5]), flattened=True)
    assert server.engine.model_info()["weight_version"] == "0"
    link(dict(tensors[5:]), flattened=True, version=2)
    server.engine.end_update()
    assert server.engine.model_info()["weight_version"] == "2"
    assert server.engine.checksums() == {name: tensor_digest(tensor) for name, tensor in tensors}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ["model.norm.weight", "model.nrom.weight"]}, r"model\.nrom\.weight: unknown"),
        ({"shapes": [[32], [31]]}, r"input_layernorm\.weight: shape \[31\], expected \[32\]"),
        ({"dtypes": ["float32", "bfloat16"]}, r"input_layernorm\.weight: dtype bfloat16, expected float32"),
        ({"shapes": [[32]]}, "2 names, 2 dtypes, 1 shapes"),
        ({"load_format": "direct"}, "load_format='direct'"),
        ({"group_name": "nobody"}, "group_name='nobody'"),
        ({"names": "model.norm.weight"}, "names="),
    ],
)
def test_a_wrong_update_is_refused_before_any_broadcast_and_changes_nothing(server, link, change, words):
    before = server.engine.checksums()
    names = ["model.norm.weight", "model.layers.0.input_layernorm.weight"]
    body = {"names": names, "dtypes": ["float32"] * 2, "shapes": [[32], [32]]}
    body["group_name"] = link.name
    server.engine.begin_update()
    with pytest.raises(ServerError, match=words):
        server.engine._accepted(Route.UPDATE_FROM_DISTRIBUTED, {**body, **change})
    server.engine.end_update()
    assert server.engine.checksums() == before
    assert server.engine.model_info()["weight_version"] == "0"


def test_a_bucket_in_shared_memory_is_loaded_like_one_that_was_sent(server):
    tensors = read_weights(server.other_path)
    texts, _bucket = in_shared_memory(tensors)
    server.engine.begin_update()
    server.engine.update_from_tensor(texts, version=4)
    server.engine.end_update()
    assert server.engine.checksums() == {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    assert server.engine.model_info()["weight_version"] == "4"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensors": {"model.nrom.weight": torch.zeros(32)}}, r"model\.nrom\.weight: unknown"),
        ({"tensors": {"model.norm.weight": torch.zeros(31)}}, r"shape \[31\], expected \[32\]"),
        ({"count": 2}, "expected one text, for the only rank"),
        ({"text": "AAAA"}, "cannot be read"),
        ({"load_format": "direct"}, "load_format='direct'"),
        ({"load_format": "megarl.weights.push.receiver.load"}, "no list of named tensors"),
        ({"session": False}, "no weight update is open"),
    ],
)
def test_a_wrong_update_from_tensors_is_refused_and_changes_nothing(server, change, words):
    before = server.engine.checksums()
    (text,), _bucket = in_shared_memory(change.get("tensors", {"model.norm.weight": torch.zeros(32)}))
    texts = [change.get("text", text)] * change.get("count", 1)
    if change.get("session", True):
        server.engine.begin_update()
    with pytest.raises(ServerError, match=words):
        server.engine.update_from_tensor(texts, load_format=change.get("load_format", "flattened_bucket"))
    if change.get("session", True):
        server.engine.end_update()
    assert server.engine.checksums() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [({"backend": "nccl"}, "gloo"), ({"rank_offset": 0}, "rank_offset=0"), ({"master_port": "x"}, "master_port='x'")],
)
def test_a_wrong_group_is_refused(server, change, words):
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    with pytest.raises(ServerError, match=words):
        server.engine._accepted(Route.INIT_GROUP, {**body, **change})


def test_a_group_needs_no_default_group_and_its_name_can_be_used_again():
    script = """
        import sys, torch, torch.distributed as dist
        from megarl.servers.weight_group import join_weight_group, leave_weight_group
        for port in sys.argv[1:]:
            group = join_weight_group("127.0.0.1", int(port), 1, 2, "again", "gloo", timeout_s=60)
            x = torch.zeros(3)
            dist.broadcast(x, src=0, group=group)
            assert x.tolist() == [float(port)] * 3
            leave_weight_group(group)
            del group
    """
    listeners = [listen("127.0.0.1") for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    other = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), *map(str, ports)])
    for port, listener in zip(ports, listeners, strict=True):
        group = join_weight_group("127.0.0.1", port, 0, 2, "again", "gloo", timeout_s=60, listener=listener)
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="again"):
            join_weight_group("127.0.0.1", port, 0, 2, "again", "gloo")
        dist.broadcast(torch.full((3,), float(port)), src=0, group=group)
        leave_weight_group(group)
    assert other.wait(60) == 0


def test_a_meeting_to_which_nobody_comes_ends():
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    with pytest.raises(RuntimeError):
        join_weight_group("127.0.0.1", port, 0, 2, "lonely", "gloo", timeout_s=0.5, listener=listener)
