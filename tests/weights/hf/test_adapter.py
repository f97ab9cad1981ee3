"""Adapters under PEFT's names, what a server is told of them, and which it holds over the pushes."""

import asyncio
import base64
import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from async_tests import in_a_loop
from fake_servers import AdapterWriter, completion_of, serving
from hf_configs import hf_of as config_of
from peft_folder import peft_settings
from states import trusted

from megarl.mcore.models.lora import LoraSettings
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.continuation import generate_completion
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import Route, SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import VersionSpan
from megarl.servers.launch import WEIGHT_LOADER
from megarl.weights.clock import Clock
from megarl.weights.hf.adapter import adapter_table, module_names, peft_config
from megarl.weights.mapping.names import ShardCoordinate
from megarl.weights.push import adapter_push
from megarl.weights.push.adapter_push import AdapterPusher, Encoded, give_adapter, outdated
from megarl.weights.push.report import PushError, PushReport
from megarl.weights.push.settings import PushSettings

HF = config_of("qwen3", num_hidden_layers=2)
MIXTRAL = config_of("mixtral", num_hidden_layers=2)
DEEPSEEK = config_of("deepseek_v3", num_hidden_layers=2, n_routed_experts=4)
SECOND = ShardCoordinate(tp_rank=1, tp=2)


def test_a_and_b_are_cut_as_the_weight_is() -> None:
    table = {op.param: op for op in adapter_table(HF, LoraSettings(4, 8.0, ("k_proj", "down_proj")))}
    assert len(table) == 2 * 2 * 2
    k = "decoder.layers.1.self_attention.linear_qkv.lora.k_proj"
    down = "decoder.layers.1.mlp.linear_fc2.lora.down_proj"
    shapes = {name: table[name].shape_at(SECOND) for name in (f"{k}.A", f"{k}.B", f"{down}.A", f"{down}.B")}
    assert shapes == {f"{k}.A": (4, 32), f"{k}.B": (16, 4), f"{down}.A": (4, 24), f"{down}.B": (32, 4)}
    prefix = "base_model.model.model.layers.1"
    assert table[f"{k}.B"].hf_shapes == {f"{prefix}.self_attn.k_proj.lora_B.weight": (32, 4)}
    assert table[f"{down}.A"].hf_shapes == {f"{prefix}.mlp.down_proj.lora_A.weight": (4, 48)}
    (rows,), (columns,) = table[f"{k}.B"].pieces_at(SECOND), table[f"{down}.A"].pieces_at(SECOND)
    assert (rows.dim, rows.hf_start, rows.length) == (0, 16, 16)
    assert (columns.dim, columns.hf_start, columns.length) == (1, 24, 24)
    assert not table[f"{k}.A"].is_sharded
    assert not table[f"{down}.B"].is_sharded


def test_every_expert_has_its_own_pair_on_the_ranks_that_hold_it() -> None:
    settings = LoraSettings(4, 8.0, ("gate_proj", "down_proj"))
    table = {op.param: op for op in adapter_table(MIXTRAL, settings)}
    assert len(table) == 2 * 4 * 2 * 2
    expert = "decoder.layers.1.mlp.experts.local_experts.3"
    gate, down = f"{expert}.linear_fc1.lora.gate_proj", f"{expert}.linear_fc2.lora.down_proj"
    prefix = "base_model.model.model.layers.1.block_sparse_moe.experts.3"
    assert table[f"{gate}.B"].hf_shapes == {f"{prefix}.w1.lora_B.weight": (48, 4)}
    assert table[f"{down}.A"].hf_shapes == {f"{prefix}.w2.lora_A.weight": (4, 48)}
    there = ShardCoordinate(tp_rank=1, tp=4, ep_rank=1, ep=2, etp_rank=1, etp=2)
    assert all(table[f"{name}.{factor}"].held_by(there) for name in (gate, down) for factor in "AB")
    assert not table[gate.replace("experts.3", "experts.1") + ".A"].held_by(there)
    shapes = [table[f"{name}.{factor}"].shape_at(there) for name in (gate, down) for factor in "AB"]
    assert shapes == [(4, 32), (24, 4), (4, 24), (32, 4)]
    assert module_names(MIXTRAL, settings) == {"w1": "gate_proj", "w2": "down_proj"}


