"""How far the log-probs of server and trainer are apart, with and without replay of experts and of sampling masks.

    python benchmarks/logprobs/bench_replay.py            three families, about a minute on two cores
    python benchmarks/logprobs/bench_replay.py --quick    one family, few tokens

Tiny models with random weights: experts that matter, and two kinds of routers.  "nearly tied" ones differ between
server and trainer by far less than a log-prob notices, but choose other experts for most tokens; "plain" ones are equal
on both sides.  The server is our own, in float32, so that all differences come from what the case names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import Result, arguments, run
from megarl.arch.layout import Layout
from megarl.arch.routed_experts import ROUTED_EXPERTS, RoutedExperts
from megarl.data.batch import make_batch
from megarl.data.examples.tiny import write_tiny_model
from megarl.group import Group, GroupSettings
from megarl.roles.handles import Actor
from megarl.roles.settings import LoadSettings, Packing
from megarl.rollout.continuation import generate_completion
from megarl.rollout.engine_columns import EngineRoutes, EngineSupport
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.rollout.wire_columns import EngineColumn
from megarl.samples.batch import Batch
from megarl.samples.ragged import names_in_batch
from megarl.samples.sample import SUPPORT, Prompt, Sample
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers

# Of each family the name of its number of experts.
FAMILIES = {"qwen3_moe": "num_experts", "mixtral": "num_local_experts", "deepseek_v3": "n_routed_experts"}
EXPERTS, CHOSEN = 16, 4
STD = {"plain": 0.02, "nearly tied": 3e-6}  # of a router's weights
NARROW = (0.6, 20)  # top_p, top_k
TIMEOUT_S = 300.0
USUAL = {"prompts": 16, "new_tokens": 64}
QUICK = {"prompts": 4, "new_tokens": 16}
NOTES = [
    "gap: |log-prob of the server - log-prob of the trainer| of a token of a completion, in nats",
    "experts differ: share of tokens and layers for which the trainer's own routers choose another set of experts",
    "routers perturbed: both in float32, their routers are drawn with different seeds and nearly tie",
    "bfloat16 trainer: the same weights in bfloat16 and float32; what is left with replay is the rounding of the rest",
    f"top_p {NARROW[0]}, top_k {NARROW[1]}: the same weights in float32, experts replayed in both columns; without "
    "replay the trainer's log-probs are over the whole vocabulary",
    "the models are untrained: the tokens that top_p and top_k leave hold about a quarter of the probability, and the "
    "gap without replay is the logarithm of it",
    "ratios: the mean gap without replay over that with replay, the median over the families",
]


@dataclass(frozen=True)
class Case:
    """What is compared.  The model that is served and the one that is trained have routers of this kind."""

    name: str
    routers: str
    replay: str  # what is replayed or not: routed_experts | support
    dtype: str = "float32"  # of the trainer


CASES = (
    Case("routers perturbed", "nearly tied", ROUTED_EXPERTS),
    Case("bfloat16 trainer", "plain", ROUTED_EXPERTS, "bfloat16"),
    Case("top_p, top_k", "plain", SUPPORT),
)


def write_model(folder: Path, family: str, routers: str, seed: int) -> Path:
    """A tiny model; `seed`: of its routers, everything else is the same for all."""
    settings: dict[str, Any] = {FAMILIES[family]: EXPERTS}
    write_tiny_model(folder, family=family, tied=False, num_experts_per_tok=CHOSEN, **settings)
    file = folder / "model.safetensors"
    weights, g = load_file(file), torch.Generator().manual_seed(0)
    for key in sorted(key for key in weights if ".experts." in key):  # else they would add little to hidden states
        weights[key] = torch.randn(weights[key].shape, generator=g) * 0.1
    g = torch.Generator().manual_seed(1 + seed)
    for key in sorted(key for key in weights if key.endswith(".gate.weight")):
        weights[key] = torch.randn(weights[key].shape, generator=g) * STD[routers]
    save_file(weights, file, {"format": "pt"})
    return folder


def sampled(url: str, token: str, of: RoutedExperts, case: Case, num_prompts: int, new_tokens: int) -> Batch:
    """Completions of a server with their experts, and of a narrowed case the tokens that could be drawn."""
    top_p, top_k = NARROW if case.replay == SUPPORT else (1.0, -1)
    params = SamplingParams(top_p=top_p, top_k=top_k, max_new_tokens=new_tokens, sampling_seed=3, ignore_eos=True)
    columns: tuple[EngineColumn, ...] = (EngineRoutes(of),)
    columns += (EngineSupport(top_p, top_k),) if case.replay == SUPPORT else ()
    g = torch.Generator().manual_seed(4)
    prompts = [torch.randint(6, 90, (4 + i % 9,), generator=g).tolist() for i in range(num_prompts)]

    async def groups() -> list[list[Sample]]:
        async with EnginePool([url], token, GenerationSettings(timeout_s=TIMEOUT_S, columns=columns)) as pool:
            found = await asyncio.gather(*(generate_completion(pool, prompt, params) for prompt in prompts))
        return [[Sample.of(Prompt(f"0-{i}", prompts[i], ""), completion, 0.0)] for i, completion in enumerate(found)]

    return make_batch(asyncio.run(groups()))


def gaps(ours: Tensor, batch: Batch) -> dict[str, float]:
    """Mean and maximum of the difference to the server's log-probs, over the tokens that it wrote."""
    differences = (ours - batch.columns["rollout_log_probs"])[batch.columns["response_mask"] > 0].abs()
    return {"mean": float(differences.mean()), "max": float(differences.max())}


