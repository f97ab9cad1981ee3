"""Routing replay under every layout: given experts are those of the tokens, and routers learn as by the definition.

The experts are random, so that no router would choose them: a token that got those of another one would show.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_compare import TOLERANCE, assert_same_gradient
from replay_cases import Replayed, make_batch, run_replayed, whole_column
from replay_reference import reference_step
from spawn import Ranks, run_ranks
from tiny_models import read_config, write_model
from torch import Tensor

from megarl.batch import Batch
from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions
from megarl.routed_experts import ROUTED_EXPERTS

pytestmark = [pytest.mark.slow, pytest.mark.dist]

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
MANY = "more experts than a byte can tell"
SIZES: dict[str, tuple[str, dict[str, int]]] = {MANY: ("qwen3_moe", {"num_experts": 264, "moe_intermediate_size": 8})}
# Every layout for one family; the others, whose routers compute otherwise, on one rank, with what cuts tokens, and with
# experts on several ranks.
CUT = ("one", "tp2+sp", "pp2 vpp2", "cp2")
OF_FAMILY: dict[str, tuple[str, ...]] = {
    "qwen3_moe": tuple(name for layouts in LAYOUTS.values() for name in layouts),
    "qwen3_moe_plain": CUT,
    **dict.fromkeys(("mixtral", "deepseek_v3"), (*CUT, "ep2")),
    "glm4_moe": ("one", "tp2+sp"),
    "minimax_m2": ("one", "tp2+sp"),
    "gpt_oss": ("one", "ep2", "cp2"),
    MANY: ("one", "tp2+sp", "cp2"),
}
FAMILIES = tuple(OF_FAMILY)
LONG = ("qwen3_moe_plain", "mixtral", "glm4_moe", "minimax_m2")
EVERYWHERE = ("qwen3_moe_plain", "mixtral", "minimax_m2", "gpt_oss")  # experts in all layers
NAMES = [(family, name) for family, names in OF_FAMILY.items() for name in names]


def marked(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    """Those of some families are long."""
    return [pytest.param(*case, marks=pytest.mark.long if case[0] in LONG else ()) for case in cases]


AGAIN = [
    *((FAMILIES[0], name, how) for name in ("one", "pp2", "pp2 vpp2", "tp2+sp", "cp2") for how in RECOMPUTED),
    ("mixtral", "pp2 vpp2", "uniform"),
    ("deepseek_v3", "ep2", "block"),
]
FREE = [(FAMILIES[0], name) for name in OF_FAMILY[FAMILIES[0]]] + [(MANY, name) for name in OF_FAMILY[MANY]]
WIDE = "one micro-batch"
Ranked = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("replay")
    sizes = {family: SIZES.get(family, (family, {})) for family in FAMILIES}
    return {name: write_model(root / name, of, tied=False, seed=1, **own) for name, (of, own) in sizes.items()}


@pytest.fixture(scope="module")
def batches(folders: dict[str, Path]) -> dict[str, Batch]:
    return {family: make_batch(read_config(folder)) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders: dict[str, Path], batches: dict[str, Batch]) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    return {family: reference_step(str(folder), batches[family]) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def found(folders: dict[str, Path]) -> dict[tuple[str, ...], Ranked]:
    """(family, layout) with given experts; (family, layout, how) computed again; (family, layout, "free").

    And (family, WIDE): in one micro-batch.
    """
    return Answers(folders)


class Answers(dict[tuple[str, ...], Ranked]):
    """Those of a family are computed when the first of them is asked for."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    def __missing__(self, wanted: tuple[str, ...]) -> Ranked:
        family = wanted[0]
        for size, layouts in LAYOUTS.items():
            if cases := _cases(family, layouts):
                answers = run_ranks(size, run_replayed, str(self._folders[family]), cases, timeout_s=600)
                self.update({case: [answer[case] for answer in answers] for case in cases})
        return dict.__getitem__(self, wanted)