def test_every_projection_of_the_model_can_be_adapted_under_its_name_in_the_folder() -> None:
    """Latent attention, a dense layer, and one with shared and routed experts."""
    names = {name for op in adapter_table(DEEPSEEK, LoraSettings(4, 8.0)) for name in op.hf_shapes}
    attention = {f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    projections = ("gate_proj", "up_proj", "down_proj")
    dense = attention | {f"mlp.{x}" for x in projections}
    sparse = {f"mlp.{of}.{x}" for of in ("shared_experts", *(f"experts.{e}" for e in range(4))) for x in projections}
    expected = [f"model.layers.0.{x}" for x in dense] + [f"model.layers.1.{x}" for x in attention | sparse]
    assert names == {f"base_model.model.{x}.lora_{factor}.weight" for x in expected for factor in "AB"}


@pytest.mark.parametrize(("alpha", "written"), [(8.0, 8), (2.5, 2.5)])
def test_settings_survive_pefts_file(tmp_path: Path, alpha: float, written: float) -> None:
    settings = LoraSettings(4, alpha, ("q_proj", "up_proj"))
    config = peft_config(settings, "/models/base", list(module_names(HF, settings)))
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, written, "/models/base")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert peft_settings(tmp_path, HF) == settings


class TwoRanks(ServerClient):
    """A server that answers with what it was told, or with an error; `maps`: it opens shared memory."""

    def __init__(self, status: int = 200, *, maps: bool = True, **info: Any) -> None:
        self.url, self.status, self.maps, self.info = "http://127.0.0.1", status, maps, {"tp_size": 2, **info}
        self.bodies: list[dict[str, Any]] = []

    def server_info(self) -> dict[str, Any]:
        return self.info

    def _accepted(self, route: Any, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        is_mapped = len(body["serialized_named_tensors"][0]) < 2000  # a handle, and no bytes
        if self.status != 200 or (is_mapped and not self.maps):
            raise ServerError(self.url, route, 400 if self.status == 200 else self.status, "no such adapter, or so")
        return {"success": True}


OURS: dict[str, Any] = {"custom_weight_loader": [WEIGHT_LOADER]}
TENSORS = {"a": torch.arange(600.0).view(2, 300), "b": torch.ones(2)}
NUM_BYTES = 602 * 4


def tensors_in(text: str) -> dict[str, torch.Tensor]:
    sent = pickle.loads(base64.b64decode(text))
    return {
        one.name: sent["flattened_tensor"][one.start_idx : one.end_idx].view(one.dtype).view(one.shape)
        for one in sent["metadata"]
    }


@pytest.mark.parametrize(
    ("info", "maps", "copies"),
    [
        (OURS, True, 0),
        (OURS | {"nnodes": 2}, True, 1),  # of which one machine is another one
        (OURS, False, 1),  # in a container with shared memory of its own
        ({}, True, 2),  # a rank without our loader reads its own payload only
    ],
    ids=["mapped", "several_machines", "container", "stock"],
)
def test_an_adapter_travels_once_or_not_at_all(info: dict[str, Any], maps: bool, copies: int) -> None:
    engine, config = TwoRanks(maps=maps, **info), peft_config(LoraSettings(4, 8.0), "base", ["q_proj"])
    give_adapter(engine, "actor-7", Encoded.of(TENSORS, config), set())
    body = engine.bodies[-1]
    assert (body["lora_name"], body["config_dict"], body["load_format"]) == ("actor-7", config, "flattened_bucket")
    payloads = body["serialized_named_tensors"]
    assert len(payloads) == 2
    for text in filter(None, payloads):
        got = tensors_in(text)
        assert sorted(got) == ["a", "b"] and all(torch.equal(got[name], tensor) for name, tensor in TENSORS.items())
    texts = [text for text in payloads if len(text) > NUM_BYTES]
    assert len(texts) == copies
    assert sum(map(len, payloads)) < copies * 4 / 3 * NUM_BYTES + 2 * 1500  # names and places, by rank
    expected = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in TENSORS.items()}
    assert body["expected_checksums"] == expected
    json.dumps(body)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, "^http://127.0.0.1 takes no adapters; expected actor.lora.push=merged$"),
        (400, "^http://127.0.0.1 did not take the adapter actor-7: no such adapter, or so$"),
    ],
)
def test_a_server_that_refuses_is_named(status: int, sentence: str) -> None:
    with pytest.raises(PushError, match=sentence):
        give_adapter(TwoRanks(status), "actor-7", Encoded.of({"a": torch.ones(2)}, {}), set())


CONFIG: Any = {}


def pusher_of(urls: list[str], keep: int = 2, timeout_s: float = 60.0, life: str = "first") -> AdapterPusher:
    settings = PushSettings(tuple(urls), "token", timeout_s=timeout_s, adapters_kept=keep)
    return AdapterPusher(settings, CONFIG, base_model="base", life=life)


async def push(pusher: AdapterPusher, urls: list[str], version: int) -> PushReport:
    return await asyncio.to_thread(pusher.deliver, urls, version, {"a": torch.ones(2)}, CONFIG, None, Clock())


