"""Pushes from two ranks into stock SGLang by every transport: two versions, TP 1 and 2, dense models and experts."""

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from push_cases import K_PROJ, O_PROJ, OUT_PROJ, TOKEN, build, connect, push
from spawn import Ranks
from tiny_models import LACKING, write_model
from tiny_server import CURRENT, sglang_of
from transformers import AutoModelForCausalLM

from megarl.arch.layout import Layout
from megarl.arch.model_types import OF_0_19
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.mcore.setup import destroy_groups
from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.continuation import generate_completion
from megarl.rollout.pool import sender
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import PAUSE_MODES, Reply, Route, SamplingParams, parse_replies
from megarl.rollout.settings import GenerationSettings
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers
from megarl.trainer.servers.abilities import dp_ranks_of
from megarl.trainer.servers.make_servers import knowing_its_model
from megarl.weights.push.buckets import Bucket
from megarl.weights.push.shared import payload, shared_buffer

pytestmark = [pytest.mark.sglang, pytest.mark.dist]

TRANSPORTS = ("gathered", "mapped", "shared", "sharded")
# Without a GPU SGLang rounds the sizes of feed-forward layers up to 32 a rank, and heads to one a rank: these divide.
SIZES: dict[str, Any] = {"intermediate_size": 128, "num_key_value_heads": 2, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64, "mlp_only_layers": []},  # SGLang gives every layer of it experts
    "glm4_moe": {"moe_intermediate_size": 64},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe_text"), {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    ),
    # Positions of three kinds, which are the same for text.
    "qwen3_5_text": {"rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}},
}


@dataclass(frozen=True)
class Case:
    family: str
    layout: dict[str, int]
    tp: int = 1
    version: str = CURRENT
    tied: bool = False
    attention_dp: int = 1


CASES = {
    "llama3": Case("llama3", {"tp": 2}),
    "qwen2-tp2": Case("qwen2", {"pp": 2}, tp=2, tied=True),
    "qwen3-old": Case("qwen3", {"tp": 2}, version="0.5.17"),
    "qwen3-old-tp2": Case("qwen3", {"tp": 2}, tp=2, version="0.5.17"),
    "qwen3_moe-tp2": Case("qwen3_moe", {"ep": 2}, tp=2),
    "deepseek_v3-attention_dp": Case("deepseek_v3", {"pp": 2}, tp=2, attention_dp=2),
    "mixtral": Case("mixtral", {"tp": 2, "ep": 2, "etp": 1}),
    "minimax_m2-tp2": Case("minimax_m2", {"tp": 2, "ep": 2, "etp": 1}, tp=2),
    "glm4_moe-tp2": Case("glm4_moe", {"tp": 2, "ep": 2, "etp": 1}, tp=2),
    "qwen3_next-tp2": Case("qwen3_next", {"tp": 2, "ep": 2, "etp": 1}, tp=2),
    "qwen3_5_text-tp2": Case("qwen3_5_text", {"tp": 2}, tp=2, tied=True),
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", {"pp": 2}),
}
CASES = {name: case for name, case in CASES.items() if case.family not in LACKING}
LATENT = "deepseek_v3"


@dataclass(frozen=True)
class Running:
    case: Case
    folder: Path
    url: str
    engine: ServerClient
    ranks: Ranks

    @property
    def has_states(self) -> bool:
        return self.case.family in OF_0_19

    def push(
        self, transport: str, fault: str = "", settings: dict[str, Any] | None = None, **how: Any
    ) -> dict[str, Any]:
        """One push by ranks that are connected anew; what rank 0 knows of it."""
        self.ranks.run(connect, [self.url], transport, settings or {}, timeout_s=120)
        version = int(self.engine.model_info()["weight_version"]) + 1
        return self.ranks.run(push, version, fault, how, timeout_s=300)[0]


def make_model(case: Case, folder: Path) -> Path:
    if case.family == LATENT:  # the one shape of it that SGLang serves without a GPU
        more = {"moe_intermediate_size": 64} if case.tp > 1 else {}
        return write_tiny_model(folder / "model", TinySizes(layers=2), family=case.family, tied=False, **more)
    return write_model(folder, case.family, tied=case.tied, **SIZES, **MORE.get(case.family, {}))