def _cases(family: str, layouts: dict[str, Layout]) -> dict[tuple[str, ...], Replayed]:
    """Those of a family in these layouts."""
    cases = {(each, name): Replayed(layouts[name]) for each, name in NAMES if each == family and name in layouts}
    again = [(name, how) for each, name, how in AGAIN if each == family and name in layouts]
    cases |= {(family, name, how): Replayed(layouts[name], RECOMPUTED[how]) for name, how in again}
    free = [name for each, name in FREE if each == family and name in layouts]
    cases |= {(family, name, "free"): Replayed(layouts[name], given=False) for name in free}
    if family == FAMILIES[0] and "one" in layouts:
        cases[family, WIDE] = Replayed(max_tokens=1000)
    return cases


def trained(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the biases that choose experts, which have no gradient: exported in its place is the bias itself."""
    return {name: tensor for name, tensor in gradient.items() if not name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize(("family", "layout"), marked(NAMES))
def test_log_probs_with_given_experts_are_those_of_the_definition(
    found: dict, batches: dict, references: dict, family: str, layout: str
) -> None:
    log_probs = whole_column(found[family, layout], "log_probs", batches[family])
    assert (log_probs - references[family][0]).abs().max() < 1e-4


@pytest.mark.parametrize(("family", "layout"), marked(NAMES))
def test_the_gradient_with_given_experts_is_that_of_the_definition(
    found: dict, references: dict, family: str, layout: str
) -> None:
    expected = trained(references[family][1])
    routers = [tensor for name, tensor in expected.items() if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == (4 if family in EVERYWHERE else 3)
    assert all(tensor.abs().max() > 1e-4 for tensor in routers), "routers learn"
    assert_same_gradient(trained(found[family, layout][0]["gradient"]), expected)


@pytest.mark.parametrize("family", marked([(family,) for family in FAMILIES]))
def test_no_layout_changes_the_gradient(found: dict, family: str) -> None:
    expected = trained(found[family, "one"][0]["gradient"])
    for name in (name for each, name in NAMES if each == family):
        assert_same_gradient(trained(found[family, name][0]["gradient"]), expected)


@pytest.mark.parametrize(("family", "layout", "how"), marked(AGAIN))
def test_layers_computed_again_get_the_same_experts(found: dict, family: str, layout: str, how: str) -> None:
    """Several micro-batches are under way in each stage when the first of them is computed again."""
    one, again = (trained(found[key][0]["gradient"]) for key in ((family, "one"), (family, layout, how)))
    assert_same_gradient(again, one)


def test_the_split_into_micro_batches_changes_nothing(found: dict, batches: dict) -> None:
    family = FAMILIES[0]
    small, wide = found[family, "one"], found[family, WIDE]
    assert_same_gradient(wide[0]["gradient"], small[0]["gradient"])
    log_probs = [whole_column(ranks, "log_probs", batches[family]) for ranks in (small, wide)]
    assert (log_probs[0] - log_probs[1]).abs().max() <= TOLERANCE * log_probs[0].abs().max()


def test_routers_alone_would_choose_others(found: dict, batches: dict) -> None:
    """The negative control."""
    family = FAMILIES[0]
    both = (found[family, "one"], found[family, "one", "free"])
    given, free = (whole_column(ranks, "log_probs", batches[family]) for ranks in both)
    assert (given - free).abs().max() > 0.1


@pytest.mark.parametrize(("family", "layout"), FREE)
def test_every_layout_notes_the_same_experts(found: dict, batches: dict, family: str, layout: str) -> None:
    batch = batches[family]
    one, other = (whole_column(found[family, name, "free"], ROUTED_EXPERTS, batch) for name in ("one", layout))
    dtype = torch.uint16 if family == MANY else torch.uint8
    assert (other.dtype, other.shape) == (dtype, (batch.num_tokens, 3, 2))
    one, other = one.long(), other.long()  # torch has few operations for uint16
    assert not other[batch.row_starts].any(), "nothing predicts a row's first token"
    assert torch.equal(other, one)
    assert (other.max() > 255) == (family == MANY)


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