def share_of_other_experts(ours: Tensor, theirs: Tensor, written: Tensor) -> float:
    """Of tokens and layers, those with another set of experts.  ours, theirs: [N, layers, experts of a token]."""
    both = [experts[written].long().sort(-1).values for experts in (ours, theirs)]
    return float((both[0] != both[1]).any(-1).double().mean())


def row_of(family: str, case: Case, actor: Actor, batch: Batch) -> dict[str, Any]:
    """One comparison with replay and without."""
    support = names_in_batch(SUPPORT) if case.replay == SUPPORT else ()
    with_replay = gaps(actor.log_probs(batch, inputs=(*support, ROUTED_EXPERTS)), batch)
    without = gaps(actor.log_probs(batch, inputs=(ROUTED_EXPERTS,) if case.replay == SUPPORT else ()), batch)
    written = batch.columns["response_mask"] > 0
    own = actor.columns(batch, (ROUTED_EXPERTS,))[ROUTED_EXPERTS]
    return {
        "family": family,
        "case": case.name,
        "tokens": int(written.sum()),
        "experts differ": share_of_other_experts(own, batch.columns[ROUTED_EXPERTS], written),
        "mean gap without": without["mean"],
        "mean gap with replay": with_replay["mean"],
        "max gap without": without["max"],
        "max gap with replay": with_replay["max"],
    }


def ratios(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each case, how much replay narrows the mean gap."""
    found: dict[str, list[float]] = {}
    for row in rows:
        name = f"{row['case'].replace(',', '').replace(' ', '_')}_without_over_with"
        found.setdefault(name, []).append(row["mean gap without"] / row["mean gap with replay"])
    return {name: statistics.median(each) for name, each in found.items()}


def work(options: argparse.Namespace) -> Result:
    sizes = QUICK if options.quick else USUAL
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench_replay_") as name:
        folder = Path(name)
        with Group("ranks", 1, Layout(), GroupSettings(device=options.device), log_dir=folder / "ranks") as group:
            group.start()
            for family in list(FAMILIES)[: 1 if options.quick else None]:
                rows += _family(family, group, folder / family, options.device, sizes)
    model = {"experts": EXPERTS, "experts of a token": CHOSEN, "std of routers": json.dumps(STD)}
    return Result(
        "replay",
        options.device,
        {**sizes, **model, "server": "hf, float32", "trainer": "1 rank, float32 or as the case says"},
        rows,
        ratios(rows),
        NOTES,
        "Log-probs of server and trainer with and without replay of experts and sampling masks",
    )


def _family(family: str, group: Group, folder: Path, device: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    trained = {routers: write_model(folder / f"trained {routers}", family, routers, 0) for routers in STD}
    served = {**trained, "nearly tied": write_model(folder / "served", family, "nearly tied", 1)}
    of = RoutedExperts.of(json.loads((trained["plain"] / "config.json").read_text()))
    assert of is not None, "the model has experts"
    token = secrets.token_hex(16)
    launches = [
        EngineLaunch(
            "hf",
            str(served[routers]),
            max_running_requests=16,
            returns_routes=True,
            device=device,
            first_gpu=None if device == "cpu" else 0,
            memory_fraction=None if device == "cpu" else 0.2,
        )
        for routers in STD
    ]
    rows = []
    with Servers(launches, token, folder / "servers") as servers:
        servers.start()
        urls = dict(zip(STD, servers.urls, strict=True))
        for number, case in enumerate(CASES):
            batch = sampled(urls[case.routers], token, of, case, sizes["prompts"], sizes["new_tokens"])
            actor = Actor(f"{family}_{number}", group, Packing(max_tokens=512))
            actor.load(str(trained[case.routers]), LoadSettings(case.dtype, router_replay=True))
            rows.append(row_of(family, case, actor, batch))
    return rows


if __name__ == "__main__":
    raise SystemExit(run(work, arguments(__doc__)))
