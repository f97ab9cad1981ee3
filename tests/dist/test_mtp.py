"""MTP layers: equal to those of transformers, trained alike under every split, and apart from the policy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mtp_cases import given_routers, hidden_states, of_transformers, resumed, round_trip
from parity_cases import Case, Found, Table
from parity_compare import (
    GRADIENT_TOLERANCE,
    assert_same_after,
    assert_same_bits,
    assert_same_gradient,
    assert_same_stats,
)
from safetensors.torch import load_file
from spawn import Ranks
from tiny_models import write_with_mtp

from megarl.arch.layout import Layout
from megarl.mcore.models.execution import ExecutionOptions

pytestmark = [pytest.mark.dist, pytest.mark.full, pytest.mark.megatron_0_19]

FAMILIES = {"deepseek_v3": 2, "glm4_moe": 1, "qwen3_next": 1, "qwen3_5_text": 1, "qwen3_5_moe_text": 1}
MODELS = ("deepseek_v3", "qwen3_5_text", "tied")  # tied: qwen3_5_text with tied embedding and output rows
RECOMPUTES = ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
OVERLAPS = ExecutionOptions(overlap_grad_reduce=True)
HOW = ("off", "detached", "joint")
LAYOUTS = {
    "dp2 sharded": Layout(use_distributed_optimizer=True),
    "tp2": Layout(tp=2),
    "tp2+sp": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "pp2 overlap": Layout(pp=2),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "ep2": Layout(ep=2),
}
# model, what becomes of its MTP layers, layout
SPLITS = [
    *(("deepseek_v3", "joint", name) for name in ("dp2 sharded", "tp2+sp", "pp2 vpp2", "cp2", "ep2")),
    *(("deepseek_v3", "detached", name) for name in ("dp2 sharded", "tp2+sp", "pp2", "cp2", "ep2")),
    *(("qwen3_5_text", "joint", name) for name in ("tp2+sp", "pp2", "cp2")),
    *(("qwen3_5_text", "detached", name) for name in ("tp2", "pp2 overlap")),
    *(("tied", "joint", name) for name in ("tp2+sp", "pp2", "pp2 overlap")),
    ("tied", "detached", "pp2 overlap"),
]
# Where the policy with detached layers is compared with one that has none; on one rank in one micro-batch.
APART = [
    *((model, "one") for model in MODELS),
    ("qwen3_5_text", "bf16"),
    *(("deepseek_v3", name) for name in ("tp2+sp", "pp2", "cp2")),
    ("tied", "pp2 overlap"),
]
ONE_MICRO = Case("actor", max_tokens=400, num_steps=2)
MORE = {
    "joint micro": replace(ONE_MICRO, mtp="joint", max_tokens=24),
    "detached recomputed": replace(ONE_MICRO, mtp="detached", engine=RECOMPUTES),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    tied = write_with_mtp(root / "tied", "qwen3_5_text", tied=True)
    return {"tied": str(tied)} | {name: str(write_with_mtp(root / name, name, n)) for name, n in FAMILIES.items()}


@pytest.fixture(scope="module")
def found(folders: dict[str, str]) -> Found:
    """By "model how layout"."""
    alone = {
        f"{model} {name}": replace(case, folder=folders[model])
        for model in MODELS
        for name, case in (MORE | {f"{how} one": replace(ONE_MICRO, mtp=how) for how in HOW}).items()
    }
    alone |= {
        f"qwen3_5_text {how} bf16": replace(ONE_MICRO, mtp=how, dtype="bfloat16", folder=folders["qwen3_5_text"])
        for how in ("off", "detached")
    }
    of_sharded = {f"deepseek_v3 {how} adamw": replace(ONE_MICRO, mtp=how, optim="adamw") for how in HOW}
    split = {
        f"{model} {how} {name}": Case(
            "actor",
            LAYOUTS[name],
            OVERLAPS if "overlap" in name else ExecutionOptions(),
            mtp=how,
            optim="adamw" if "sharded" in name else "sgd",
            num_steps=2,
            folder=folders[model],
        )
        for model, how, name in [*SPLITS, *((model, "off", name) for model, name in APART if name in LAYOUTS)]
    }
    return Found(Table(1, folders["deepseek_v3"], alone | of_sharded), Table(2, folders["deepseek_v3"], split))


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(one_rank: Ranks, folders: dict[str, str], family: str) -> None:
    """In float32; and packed rows equal single ones, so nothing passes their borders."""
    packed, single = one_rank.run(hidden_states, folders[family])[0]
    expected = of_transformers(folders[family])
    known = expected != 0
    assert expected.shape == packed.shape == (1 + FAMILIES[family], *packed.shape[1:]) and expected.std() > 0.5
    for got in (packed, single):
        assert (got - expected)[known].abs().max() < 1e-4


def test_routers_of_mtp_layers_choose_for_themselves(one_rank: Ranks, folders: dict[str, str]) -> None:
    """Megatron numbers MTP layers from 1, as the layers of the model."""
    for family in ("deepseek_v3", "qwen3_5_moe_text"):
        routers = one_rank.run(given_routers, folders[family])[0]
        assert all(name.startswith("decoder.") for name, _ in routers)
        assert [place for _, place in routers] == list(range(len(routers))) != []


@pytest.mark.parametrize(("model", "how", "name"), [*SPLITS, *((m, *name.split()) for m in MODELS for name in MORE)])
def test_gradient_and_steps_do_not_depend_on_the_split(found: Found, model: str, how: str, name: str) -> None:
    """Nor on micro-batches and recomputation.

    A gradient that is off by GRADIENT_TOLERANCE moves the weights by as much of a step, and the norm of the next
    gradient by as much of what a step changes it: of the largest norm, relative to the smallest.
    """
    got, expected = found[f"{model} {how} {name}"], found[f"{model} {how} {'adamw' if 'sharded' in name else 'one'}"]
    if "sharded" not in name:  # whose gradient is in parts
        assert_same_gradient(got[0]["gradient"], expected[0]["gradient"])
    assert_same_stats(got, expected)
    norms = expected[0]["grad_norms"]
    assert_same_after(got[0], expected[0], 1e-5, of_norms=GRADIENT_TOLERANCE * max(norms) / min(norms))
    assert expected[0]["num_micros"] == 1 < found[f"{model} joint micro"][0]["num_micros"]


@pytest.mark.parametrize(("model", "name"), APART)
def test_detached_layers_change_nothing_of_the_policy(found: Found, model: str, name: str) -> None:
    """Gradients, their norm, by which they are clipped, and weights after two steps are the same bits.

    Not with the distributed optimizer: its shards begin elsewhere, so the norm is a sum in another order.
    """
    off, detached, joint = (
        found[f"{model} {how} {where}"][0] for how, where in zip(HOW, (name, name, "one"), strict=True)
    )
    own = off["after"].keys()
    further = joint["after"].keys() - own
    assert further and all(".4." in one or one.startswith("mtp.") or ".5." in one for one in further)
    assert detached["grad_norms"] == off["grad_norms"] != joint["grad_norms"]
    assert max(off["grad_norms"]) > 1, "the gradient is clipped"
    for kind in ("gradient", "after"):
        assert_same_bits({one: part for one, part in detached[kind].items() if one in own}, off[kind])
    learnt = [one for one in further if "experts" not in one and "bias" not in one]
    assert all(detached["gradient"][one].any() for one in learnt)


@pytest.mark.parametrize("layout", ["one", "tp2+sp", "pp2", "ep2"])
def test_folders_come_out_as_they_went_in(
    folders: dict[str, str], one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    ranks: Any = one_rank if layout == "one" else two_ranks
    for family in ("deepseek_v3", *({"one": ["qwen3_next"], "ep2": []}.get(layout, ["tied"]))):
        counted = ranks.run(round_trip, folders[family], str(tmp_path / family), LAYOUTS.get(layout, Layout()))
        assert all(held == planned for held, planned in counted)
        source, saved = (load_file(Path(f) / "model.safetensors") for f in (folders[family], tmp_path / family))
        assert_same_bits(saved, source)


def test_a_run_goes_on_only_with_the_layers_that_it_has_trained(
    one_rank: Ranks, folders: dict[str, str], tmp_path: Path
) -> None:
    def said(saved: str, loaded: str) -> str:
        return one_rank.run(resumed, folders["glm4_moe"], str(tmp_path / f"{saved} {loaded}"), saved, loaded)[0]

    assert said("detached", "joint") == ""
    assert "it has trained MTP layers, which mtp=off would lose; expected detached or joint" in said("joint", "off")
    assert "it has no mtp.layers.0" in said("off", "joint")
