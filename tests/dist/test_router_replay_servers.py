"""Routing replay from real servers: log-probs of server and trainer agree only if the experts of tokens are replayed.

The routers of the server's model and of the trainer's differ by far less than a log-prob notices, but their experts
nearly tie, so that they choose others for most tokens: as on GPUs, whose kernels round differently.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chosen_experts import ROUNDING, Reference, worse_by
from parity_compare import assert_same_gradient
from replay_cases import TEMPERATURE, Replayed, run_replayed, whole_column
from safetensors.torch import load_file, save_file
from spawn import Ranks, run_ranks
from tiny_models import read_config
from tiny_server import CURRENT, TOKEN, sglang_of

from megarl.arch.hf_config import read_hf_config
from megarl.arch.layout import Layout
from megarl.arch.model_types import SPARSE_LATENT
from megarl.arch.routed_experts import INDEXED_KEYS, ROUTED_EXPERTS, IndexedKeys, RoutedExperts
from megarl.data.batch import make_batch
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.mcore.models.execution import ExecutionOptions
from megarl.rollout.continuation import generate_completion
from megarl.rollout.engine_columns import EngineKeys, EngineRoutes
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.rollout.wire_columns import EngineColumn
from megarl.samples.sample import Completion, Prompt, Sample
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers

pytestmark = [pytest.mark.full, pytest.mark.dist]

ENGINES = (pytest.param("hf", id="hf"), pytest.param("sglang", marks=pytest.mark.sglang, id="sglang"))
PROMPTS = [[10 + i, 20, 30 + i, 7] for i in range(6)]
NEARLY = 3e-6  # of a router's weights: scores of experts differ by some 5e-5
LIMIT_S = 400.0
SP = Layout(tp=2, sequence_parallel=True, ep=2, etp=1)


@dataclass(frozen=True)
class Served:
    url: str
    of: RoutedExperts
    own: Path  # the model that it serves
    trained: Path  # the same but for the routers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The trainer's model, and the server's with other routers."""
    root = tmp_path_factory.mktemp("models")
    made = []
    for number, name in enumerate(("trained", "served")):
        folder = write_tiny_model(root / name, family="qwen3_moe", tied=False)
        file = folder / "model.safetensors"
        weights, g = load_file(file), torch.Generator().manual_seed(0)
        for key in sorted(weights):
            if ".experts." in key:  # else they would add little to the hidden states
                weights[key] = torch.randn(weights[key].shape, generator=g) * 0.2
        g = torch.Generator().manual_seed(1 + number)
        for key in sorted(key for key in weights if key.endswith(".gate.weight")):
            weights[key] = torch.randn(weights[key].shape, generator=g) * NEARLY
        save_file(weights, file, {"format": "pt"})
        made.append(folder)
    return made[0], made[1]


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    trained, own = folders
    of = RoutedExperts.of(read_config(own))
    assert of is not None
    launch = EngineLaunch(
        request.param,
        str(own),
        max_running_requests=16,
        max_total_tokens=8192,
        random_seed=7,
        returns_routes=True,
        python=sglang_of(CURRENT) if request.param == "sglang" else None,
        device="cpu",
    )
    with Servers([launch], TOKEN, tmp_path_factory.mktemp("logs")) as servers:
        servers.start()
        yield Served(servers.urls[0], of, own, trained)


def assert_chosen(folder: Path, found: Sequence[Completion], prompts: Sequence[list[int]]) -> None:
    """Each token has the experts with the best scores in one pass of transformers over its whole sequence."""
    reference = Reference(folder)
    for prompt, completion in zip(prompts, found, strict=True):
        scores, _, _ = reference.read([*prompt, *completion.token_ids][:-1])
        assert completion.columns[ROUTED_EXPERTS].dtype == np.uint8
        assert worse_by(scores, completion).max() < ROUNDING
        assert (scores.amax(-1) - scores.amin(-1)).median() > 40 * ROUNDING, "the best are not only a rounding away"


def completions(
    url: str, columns: tuple[EngineColumn, ...], num_tokens: int, piece_tokens: int, *, twice: bool = False
) -> list[Completion]:
    """Of each prompt one; `twice`: the second time, when the prompts are in the prefix cache."""
    params = SamplingParams(TEMPERATURE, max_new_tokens=num_tokens, sampling_seed=3, ignore_eos=True)
    settings = GenerationSettings(timeout_s=LIMIT_S, piece_tokens=piece_tokens, columns=columns)

    async def all_of_them() -> list[Completion]:
        async with EnginePool([url], TOKEN, settings) as pool:
            for _ in range(1 + twice):
                tasks = [generate_completion(pool, prompt, params) for prompt in PROMPTS]
                found = await asyncio.gather(*tasks)
            return found

    return asyncio.run(all_of_them())


