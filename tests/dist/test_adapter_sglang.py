"""Adapters of a model on Megatron shards, pushed into a real SGLang that runs the base."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lora_cases import CPU, Lora
from spawn import run_ranks
from tiny_server import TOKEN
from transformers import AutoModelForCausalLM

from megarl.arch.layout import Layout
from megarl.arch.projections import projections_of
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.io.http_calls import Caller
from megarl.mcore.models.lora import LoraSettings, adapted
from megarl.mcore.setup import destroy_groups
from megarl.mcore.training.step import forward_only
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.protocol import Route
from megarl.samples.batch import Batch, MicroBatch
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers
from megarl.weights.hf.adapter import peft_config
from megarl.weights.hf.export import save_hf
from megarl.weights.push import adapter_push
from megarl.weights.push.adapter_push import AdapterPusher, Encoded, give_adapter
from megarl.weights.push.report import PushError
from megarl.weights.push.settings import PushSettings
from megarl.weights.push.shared import payload, shared_buffer
from megarl.weights.verify.canary import Canary

pytestmark = [pytest.mark.sglang, pytest.mark.dist]

RANK, ALPHA = 32, 80.0  # large beside names and digests


def push_twice(folder: str, url: str, token: str, out: str, prompt: list[int]) -> dict[str, Any]:
    """Push two adapters, the second one as to another machine.

    Log-probs of the prompt under each, by version, folders of the merged models, and bytes of the orders to load.
    """
    sizes: list[int] = []
    call = Caller.call

    def counted(caller: Caller, method: str, url: str, body: Any = None, **how: Any) -> Any:
        if url.endswith(Route.LOAD_ADAPTER):
            sizes.append(len(json.dumps(body)))
        return call(caller, method, url, body, **how)

    Caller.call = counted  # type: ignore[method-assign]
    lora = Lora(folder, LoraSettings(RANK, ALPHA), Layout(tp=1, pp=2))
    settings = PushSettings((url,), token, timeout_s=60, adapters_kept=2)
    pusher = AdapterPusher(settings, lora.hf, base_model=folder, life="a life")
    micro = MicroBatch(Batch(torch.tensor(prompt), torch.tensor([len(prompt)])))
    found: dict[str, Any] = {"columns": {}, "adapters": [], "sizes": sizes}
    for version in (1, 2):
        _disturb(lora)
        columns = forward_only(lora.model, [micro], lora.outputs, CPU)
        said = _of_last_stage(columns[0]["log_probs"] if columns else None, len(prompt))
        canary = Canary(tuple(prompt), tuple(said[1:].tolist()), tolerance=1e-4)
        adapter_push.is_here = lambda _, version=version: version == 1  # type: ignore[assignment]
        report = pusher.push(lora.model, version, canary=canary)
        if report is not None:
            assert (report.failed, report.transports) == ({}, {url: "adapter"})
            found["bytes"] = report.num_bytes
            found["adapters"].append(report.adapter)
        found["columns"][str(version)] = said
        save_hf(lora.model, lora.hf, Path(out) / str(version), source_folder=folder)
    pusher.close()
    destroy_groups()
    return found


def _of_last_stage(log_probs: torch.Tensor | None, count: int) -> torch.Tensor:
    """What the last of two pipeline ranks has computed, on both."""
    out = torch.zeros(count) if log_probs is None else log_probs.detach().clone()
    dist.broadcast(out, src=1)
    return out


@torch.no_grad()
def _disturb(lora: Lora) -> None:
    for _, linear in adapted(lora.model):
        for low_rank in linear.lora.projections.values():
            low_rank.B.add_(0.3 * torch.randn(low_rank.B.shape))


PROMPT = list(range(10, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every size divides by 64: SGLang's CPU path pads others over two ranks, and its adapters know of no padding."""
    sizes = TinySizes(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "base", sizes, seed=1)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    launch = EngineLaunch(
        "sglang", str(folder), max_running_requests=8, max_total_tokens=4096, random_seed=7, lora_rank=RANK,
        lora_targets=projections_of({}), tensor_parallel_size=2,
    )  # fmt: skip
    with Servers([launch], TOKEN, tmp_path_factory.mktemp("logs")) as servers:
        servers.start()
        yield servers.urls[0]