def test_memory_that_nobody_maps_is_not_left_and_not_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that nobody opens keeps its reference."""
    engine, before = TwoRanks(maps=False, **OURS), set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
    monkeypatch.setattr(engine, "adapters", list, raising=False)
    pusher = pusher_of([])
    pusher._engines[engine.url] = engine
    for version in range(2):
        assert pusher.deliver([engine.url], version, TENSORS, CONFIG, None, Clock()).failed == {}
    assert [len(body["serialized_named_tensors"][0]) > NUM_BYTES for body in engine.bodies] == [False, True, True]
    assert set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")) <= before


def test_a_pushers_oldest_and_all_of_other_lives_are_outdated() -> None:
    names = [
        "users-own",
        "megarl-b-x-00000010-v9",
        "megarl-b-x-00000009-v8",
        "megarl-b-y-00000001-v1",
        "megarl-a-x-00000011-v9",
        "megarl-b-x-00000011-v9",
    ]
    of_b = ("megarl-b-", "megarl-b-x-")
    assert outdated(names, *of_b, keep=2) == ["megarl-a-x-00000011-v9", "megarl-b-x-00000009-v8"]
    assert outdated(names, *of_b, keep=9) == ["megarl-a-x-00000011-v9"]


@in_a_loop
async def test_a_server_holds_so_many_adapters_and_a_new_life_begins_without_those_before() -> None:
    server = AdapterWriter("users-own")
    async with serving(server) as (urls, _):
        first, second = pusher_of(urls, keep=3), pusher_of(urls, keep=3, life="second")
        names = [(await push(first, urls, version)).adapter for version in range(5)]
        assert server.adapters == ["users-own", *names[2:]]
        again = await push(second, urls, 0)  # of the same version, with other weights
        assert again.failed == {} and again.adapter not in names
        assert server.adapters == ["users-own", again.adapter]


@in_a_loop
async def test_two_runs_of_one_life_keep_their_own_adapters_on_a_server() -> None:
    server = AdapterWriter()
    async with serving(server) as (urls, _):
        first, second = pusher_of(urls), pusher_of(urls)
        ours = [(await push(first, urls, version)).adapter for version in range(3)]
        theirs = [(await push(second, urls, version)).adapter for version in range(3)]
        assert sorted(server.adapters) == sorted([*ours[1:], *theirs[1:]])


@in_a_loop
async def test_an_adapter_is_encoded_once_for_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    monkeypatch.setattr(adapter_push, "copied", lambda bucket: encoded.append(bucket) or "bytes")

    servers = AdapterWriter(), AdapterWriter()
    async with serving(*servers) as (urls, _):
        report = await push(pusher_of(urls), urls, 0)
        assert report.failed == {} and [server.adapters for server in servers] == [[report.adapter]] * 2

    assert len(encoded) == 1


@in_a_loop
async def test_a_request_of_an_adapter_that_goes_is_ended_and_its_completion_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_push, "_UNLOAD_S", 0.05)
    params = SamplingParams(max_new_tokens=12, sampling_seed=1)
    expected = completion_of(1, 2, 12)
    assert len(expected) > 6

    server = AdapterWriter(stops_after=3)
    async with (
        serving(server) as (urls, _),
        EnginePool(urls, "token", GenerationSettings(timeout_s=60, fenced=True)) as pool,
    ):
        pusher = pusher_of(urls)
        (url,) = urls

        async def push_and_trust(version: int) -> None:
            report = await push(pusher, urls, version)
            assert report.failed == {}
            pool.update(trusted(url, version, report.adapter))

        await push_and_trust(0)
        writing = asyncio.create_task(generate_completion(pool, [5, 6], params))
        while not server.ended:  # it has begun
            await asyncio.sleep(0)
        await push_and_trust(1)
        assert "abort" not in server.ordered, "there is room for two"
        await push_and_trust(2)
        assert [order.partition(" ")[0] for order in server.ordered] == ["load", "load", "abort", "unload", "load"]
        server.go.set()
        completion = await writing
        assert completion.token_ids == expected
        assert completion.versions == (VersionSpan(0, 0, 3), VersionSpan(1, 3, len(expected)))
        assert pool.counters()["wasted_fenced"] == pool.counters()["wasted_failed"] == 0


@in_a_loop
async def test_an_adapter_that_could_not_be_unloaded_is_unloaded_by_the_next_push() -> None:
    class Busy(AdapterWriter):
        """Its first order to unload fails before it has done anything."""

        refuses = True

        async def __call__(self, request: Any) -> Any:
            if request.path == Route.UNLOAD_ADAPTER and self.refuses:
                self.refuses = False
                return web.json_response({"message": "busy"}, status=500)
            return await super().__call__(request)

    server = Busy()
    async with serving(server) as (urls, _):
        pusher = pusher_of(urls)
        for version in (0, 1):
            await push(pusher, urls, version)
        report = await push(pusher, urls, 2)
        assert list(report.failed) == urls and report.transports == {}
        assert len(server.adapters) == 2
        report = await push(pusher, urls, 2)
        assert report.failed == {} and server.adapters[1:] == [report.adapter]