def test_replay_brings_the_log_probs_of_server_and_trainer_together(served: Served, one_rank: Ranks) -> None:
    found = completions(served.url, (EngineRoutes(served.of),), 20, piece_tokens=7)
    groups = [[Sample.of(Prompt(f"0-{i}", PROMPTS[i], ""), found[i], 0.0)] for i in range(len(PROMPTS))]
    batch = make_batch(groups)
    batch = batch.with_columns(weight=batch.columns["response_mask"] / batch.columns["response_mask"].sum())
    cases = {"given": Replayed(), "free": Replayed(given=False)}
    answers = one_rank.run(run_replayed, str(served.trained), cases, batch, timeout_s=LIMIT_S)
    gaps, mask = {}, batch.columns["response_mask"] > 0
    for name in cases:
        log_probs = whole_column([answer[name] for answer in answers], "log_probs", batch)
        gaps[name] = (log_probs - batch.columns["rollout_log_probs"])[mask].abs()
    assert gaps["given"].max() <= 1e-4
    assert gaps["free"].max() > 0.1
    assert gaps["free"].mean() > 0.01
    routers = {n: t for n, t in answers[0]["given"]["gradient"].items() if n.endswith(".gate.weight")}
    assert len(routers) == len(served.of.layers)
    assert all(gradient.abs().max() > 1e-5 for gradient in routers.values()), "routers learn"


@pytest.mark.parametrize("piece_tokens", [0, 5])
def test_every_token_has_the_experts_that_the_servers_model_chooses(served: Served, piece_tokens: int) -> None:
    """In one request and in pieces, with the prompt in the prefix cache."""
    found = completions(served.url, (EngineRoutes(served.of),), 12, piece_tokens, twice=True)
    assert_chosen(served.own, found, PROMPTS)


@pytest.mark.megatron_0_19
@pytest.mark.parametrize("family", SPARSE_LATENT)
def test_replay_of_keys_makes_up_for_other_indexers(family: str, tmp_path: Path) -> None:
    """The trainer's indexers would choose other keys than the server's, under every layout."""
    shape = TinySizes(layers=4, max_positions=2**17)  # more than uint16 counts, which torch cannot unpickle
    sizes: dict[str, Any] = {"index_topk": 6, "initializer_range": 0.1}
    own, trained = (
        write_tiny_model(tmp_path / name, shape, family=family, tied=False, **sizes) for name in ("served", "trained")
    )
    for seed, folder in enumerate((own, trained)):
        file, g = folder / "model.safetensors", torch.Generator().manual_seed(seed)
        weights = load_file(file)
        weights["model.embed_tokens.weight"][0] = 0.1  # a token whose embedding is 0 finds no key better than another
        for key in sorted(key for key in weights if ".indexer." in key and "norm" not in key):
            weights[key] = torch.randn(weights[key].shape, generator=g)
        save_file(weights, file, {"format": "pt"})
    hf = read_hf_config(own)
    experts, keys = RoutedExperts.of(hf), IndexedKeys.of(hf)
    assert experts is not None and keys is not None
    launch = EngineLaunch("hf", str(own), random_seed=7, returns_routes=True, device="cpu")
    with Servers([launch], TOKEN, tmp_path / "logs") as servers:
        servers.start()
        columns = (EngineRoutes(experts), EngineKeys(keys))
        found = completions(servers.urls[0], columns, 20, piece_tokens=7)
    batch = make_batch([[Sample.of(Prompt(f"0-{i}", PROMPTS[i], ""), found[i], 0.0)] for i in range(len(PROMPTS))])
    batch = batch.with_columns(weight=batch.columns["response_mask"] / batch.columns["response_mask"].sum())
    again = ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    tables = [
        (1, {"one": Replayed(), "again": Replayed(engine=again)}, batch),
        (1, {"free": Replayed()}, batch.keep_columns(*(name for name in batch.columns if name != INDEXED_KEYS))),
        (2, {"tp2+sp": Replayed(SP), "cp2": Replayed(Layout(cp=2), again), "pp2": Replayed(Layout(pp=2))}, batch),
    ]
    mask = batch.columns["response_mask"] > 0
    gaps, gradients = {}, {}
    for size, cases, given in tables:
        ranks = run_ranks(size, run_replayed, str(trained), cases, given, timeout_s=LIMIT_S)
        for name in cases:
            log_probs = whole_column([rank[name] for rank in ranks], "log_probs", batch)
            gaps[name] = (log_probs - batch.columns["rollout_log_probs"])[mask].abs().max()
            whole = ranks[0][name]["gradient"].items()
            gradients[name] = {n: t for n, t in whole if ".indexer." not in n and not n.endswith("_bias")}
    assert gaps.pop("free") > 0.1
    assert max(gaps.values()) < 1e-4, gaps
    for name in gaps:
        assert_same_gradient(gradients[name], gradients["one"])
