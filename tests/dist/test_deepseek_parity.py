"""One optimizer step of DeepSeek-V3 under every way of laying it out: the same loss and gradient, and a frozen bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import all_steps
from safetensors.torch import load_file
from spawn import run_ranks
from tiny_models import write_model

from megarl.mcore.setup import Layout
from megarl.sample import merge_stats

pytestmark = [pytest.mark.slow, pytest.mark.dist]

TOLERANCE = 2e-5  # relative to the largest entry of a tensor, as where the experts of other families are laid out
BIAS = "e_score_correction_bias"
SP = {"tp": 2, "sequence_parallel": True}
# With queries from latents, groups of experts and YaRN; and without any of them.
LAYOUTS: dict[str, dict[int, dict[str, Layout]]] = {
    "deepseek_v3": {
        1: {"one": Layout()},
        2: {"tp2+sp": Layout(**SP), "pp2": Layout(pp=2), "cp2": Layout(cp=2), "ep2": Layout(ep=2)},
        4: {
            "tp2+sp ep4 etp1": Layout(**SP, ep=4, etp=1),
            "tp2+sp pp2": Layout(**SP, pp=2),
            "tp2+sp cp2 ep2": Layout(**SP, cp=2, ep=2),
        },
    },
    "deepseek_v3_plain": {1: {"one": Layout()}, 2: {"tp2+sp": Layout(**SP), "cp2": Layout(cp=2)}},
}
AFTER_STEP = {1: Layout(), 2: Layout(**SP, ep=2, etp=1, use_distributed_optimizer=True)}
CASES = [(family, name) for family, sizes in LAYOUTS.items() for size in sizes if size > 1 for name in sizes[size]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepseek")
    for family in LAYOUTS:
        write_model(root / family, family, tied=False)
    return root


@pytest.fixture(scope="module")
def steps(root: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(family, layout) -> what each rank returned."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for family, sizes in LAYOUTS.items():
        for size, layouts in sizes.items():
            cases: list[Any] = [(name, "actor", layout, 24, None) for name, layout in layouts.items()]
            if size in AFTER_STEP and family == "deepseek_v3":
                cases.append((f"after {size}", "actor", AFTER_STEP[size], 24, "adamw"))
            ranks = run_ranks(size, all_steps, str(root / family), cases, timeout_s=300)
            found |= {(family, case): [rank[case] for rank in ranks] for case in ranks[0]}
    return found


def relative(got: torch.Tensor, want: torch.Tensor, scale: float = 0.0) -> float:
    return (got - want).abs().max().item() / max(want.abs().max().item(), scale)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_gradient_and_loss_do_not_depend_on_the_layout(steps: dict, family: str, layout: str) -> None:
    one, other = steps[family, "one"], steps[family, layout]
    want, got = ({n: t for n, t in case[0]["tensors"].items() if not n.endswith(BIAS)} for case in (one, other))
    assert sorted(got) == sorted(want)
    scale = max(t.abs().max().item() for t in want.values())
    assert all(bool(t.any()) for n, t in want.items() if ".self_attn." in n or "shared_experts" in n)
    errors = {name: relative(got[name], t, 1e-2 * scale) for name, t in want.items()}
    assert max(errors.values()) < TOLERANCE, {n: e for n, e in errors.items() if e >= TOLERANCE}
    whole, parts = (merge_stats([rank["stats"] for rank in case]) for case in (one, other))
    assert sorted(parts) == sorted(whole)
    for name, stat in whole.items():
        assert parts[name].result() == pytest.approx(stat.result(), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("size", AFTER_STEP)
def test_a_step_moves_weights_and_leaves_the_routers_biases(steps: dict, root: Path, size: int) -> None:
    before = load_file(root / "deepseek_v3" / "model.safetensors")
    one, after = (steps["deepseek_v3", f"after {n}"][0]["tensors"] for n in (1, size))
    biases = [name for name in before if name.endswith(BIAS)]
    assert len(biases) == 3
    assert all(bool(before[name].any()) and torch.equal(after[name], before[name]) for name in biases)
    assert not [name for name in before if ".self_attn." in name and torch.equal(after[name], before[name])]
    assert max(relative(after[name], t) for name, t in one.items()) < TOLERANCE
