"""Routing replay under every layout: given experts are those of the tokens, and routers learn as by the definition.

The experts are random, so that no router would choose them: a token that got those of another one would show.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_compare import TOLERANCE, assert_same_gradient
from replay_cases import Replayed, make_batch, run_replayed, whole_column
from replay_reference import reference_step
from spawn import Ranks
from tiny_models import read_config, write_model
from torch import Tensor

from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions
from megarl.routed_experts import ROUTED_EXPERTS
from megarl.sample import Batch

pytestmark = [pytest.mark.slow, pytest.mark.dist]

FAMILIES = ("qwen3_moe", "qwen3_moe_plain", "mixtral", "deepseek_v3")
# The last stage of four layers has experts in both, and in Qwen3-MoE one stage has a layer without.
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"one": Layout()},
    2: {
        "dp2": Layout(),
        "tp2+sp": Layout(**SP),
        "ep2": Layout(ep=2),
        "pp2": Layout(pp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "cp2": Layout(cp=2),
    },
    4: {"tp2+sp cp2 ep2": Layout(**SP, cp=2, ep=2), "tp2+sp pp2 vpp2": Layout(**SP, pp=2, vpp=2)},
}
RECOMPUTED = {
    "uniform": ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "block": ExecutionOptions(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
}
# Every layout for one family; the others, whose routers compute otherwise, on one rank and with all that cuts tokens.
NAMES = [(FAMILIES[0], name) for layouts in LAYOUTS.values() for name in layouts]
NAMES += [(family, name) for family in FAMILIES[1:] for name in ("one", "tp2+sp", "pp2 vpp2", "cp2")]
AGAIN = [(name, how) for name in ("one", "pp2", "pp2 vpp2", "tp2+sp", "cp2") for how in RECOMPUTED]
Ranked = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("replay")
    return {family: write_model(root / family, family, tied=False, seed=1) for family in FAMILIES}


@pytest.fixture(scope="module")
def batches(folders: dict[str, Path]) -> dict[str, Batch]:
    return {family: make_batch(read_config(folder)) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path], batches: dict[str, Batch]) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    return {family: reference_step(str(folder), batches[family]) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> dict[tuple[str, ...], Ranked]:
    """(family, layout) with given experts; (family, layout, how) computed again; (family, layout, "free")."""
    out: dict[tuple[str, ...], Ranked] = {}
    for size, layouts in LAYOUTS.items():
        with Ranks(size) as ranks:
            for family in FAMILIES:
                cases = _cases(family, layouts)
                answers = ranks.run(run_replayed, str(folders[family]), cases, timeout_s=600) if cases else []
                out |= {case: [answer[case] for answer in answers] for case in cases}
    return out


def _cases(family: str, layouts: dict[str, Layout]) -> dict[tuple[str, ...], Replayed]:
    """Those of a family in these layouts."""
    cases = {(each, name): Replayed(layouts[name]) for each, name in NAMES if each == family and name in layouts}
    if family == FAMILIES[0]:
        cases |= {(family, n, how): Replayed(layouts[n], RECOMPUTED[how]) for n, how in AGAIN if n in layouts}
        cases |= {(family, name, "free"): Replayed(layout, given=False) for name, layout in layouts.items()}
    return cases


def trained(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the biases of DeepSeek's routers, which have no gradient: exported in its place is the bias itself."""
    return {name: tensor for name, tensor in gradient.items() if not name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize(("family", "layout"), NAMES)
def test_log_probs_with_given_experts_are_those_of_the_definition(
    found: dict, batches: dict, references: dict, family: str, layout: str
) -> None:
    log_probs = whole_column(found[family, layout], "log_probs", batches[family])
    assert (log_probs - references[family][0]).abs().max() < 1e-4


@pytest.mark.parametrize(("family", "layout"), NAMES)
def test_the_gradient_with_given_experts_is_that_of_the_definition(
    found: dict, references: dict, family: str, layout: str
) -> None:
    expected = trained(references[family][1])
    routers = [tensor for name, tensor in expected.items() if name.endswith("gate.weight")]
    assert len(routers) == (4 if family in ("qwen3_moe_plain", "mixtral") else 3)
    assert all(tensor.abs().max() > 1e-4 for tensor in routers), "routers learn"
    assert_same_gradient(trained(found[family, layout][0]["gradient"]), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layout_changes_the_gradient(found: dict, family: str) -> None:
    expected = trained(found[family, "one"][0]["gradient"])
    for name in (name for each, name in NAMES if each == family):
        assert_same_gradient(trained(found[family, name][0]["gradient"]), expected)


@pytest.mark.parametrize(("layout", "how"), AGAIN)
def test_layers_computed_again_get_the_same_experts(found: dict, layout: str, how: str) -> None:
    """Several micro-batches are under way in each stage when the first of them is computed again."""
    family = FAMILIES[0]
    assert_same_gradient(found[family, layout, how][0]["gradient"], found[family, "one"][0]["gradient"])


def test_routers_alone_would_choose_others(found: dict, batches: dict) -> None:
    """The negative control."""
    family = FAMILIES[0]
    both = (found[family, "one"], found[family, "one", "free"])
    given, free = (whole_column(ranks, "log_probs", batches[family]) for ranks in both)
    assert (given - free).abs().max() > 0.1


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_every_layout_notes_the_same_experts(found: dict, batches: dict, layout: str) -> None:
    batch = batches[FAMILIES[0]]
    one, other = (whole_column(found[FAMILIES[0], name, "free"], ROUTED_EXPERTS, batch) for name in ("one", layout))
    assert (other.dtype, other.shape) == (torch.uint8, (batch.num_tokens, 3, 2))
    assert not other[batch.row_starts].any(), "nothing predicts a row's first token"
    assert torch.equal(other, one)
    assert one.long().sum() > 0


def test_noted_experts_give_the_same_log_probs_when_they_are_given(
    found: dict, folders: dict[str, Path], batches: dict
) -> None:
    family = FAMILIES[0]
    batch, free = batches[family], found[family, "one", "free"]
    noted = batch.with_columns(**{ROUTED_EXPERTS: whole_column(free, ROUTED_EXPERTS, batch)})
    with Ranks(1) as ranks:
        again = ranks.run(run_replayed, str(folders[family]), {"again": Replayed()}, noted, timeout_s=200)
    log_probs = whole_column([rank["again"] for rank in again], "log_probs", batch)
    expected = whole_column(free, "log_probs", batch)
    assert (log_probs - expected).abs().max() <= TOLERANCE * expected.abs().max()
