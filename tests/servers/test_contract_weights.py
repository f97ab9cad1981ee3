"""The routes that bring weights, for every server: what arrives is what was sent, and nothing outside a session.

This process is the trainer's rank 0; each tensor-parallel rank of a server is one more rank of the group.
"""

import itertools
import subprocess
import sys
import textwrap
from contextlib import ExitStack, contextmanager

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from server_fixtures import restore
from shared_buckets import flat_bytes, in_shared_memory
from tiny_server import BOTH, against

from megarl.network.sockets import listen
from megarl.rollout.client import ServerError
from megarl.rollout.protocol import DTYPE_NAMES, Route
from megarl.servers.weight_group import join_weight_group, leave_weight_group

numbers = itertools.count()


@pytest.fixture
def tensors(server):
    with safe_open(f"{server.other_path}/model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture
def expected(server):
    """Checksums of a server that read the other folder itself; the first weights are back."""
    server.engine.update_from_disk(server.other_path, version=1)
    checksums = server.engine.checksums()
    server.engine.update_from_disk(server.model_path, version=0)
    assert server.engine.checksums() == server.checksums != checksums
    return checksums


@contextmanager
def weight_group(engine, num_ranks, background):
    """A group of this process and the ranks of one server: its name, and itself."""
    name, listener = f"contract{next(numbers)}", listen("127.0.0.1")
    port = listener.getsockname()[1]
    joined = background.submit(
        engine.init_group, "127.0.0.1", port, rank_offset=1, world_size=1 + num_ranks, group_name=name, backend="gloo"
    )
    group = join_weight_group("127.0.0.1", port, 0, 1 + num_ranks, name, "gloo", timeout_s=60, listener=listener)
    joined.result(60)
    yield name, group
    engine.destroy_group(name)
    leave_weight_group(group)


def broadcast_to(engine, name, group, tensors, background, **options):
    """One update over the group."""
    dtypes = [DTYPE_NAMES[tensor.dtype] for tensor in tensors.values()]
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    reply = background.submit(engine.update_from_distributed, list(tensors), dtypes, shapes, group_name=name, **options)
    for tensor in [flat_bytes(tensors)] if options.get("flattened") else tensors.values():
        dist.broadcast(tensor.contiguous(), src=0, group=group)
    reply.result(60)


@pytest.mark.parametrize("flattened", [False, True])
@against(*BOTH, "sglang_old", "sglang_tp2", "sglang_smg")
def test_what_is_broadcast_is_what_every_server_then_holds(server, tensors, expected, background, flattened):
    for engine in server.engine.engines:
        with weight_group(engine, server.variant.tensor_parallel_size, background) as (name, group):
            engine.pause("retract")
            engine.begin_update()
            broadcast_to(engine, name, group, tensors, background, version=9, flattened=flattened)
            engine.end_update()
            engine.resume()
        assert engine.checksums() == expected
        assert engine.model_info()["weight_version"] == "9"


def test_buckets_without_a_version_leave_the_stamp_until_the_last(server, tensors, expected, background):
    engine, halves = server.engine.engines[0], [dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])]
    with weight_group(engine, server.variant.tensor_parallel_size, background) as (name, group):
        engine.begin_update()
        broadcast_to(engine, name, group, halves[0], background, flattened=True, flush_cache=False)
        assert engine.model_info()["weight_version"] == "0"
        assert engine.checksums() not in (server.checksums, expected)
        broadcast_to(engine, name, group, halves[1], background, flattened=True, version=2)
        engine.end_update()
    assert engine.model_info()["weight_version"] == "2"
    assert engine.checksums() == expected


@against(*BOTH, "sglang_old", "sglang_tp2")
def test_a_bucket_in_shared_memory_is_what_every_server_then_holds(server, tensors, expected):
    for engine in server.engine.engines:
        texts, _bucket = in_shared_memory(tensors, server.variant.tensor_parallel_size)
        engine.pause("retract")
        engine.begin_update()
        engine.update_from_tensor(texts, version=11)
        engine.end_update()
        engine.resume()
        assert engine.checksums() == expected
        assert engine.model_info()["weight_version"] == "11"


@against(*BOTH, "sglang_old")
def test_shared_memory_outside_a_session_is_refused_where_there_are_sessions(server, tensors):
    texts, _bucket = in_shared_memory(tensors, server.variant.tensor_parallel_size)
    if not server.engine.abilities.update_sessions:
        server.engine.update_from_tensor(texts, version=3)
        assert server.engine.checksums() != server.checksums
        return
    with pytest.raises(ServerError, match="400"):
        server.engine.update_from_tensor(texts, version=3)
    assert server.engine.checksums() == server.checksums
    assert server.engine.model_info()["weight_version"] == "0"


# ---- what our own server refuses, and groups of any two processes


@pytest.fixture
def hf_server(hf_served):
    yield hf_served
    restore(hf_served)


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
def test_a_wrong_update_is_refused_before_any_broadcast_and_changes_nothing(hf_server, background, change, words):
    engine, before = hf_server.engine.engines[0], hf_server.checksums
    with weight_group(engine, 1, background) as (name, _):
        body = {"names": ["model.norm.weight", "model.layers.0.input_layernorm.weight"], "group_name": name}
        body |= {"dtypes": ["float32"] * 2, "shapes": [[32], [32]], **change}
        engine.begin_update()
        with pytest.raises(ServerError, match=words):
            engine._accepted(Route.UPDATE_FROM_DISTRIBUTED, body)
        engine.end_update()
    assert engine.checksums() == before
    assert engine.model_info()["weight_version"] == "0"


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
def test_a_wrong_update_from_tensors_is_refused_and_changes_nothing(hf_server, change, words):
    (text,), _bucket = in_shared_memory(change.get("tensors", {"model.norm.weight": torch.zeros(32)}))
    texts = [change.get("text", text)] * change.get("count", 1)
    with ExitStack() as stack:
        if change.get("session", True):
            hf_server.engine.begin_update()
            stack.callback(hf_server.engine.end_update)
        with pytest.raises(ServerError, match=words):
            hf_server.engine.update_from_tensor(texts, load_format=change.get("load_format", "flattened_bucket"))
    assert hf_server.engine.checksums() == hf_server.checksums


@pytest.mark.parametrize(
    ("change", "words"),
    [({"backend": "nccl"}, "gloo"), ({"rank_offset": 0}, "rank_offset=0"), ({"master_port": "x"}, "master_port='x'")],
)
def test_a_wrong_group_is_refused(hf_server, change, words):
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    with pytest.raises(ServerError, match=words):
        hf_server.engine._accepted(Route.INIT_GROUP, {**body, **change})


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
        join_weight_group("127.0.0.1", port, 0, 2, "lonely", "gloo", timeout_s=0.2, listener=listener)
