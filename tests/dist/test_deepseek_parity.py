"""An optimizer step of DeepSeek-V3 under every way of laying it out: the same loss and gradient, and a frozen bias.

Families with the same experts, and attention of their own, under some of these ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import Case, Found, Table
from parity_compare import GRADIENT_TOLERANCE, assert_same_after, assert_same_gradient, assert_same_stats
from safetensors.torch import load_file
from tiny_models import write_model

from megarl.layout import Layout

pytestmark = [pytest.mark.slow, pytest.mark.dist]

BIAS = "e_score_correction_bias"
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
# With queries from latents, groups of experts and YaRN; and without any of them.
LAYOUTS: dict[str, dict[int, dict[str, Layout]]] = {
    "deepseek_v3": {
        2: {
            "tp2+sp": Layout(**SP),
            "pp2": Layout(pp=2),
            "pp2 uneven": Layout(pp=2, first_stage_layers=3),
            "pp2 vpp2": Layout(pp=2, vpp=2),
            "cp2": Layout(cp=2),
            "ep2": Layout(ep=2),
        },
        4: {
            "tp2+sp ep4 etp1": Layout(**SP, ep=4, etp=1),
            "tp2+sp pp2": Layout(**SP, pp=2),
            "tp2+sp cp2 ep2": Layout(**SP, cp=2, ep=2),
            "pp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2),
        },
    },
    "deepseek_v3_plain": {2: {"tp2+sp": Layout(**SP), "cp2": Layout(cp=2)}},
    "glm4_moe": {2: {"tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1), "cp2": Layout(cp=2)}},
    "minimax_m2": {2: {"tp2+sp": Layout(**SP), "pp2": Layout(pp=2), "cp2 ep2": Layout(cp=2, ep=2)}},
    "gpt_oss": {2: {"tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1), "pp2": Layout(pp=2), "cp2": Layout(cp=2)}},
}
CASES = [(family, name) for family, sizes in LAYOUTS.items() for layouts in sizes.values() for name in layouts]
LONG = ("deepseek_v3_plain", "glm4_moe", "minimax_m2")


def marked(cases: Iterable[tuple[str, ...]]) -> list[Any]:
    """Those of some families are long."""
    return [pytest.param(*case, marks=pytest.mark.long if case[0] in LONG else ()) for case in cases]


SHARDED = Case("actor", Layout(**SP, ep=2, etp=1, use_distributed_optimizer=True), optim="adamw", num_steps=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepseek")
    for family in LAYOUTS:
        write_model(root / family, family, tied=False)
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> Found:
    tables = []
    for family, sizes in LAYOUTS.items():
        folder, alone = str(root / family), {f"{family}/one": Case("actor", num_steps=3)}
        tables.append(Table(1, folder, alone | {f"{family}/adam": Case("actor", optim="adamw", num_steps=3)}))
        for size, layouts in sizes.items():
            cases = {f"{family}/{name}": Case("actor", layout, num_steps=3) for name, layout in layouts.items()}
            cases |= {f"{family}/sharded": SHARDED} if size == 2 else {}
            tables.append(Table(size, folder, cases))
    return Found(*tables)


def trained(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradient without the routers' biases, which have none: exported in its place is the bias itself."""
    return {name: t for name, t in case["gradient"].items() if not name.endswith(BIAS)}


@pytest.mark.parametrize(("family", "layout"), marked(CASES))
def test_gradient_and_loss_do_not_depend_on_the_layout(found: Found, family: str, layout: str) -> None:
    one, other = found[f"{family}/one"], found[f"{family}/{layout}"]
    expected = trained(one[0])
    assert all(bool(t.any()) for n, t in expected.items() if ".self_attn." in n or "shared_experts" in n)
    assert_same_gradient(trained(other[0]), expected)
    assert_same_stats(other, one)


@pytest.mark.parametrize(("family", "layout"), marked(CASES))
def test_weights_after_three_clipped_steps_do_not_depend_on_the_layout(found: Found, family: str, layout: str) -> None:
    assert_same_after(found[f"{family}/{layout}"][0], found[f"{family}/one"][0], GRADIENT_TOLERANCE)


@pytest.mark.parametrize("family", marked((family,) for family in LAYOUTS))
def test_weights_after_three_steps_of_a_sharded_optimizer_do_not_depend_on_the_layout(
    found: Found, family: str
) -> None:
    assert_same_after(found[f"{family}/sharded"][0], found[f"{family}/adam"][0], GRADIENT_TOLERANCE)


@pytest.mark.parametrize("case", ["one", "sharded", "pp2 vpp2"])
def test_steps_move_weights_and_leave_the_routers_biases(found: Found, root: Path, case: str) -> None:
    before, after = load_file(root / "deepseek_v3" / "model.safetensors"), found[f"deepseek_v3/{case}"][0]["after"]
    biases = [name for name in before if name.endswith(BIAS)]
    assert len(biases) == 3
    assert all(bool(before[name].any()) and torch.equal(after[name], before[name]) for name in biases)
    assert not [name for name in before if ".self_attn." in name and torch.equal(after[name], before[name])]