# The old version keeps the contract in CI (tests/servers/test_contract.py); the pushes into it are long.
MARKS = {
    **dict.fromkeys(("qwen3-old", "qwen3-old-tp2"), pytest.mark.long),
    **dict.fromkeys(("mixtral", "minimax_m2-tp2", "glm4_moe-tp2"), pytest.mark.full),
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def running(
    request: pytest.FixtureRequest, two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    case = CASES[request.param]
    folder = make_model(case, tmp_path_factory.mktemp("model"))
    launch = knowing_its_model(
        EngineLaunch(
            "sglang",
            str(folder),
            max_running_requests=8,
            max_total_tokens=4096,
            tensor_parallel_size=case.tp,
            attention_dp=case.attention_dp,
            python=sglang_of(case.version),
            device="cpu",
            args=("--skip-tokenizer-init",),  # the folder has none
        )
    )
    with Servers([launch], TOKEN, tmp_path_factory.mktemp("logs")) as servers:
        servers.start()
        two_ranks.run(build, str(folder), Layout(**case.layout), timeout_s=240)
        yield Running(case, folder, servers.urls[0], ServerClient(servers.urls[0], TOKEN), two_ranks)
        two_ranks.run(connect, [], "auto", {}, timeout_s=120)
        two_ranks.run(destroy_groups)


@pytest.mark.megatron_0_19
def test_log_probs_of_prompts_and_completions_are_those_of_transformers(running: Running) -> None:
    """Of one row and of several, greedy and sampled, cut where caches end.  Before any push: of the folder's weights.

    In float32, whose sums of a state over 100 tokens differ by 1e-5 between two ways to compute them.
    """
    model = AutoModelForCausalLM.from_pretrained(running.folder).eval()
    prompts = [[3 + (i * 7 + j * 5) % 40 for j in range(1 + 7 * i)] for i in range(8)]
    for asked, temperature in ((prompts, 0.0), (prompts * 2, 1.0), (prompts[2:3], 0.0), (prompts[2:3], 1.0)):
        sampling = {"temperature": temperature, "max_new_tokens": 12, "ignore_eos": True}
        body = {"input_ids": asked, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        items = json.loads(running.engine._call(Route.GENERATE, body, most_bytes=1 << 24).content)
        for prompt, item in zip(asked, items, strict=True):
            found = [*item["meta_info"]["input_token_logprobs"][1:], *item["meta_info"]["output_token_logprobs"]]
            ids = torch.tensor([prompt + item["output_ids"]])
            with torch.no_grad():
                wanted = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            assert (torch.tensor([value for value, *_ in found]) - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_rank_holds_what_the_trainer_sent(transport: str, running: Running) -> None:
    for how in ({}, {"pause_mode": "in_place"}):
        found = running.push(transport, settings={"check_every": 1}, canary_off_by=0.0, **how)
        report = found["report"]
        assert (report.transports, report.failed, report.fallbacks) == ({running.url: transport}, {}, {}), found
        assert report.compared == ([running.url] if transport in ("shared", "sharded") else [])
        assert report.num_verified > 0
        assert running.engine.model_info()["weight_version"] == str(report.version)


def test_a_corrupted_element_is_named_and_sent_again_or_left_out(running: Running) -> None:
    tensor, fused = K_PROJ, K_PROJ.replace("k_proj", "qkv_proj")
    if running.has_states:  # SGLang's layers hold the parameters of attention themselves
        fused = fused.replace(".self_attn.", ".")
    if running.case.family == LATENT:
        tensor = fused = "model.layers.1.self_attn.kv_b_proj.weight"
    fault = f"corrupt-in-server {running.url} {tensor}"
    found = running.push("mapped", fault)["report"]
    assert found.transports == {running.url: "gathered"}
    assert f"(differ: {fused})" in found.fallbacks[running.url][0]
    found = running.push("gathered", fault)["report"]
    assert found.transports == {} and f"(differ: {fused})" in found.failed[running.url]
    assert running.push("gathered")["report"].transports == {running.url: "gathered"}


@pytest.mark.parametrize(
    ("transport", "then", "fault", "words"),
    [
        ("sharded", "gathered", "corrupt-in-flight x", "(differ: "),
        ("shared", "mapped", "close-memory x", "cannot open what was sent"),
        ("shared", "mapped", "corrupt-in-flight x", "(differ: "),
    ],
)
def test_slices_that_are_corrupted_or_cannot_be_read_are_sent_again(transport, then, fault, words, running) -> None:
    report = running.push(transport, fault)["report"]
    assert report.transports == {running.url: then}
    assert words in report.fallbacks[running.url][0]


def test_a_dropped_bucket_is_named(running: Running) -> None:
    report = running.push("gathered", f"drop-bucket {running.url}")["report"]
    dropped = OUT_PROJ if running.has_states else O_PROJ
    assert report.transports == {} and f"(differ: {dropped}" in report.failed[running.url]


def swappable(family: str) -> tuple[str, str]:
    """HF names that differ in a number, and the parameter of SGLang with the first of them."""
    names = {
        **dict.fromkeys(
            ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"), "model.layers.0.mlp.experts.{}.up_proj.weight"
        ),
        **dict.fromkeys(("mixtral", "minimax_m2"), "model.layers.0.block_sparse_moe.experts.{}.w3.weight"),
        **dict.fromkeys((LATENT, "glm4_moe"), "model.layers.1.mlp.experts.{}.up_proj.weight"),
    }.get(family)
    if names is None:  # a dense model: what can be swapped there are two norms
        return "model.layers.{}.input_layernorm.weight", "model.layers.0.input_layernorm.weight"
    return names, names.split(".experts.")[0] + ".experts.w13_weight"


def test_a_wrong_table_of_what_sglang_holds_is_found_out_by_its_own_loading(running: Running) -> None:
    """Gate and up the other way round, or two norms: each as large as the other."""
    names, stack = swappable(running.case.family)
    report = running.push("sharded", f"swap-places {names}")["report"]
    (sentence,) = report.fallbacks[running.url]
    assert f"after slices than after whole tensors: {stack}" in sentence
    assert (report.transports, report.failed) == ({running.url: "gathered"}, {})


def test_swapped_experts_are_named(running: Running) -> None:
    names, stack = swappable(running.case.family)
    report = running.push("gathered", f"swap-experts {names}")["report"]
    assert f"(differ: {stack}" in report.failed[running.url]


def test_tensors_that_do_not_fit_and_a_handle_of_memory_that_is_gone_are_refused_and_the_server_lives(
    running: Running,
) -> None:
    folder = Path(running.engine.model_info()["model_path"])
    norm = (json.loads((folder / "config.json").read_text())["hidden_size"],)
    wrong = Bucket(["model.norm.weight"], [(7,)], torch.float32, shared_buffer(28), True)
    gone = replace(wrong, data=shared_buffer(28))
    *gone_texts, gone_text = [payload(gone) for _ in range(running.case.tp + 1)]
    Path(f"/dev/shm{os.fsdecode(gone.data.untyped_storage()._share_filename_cpu_()[1])}").unlink()
    running.engine.pause("retract")
    running.engine.begin_update()
    with pytest.raises(ServerError, match="answered 400"):
        running.engine.update_from_tensor([payload(wrong) for _ in range(running.case.tp)])
    with pytest.raises(ServerError, match="answered 400: .*rank 0: .*cannot open what was sent"):
        running.engine.update_from_tensor(gone_texts)
    if running.case.tp == 2:  # SGLang answers for the first rank of an attention group, which could load it
        fits = Bucket(["model.norm.weight"], [norm], torch.float32, shared_buffer(4 * norm[0]), True)
        with pytest.raises(ServerError, match="answered 400: .*rank 1: .*cannot open what was sent"):
            running.engine.update_from_tensor([payload(fits), gone_text])
    running.engine.end_update()
    assert running.push("auto")["report"].transports == {running.url: "sharded"}


def test_pieces_of_a_session_find_their_prefix(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention groups have a cache each and take requests in turn: without its rank every second piece finds less."""
    seen: list[tuple[int, int | None]] = []

    def noted(reply: Any, n: int, *, num_asked: int, **how: Any) -> list[Reply]:
        replies = parse_replies(reply, n, num_asked=num_asked, **how)
        seen.extend((num_asked, each.cached_tokens) for each in replies)
        return replies

    monkeypatch.setattr(sender, "parse_replies", noted)
    told = {running.url: running.engine.server_info()}
    assert dp_ranks_of(told) == running.case.attention_dp

    settings = GenerationSettings(timeout_s=120, piece_tokens=4, dp_ranks=dp_ranks_of(told))

    async def ask() -> None:
        async with EnginePool([running.url], TOKEN, settings) as pool:
            for number in range(2):
                with pool.session(1) as affinity:
                    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
                    prompt = [5 + number, *range(6, 30)]
                    await generate_completion(pool, prompt, params, affinity=affinity)

    asyncio.run(ask())
    later = [(asked, found) for asked, found in seen if asked > 25]
    caches = running.engine.abilities.flush_beside_queue
    assert len(later) == 6 and all(found == (asked - 1 if caches else 0) for asked, found in later), later


def test_a_sleeping_server_takes_orders_at_once_after_each_pause(running: Running) -> None:
    """A scheduler that sleeps beside another one's sockets wakes after a second, also for the best of five calls."""
    engine = running.engine
    engine._call("/freeze_gc", {})  # type: ignore[arg-type]  # else a flush without GPU walks over all objects

    def update() -> None:
        engine.begin_update()
        engine.end_update()

    times: defaultdict[str, list[float]] = defaultdict(list)
    for mode in PAUSE_MODES:
        engine.pause(mode)
        for _ in range(5):
            for name, order in (("update", update), ("flush", engine.flush_cache)):
                time.sleep(0.05)  # it falls asleep
                start = time.perf_counter()
                order()
                times[f"{name} after {mode}"].append(time.perf_counter() - start)
        engine.resume()
    assert max(map(min, times.values())) < 0.2, dict(times)
