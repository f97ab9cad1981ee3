"""The routes that bring weights, for every server: what arrives is what was sent, and nothing outside a session.

This process is the trainer's rank 0; each tensor-parallel rank of a server is one more rank of the group.
"""

import json
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from server_fixtures import restore
from shared_buckets import flat_bytes, in_shared_memory
from strangers import strangers_at, with_files
from tiny_server import BOTH, LIMIT_S, TOKEN, against

from megarl.io.http_limits import HEADERS_S
from megarl.io.sockets import listen
from megarl.processes.channels.store import StoreHost, TlsStore
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.protocol import DTYPE_NAMES, FLATTENED, Route, SamplingParams, auth_headers, generate_body
from megarl.servers.launch import TOKEN_VARIABLE, EngineLaunch, hf_command
from megarl.servers.weight_group import StockHost, groups_key, join_weight_group, leave_weight_group
from megarl.weights.push.channel import Meeting


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
def weight_group(engine, background, token=TOKEN, num_ranks=1):
    """A group of this process and the ranks of one server: its name, and itself."""
    key = groups_key(token)
    meeting, host = Meeting.host(engine.url, 1 + num_ranks, "gloo", 60.0, key)
    where = {"rank_offset": 1, "world_size": 1 + num_ranks, "group_name": meeting.name, "backend": "gloo"}
    joined = background.submit(engine.init_group, meeting.address, meeting.port, **where)
    group = meeting.join(0, host)
    joined.result(60)
    yield meeting.name, group
    engine.destroy_group(meeting.name)
    leave_weight_group(group)


def broadcast_to(engine, name, group, tensors, background, **options):
    """One update over the group."""
    dtypes = [DTYPE_NAMES[tensor.dtype] for tensor in tensors.values()]
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    reply = background.submit(engine.update_from_distributed, list(tensors), dtypes, shapes, group_name=name, **options)
    dist.broadcast(flat_bytes(tensors).contiguous(), src=0, group=group)
    reply.result(60)


@against(*BOTH, "sglang_old", "sglang_tp2", "sglang_smg")
def test_what_is_broadcast_is_what_every_server_then_holds(server, tensors, expected, background):
    for engine in server.engine.engines:
        with weight_group(engine, background, server.token, server.variant.tensor_parallel_size) as (name, group):
            engine.pause("retract")
            engine.begin_update()
            broadcast_to(engine, name, group, tensors, background, version=9)
            engine.end_update()
            engine.resume()
        assert engine.checksums() == expected
        assert engine.model_info()["weight_version"] == "9"