@pytest.fixture(scope="module")
def pushed(folder: Path, server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("merged")
    found = run_ranks(2, push_twice, str(folder), server, TOKEN, str(out), PROMPT, timeout_s=120)
    columns = found[1]["columns"]
    names = dict(zip(columns, found[0]["adapters"], strict=True))  # by version, of the adapters in the server
    sizes = {"bytes": found[0]["bytes"], "sizes": found[0]["sizes"]}
    return {**sizes, "columns": columns, "names": names, "out": out}


def served(url: str, adapter: str | None) -> torch.Tensor:
    """Log-probs of the prompt, but of its first token, as the server computes them with this adapter."""
    engine = ServerClient(url, TOKEN, timeout_s=60)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    reply = engine._json("/generate", {**body, "logprob_start_len": 0, "lora_path": adapter})  # type: ignore[arg-type]
    engine.close()
    return torch.tensor([triple[0] for triple in reply["meta_info"]["input_token_logprobs"][1:]])


def of_transformers(folder: Path) -> torch.Tensor:
    model, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), torch.tensor(PROMPT)
    with torch.no_grad():
        scores = model(ids[None]).logits[0].log_softmax(-1)
    return scores[:-1].gather(1, ids[1:, None])[:, 0]


def test_the_server_says_what_the_trainer_and_the_merged_model_say(pushed: dict[str, Any], server: str) -> None:
    assert pushed["bytes"] == 4 * RANK * 2 * (3 * 64 + 64 + 2 * 32 + 2 * 64 + 2 * (64 + 128) + 128 + 64)
    for version, columns in pushed["columns"].items():
        found = served(server, pushed["names"][version])
        torch.testing.assert_close(found, columns[1:], rtol=0, atol=1e-4)
        torch.testing.assert_close(found, of_transformers(pushed["out"] / version), rtol=0, atol=1e-4)


def test_an_adapter_travels_at_most_once_for_two_ranks(pushed: dict[str, Any]) -> None:
    mapped, sent = pushed["sizes"]
    assert mapped < 0.2 * pushed["bytes"] and sent < 1.4 * pushed["bytes"]


def test_an_adapter_that_arrives_otherwise_than_it_was_sent_is_refused_and_the_server_lives(server: str) -> None:
    rows, tensors = {"q_proj": 64, "k_proj": 32, "v_proj": 32}, {}
    for layer, name in itertools.product(range(2), rows):
        place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{place}.lora_A.weight"] = torch.ones(RANK, 64)
        tensors[f"{place}.lora_B.weight"] = torch.ones(rows[name], RANK)
    adapter = Encoded.of(tensors, peft_config(LoraSettings(RANK, ALPHA), "base", list(rows)))
    other = replace(adapter, digests=dict.fromkeys(adapter.digests, "0" * 64))
    engine = ServerClient(server, TOKEN, timeout_s=60)
    with pytest.raises(PushError, match="did not take the adapter wrong: .*MISMATCH"):
        give_adapter(engine, "wrong", other, set())
    gone = replace(adapter, bucket=replace(adapter.bucket, data=shared_buffer(len(adapter.bucket.data))))
    dead = payload(gone.bucket)
    Path(f"/dev/shm{os.fsdecode(gone.bucket.data.untyped_storage()._share_filename_cpu_()[1])}").unlink()
    for name in ("half", "again"):  # what the first rank had loaded is dropped
        with pytest.raises(ServerError, match="rank 1: .*cannot open what was sent"):
            engine.load_adapter(name, adapter.config, [payload(adapter.bucket), dead], adapter.digests)
        with pytest.raises(ServerError, match="(?i)not loaded|never been loaded"):
            served(server, name)
    give_adapter(engine, "half", adapter, set())
    engine.unload_adapter("half")
    assert not {"wrong", "half", "again"} & set(engine.adapters())
    engine.close()


def test_without_an_adapter_the_server_is_the_base(pushed: dict[str, Any], server: str, folder: Path) -> None:
    base = served(server, None)
    torch.testing.assert_close(base, of_transformers(folder), rtol=0, atol=1e-4)
    for name in pushed["names"].values():
        assert (served(server, name) - base).abs().max() > 0.05


def test_an_adapter_can_be_dropped(pushed: dict[str, Any], server: str) -> None:
    first, second = pushed["names"].values()
    engine = ServerClient(server, TOKEN, timeout_s=60)
    assert set(engine.adapters()) == {first, second}
    engine.unload_adapter(first)
    engine.close()
    torch.testing.assert_close(served(server, second), pushed["columns"]["2"][1:], rtol=0, atol=1e-4)
