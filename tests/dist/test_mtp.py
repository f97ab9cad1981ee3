"""MTP layers: equal to those of transformers, trained alike under every split, and apart from the policy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import package_info
from mtp_cases import given_routers, hidden_states, of_transformers, round_trip
from parity_cases import Case, Found, Table
from parity_compare import assert_same_after, assert_same_bits, assert_same_gradient, assert_same_stats
from safetensors.torch import load_file
from spawn import Ranks
from tiny_models import write_with_mtp

from megarl.arch.layout import Layout
from megarl.mcore.models.execution import ExecutionOptions

pytestmark = [
    pytest.mark.dist,
    pytest.mark.full,
    pytest.mark.skipif(package_info.__version__.startswith("0.16"), reason="MTP layers need Megatron-Core 0.19"),
]

FAMILIES = {"deepseek_v3": 2, "glm4_moe": 1, "qwen3_next": 1, "qwen3_5_text": 1, "qwen3_5_moe_text": 1}
SP = Layout(tp=2, sequence_parallel=True)
RECOMPUTES = ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
ONE = {
    "off": Case("actor", max_tokens=400, num_steps=3),
    "detached": Case("actor", mtp="detached", max_tokens=400, num_steps=3),
    "joint": Case("actor", mtp="joint", max_tokens=400, num_steps=3),
    "micro": Case("actor", mtp="joint", num_steps=3),
    "recomputed": Case("actor", mtp="detached", engine=RECOMPUTES, num_steps=3),
    "joint adamw": Case("actor", mtp="joint", max_tokens=400, optim="adamw", num_steps=3),
    "detached adamw": Case("actor", mtp="detached", max_tokens=400, optim="adamw", num_steps=3),
}
TWO = {
    "dp2": Layout(),
    "dp2 sharded": Layout(use_distributed_optimizer=True),
    "tp2+sp": SP,
    "pp2": Layout(pp=2),
    "pp2 vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "ep2": Layout(ep=2),
}


def cases(how: str) -> dict[str, Case]:
    return {
        f"{how} {name}": Case("actor", layout, mtp=how, optim="adamw" if "sharded" in name else "sgd", num_steps=3)
        for name, layout in TWO.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(write_with_mtp(root / name, name, number)) for name, number in FAMILIES.items()}


@pytest.fixture(scope="module")
def found(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    dense = {k: v for k, v in (cases("joint") | cases("detached")).items() if "ep2" not in k}
    tied = str(write_with_mtp(tmp_path_factory.mktemp("tied") / "m", "qwen3_5_text", tied=True))
    of_tied = {name: dense[name] for name in ("joint tp2+sp", "detached cp2")}
    overlaps = ExecutionOptions(overlap_grad_reduce=True)
    dense["detached overlap"] = Case("actor", Layout(pp=2), overlaps, mtp="detached", num_steps=3)
    return {
        "deepseek_v3": Found(
            Table(1, folders["deepseek_v3"], ONE), Table(2, folders["deepseek_v3"], cases("joint") | cases("detached"))
        ),
        "qwen3_5_text": Found(Table(1, folders["qwen3_5_text"], ONE), Table(2, folders["qwen3_5_text"], dense)),
        "tied": Found(Table(1, tied, ONE), Table(2, tied, of_tied)),
    }


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


SPLITS = [
    *(("deepseek_v3", f"{how} {name}") for name in TWO for how in ("joint", "detached")),
    *(("qwen3_5_text", f"{how} {name}") for name in TWO if name != "ep2" for how in ("joint", "detached")),
    *(("tied", name) for name in ("joint tp2+sp", "detached cp2")),
    ("qwen3_5_text", "detached overlap"),
    *((model, name) for model in ("deepseek_v3", "qwen3_5_text", "tied") for name in ("micro", "recomputed")),
]


@pytest.mark.parametrize(("model", "name"), SPLITS)
def test_gradient_and_steps_do_not_depend_on_the_split(found: dict[str, Found], model: str, name: str) -> None:
    """Norms of later steps are of weights that differ by rounding, most in models with gated delta nets: their gradient
    is up to 48 long, and steps of 0.05 along it carry an error of 2e-5 into the norms of the next gradients."""
    got, how = found[model][name], "detached" if name.startswith(("detached", "recomputed")) else "joint"
    expected = found[model][f"{how} adamw" if "sharded" in name else how]
    if "sharded" not in name:  # whose gradient is in parts
        assert_same_gradient(got[0]["gradient"], expected[0]["gradient"])
    assert_same_stats(got, expected)
    assert_same_after(got[0], expected[0], 1e-5, of_norms=1e-5 if model == "deepseek_v3" else 1e-4)


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_5_text", "tied"])
def test_detached_layers_change_nothing_of_the_policy(found: dict[str, Found], model: str) -> None:
    """Gradients, their norm, by which they are clipped, and weights after three steps are the same bits."""
    off, detached, joint = (found[model][name][0] for name in ("off", "detached", "joint"))
    own = off["after"].keys()
    further = joint["after"].keys() - own
    assert further and all(".4." in name or name.startswith("mtp.") or ".5." in name for name in further)
    assert detached["grad_norms"] == off["grad_norms"] != joint["grad_norms"]
    assert max(off["grad_norms"]) > 1, "the gradient is clipped"
    for kind in ("gradient", "after"):
        assert_same_bits({name: detached[kind][name] for name in own}, off[kind])
        assert any(not torch.equal(joint[kind][name], off[kind][name]) for name in own)
    assert all(detached["gradient"][name].any() for name in further if "experts" not in name and "bias" not in name)


@pytest.mark.parametrize("layout", ["one", *TWO])
def test_folders_come_out_as_they_went_in(
    folders: dict[str, str], one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, layout: str
) -> None:
    ranks: Any = one_rank if layout == "one" else two_ranks
    for family in ("deepseek_v3", "qwen3_next"):
        ranks.run(round_trip, folders[family], str(tmp_path / family), TWO.get(layout, Layout()))
        source, saved = (load_file(Path(f) / "model.safetensors") for f in (folders[family], tmp_path / family))
        assert_same_bits(saved, source)