def test_buckets_without_a_version_leave_the_stamp_until_the_last(server, tensors, expected, background):
    engine, halves = server.engine.engines[0], [dict(list(tensors.items())[:5]), dict(list(tensors.items())[5:])]
    with weight_group(engine, background, server.token, server.variant.tensor_parallel_size) as (name, group):
        engine.begin_update()
        broadcast_to(engine, name, group, halves[0], background, flush_cache=False)
        assert engine.model_info()["weight_version"] == "0"
        assert engine.checksums() not in (server.checksums, expected)
        broadcast_to(engine, name, group, halves[1], background, version=2)
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
    with weight_group(engine, background, hf_server.token) as (name, _):
        body = {"names": ["model.norm.weight", "model.layers.0.input_layernorm.weight"], "group_name": name}
        body |= {"dtypes": ["float32"] * 2, "shapes": [[32], [32]], "load_format": FLATTENED, **change}
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
        import os, sys, torch, torch.distributed as dist
        from megarl.processes.channels.store import TlsStore, StorePlace
        from megarl.servers.weight_group import join_weight_group, leave_weight_group
        for number, address in enumerate(sys.argv[1:]):
            group = join_weight_group(TlsStore(StorePlace(address, "a token")), 1, 2, "again", "gloo", 60.0)
            x = torch.zeros(3)
            dist.broadcast(x, src=0, group=group)
            assert x.tolist() == [float(number)] * 3
            leave_weight_group(group)
            del group
    """
    hosts = [StoreHost("127.0.0.1", "a token") for _ in range(2)]
    addresses = [host.place.address for host in hosts]
    other = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), *addresses])
    for number, host in enumerate(hosts):
        group = join_weight_group(TlsStore(host.place), 0, 2, "again", "gloo", 60.0)
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="again"):
            join_weight_group(TlsStore(host.place), 0, 2, "again", "gloo")
        dist.broadcast(torch.full((3,), float(number)), src=0, group=group)
        leave_weight_group(group)
        host.close()
    assert other.wait(60) == 0


def test_strangers_come_too_late_to_the_store_of_a_server_without_our_plug_in():
    """It meets the trainer in torch's own store, as SGLang's init_custom_process_group does."""
    script = """
        import os, sys, torch, torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        store = next(c10d.rendezvous(f"tcp://127.0.0.1:{sys.argv[1]}", 1, 2, timeout=c10d.default_pg_timeout))[0]
        store = c10d.PrefixStore("stock", store)
        how = {"group_name": "stock", "timeout": c10d.default_pg_timeout}
        group, _ = c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), store, **how)
        dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        x = torch.zeros(3)
        dist.broadcast(x, src=0, group=group)
        assert x.tolist() == [7.0] * 3
        os._exit(0)  # torch's threads may abort while Python ends, as the store is gone
    """
    host = StockHost("127.0.0.1")
    other = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), str(host.port)])
    group = join_weight_group(host.store(2, 60.0), 0, 2, "stock", "gloo", 60.0)
    host.shut()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", host.port))
    dist.broadcast(torch.full((3,), 7.0), src=0, group=group)
    assert other.wait(60) == 0
    leave_weight_group(group)


@contextmanager
def server_with_files(number, model_path, folder):
    """Our server in a process that may open so many files; its log is there."""
    with listen("127.0.0.1") as free:
        launch = EngineLaunch("hf", model_path, port=free.getsockname()[1], device="cpu")
    command = hf_command(launch, folder)
    environment = command.environment | {TOKEN_VARIABLE: TOKEN}
    with (folder / "log").open("w") as log, ExitStack() as stack:
        process = subprocess.Popen(with_files(number, command.argv), env=environment, stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        engine = ServerClient(launch.url, TOKEN, timeout_s=LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            with suppress(ServerError):
                engine.health()
                break
            time.sleep(0.1)
        yield engine, launch.port


@pytest.mark.full
def test_silent_connections_of_another_user_stop_neither_answers_nor_a_push(
    model_path, other_path, tmp_path, background
):
    """A server that may open 1,024 files, as is usual, and 1,500 connections with half a header."""
    with safe_open(f"{other_path}/model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    body = json.dumps(generate_body([5, 6, 7], 1, SamplingParams(max_new_tokens=4, ignore_eos=True), "r"))
    with server_with_files(1024, model_path, tmp_path) as (engine, port):
        friend = HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)

        def asks():
            friend.request("POST", Route.GENERATE, body, auth_headers(TOKEN))
            reply = friend.getresponse()
            return reply.status, len(json.loads(reply.read())["output_ids"])

        assert asks() == (200, 4)
        kept = friend.sock
        with strangers_at(port, 1500, most=512) as strangers:
            assert 0 < strangers.num_left <= 512, "the oldest went"
            assert asks() == (200, 4)
            with weight_group(engine, background) as (name, group):
                engine.begin_update()
                broadcast_to(engine, name, group, tensors, background, version=9)
                engine.end_update()
            assert engine.model_info()["weight_version"] == "9"
            assert strangers.gone_after_s() < HEADERS_S, "who has shown no key has less time"
        assert asks() == (200, 4)
        assert kept is friend.sock is not None, "who has shown the key keeps the connection"
        friend.close()
        log = (tmp_path / "log").read_text()
        assert len(log) < 10_000 and "Traceback" not in log
