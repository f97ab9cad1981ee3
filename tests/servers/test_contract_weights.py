"""The routes that bring weights, for every server: what arrives is what was sent, and nothing outside a session.

This process is the trainer's rank 0; each tensor-parallel rank of a server is one more rank of the group.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from safetensors import safe_open
from shared_buckets import flat_bytes, in_shared_memory

from megarl.network.sockets import listen
from megarl.rollout.client import ServerError
from megarl.rollout.protocol import DTYPE_NAMES
from megarl.servers.weight_group import join_weight_group, leave_weight_group

numbers = itertools.count()


@pytest.fixture
def server(any_server):
    """Every test of this file runs against every variant."""
    return any_server


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


@pytest.fixture
def background():
    with ThreadPoolExecutor(1) as threads:
        yield threads


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


def test_a_group_can_be_left_and_joined_again(server, background):
    sizes = []
    for engine in server.engine.engines:
        for _ in range(2):
            with weight_group(engine, server.variant.tensor_parallel_size, background) as (_, group):
                sizes.append(group.size())
    assert set(sizes) == {1 + server.variant.tensor_parallel_size}, "the trainer and every rank of the server"
