"""One optimizer step of a model with experts under every way of laying these out: the same loss and gradient."""

from __future__ import annotations

from typing import Any

import pytest
from parity_cases import all_steps
from spawn import run_ranks

from megarl.data.tiny import write_tiny_model
from megarl.mcore.setup import Layout
from megarl.sample import merge_stats

pytestmark = [pytest.mark.slow, pytest.mark.dist]

TOLERANCE = 2e-6  # relative to the largest entry of a tensor: some twenty roundings of float32
SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "moe_intermediate_size": 24}
ON_TWO = {
    "ep2": Layout(ep=2),
    "pp2": Layout(pp=2),
    "tp2+sp": Layout(tp=2, sequence_parallel=True),
    "tp2+sp ep2 etp1": Layout(tp=2, sequence_parallel=True, ep=2, etp=1),
}
ON_FOUR = {
    "pp2 ep2": Layout(pp=2, ep=2),
    "ep2 etp2": Layout(ep=2, etp=2),
    "tp2+sp ep2": Layout(tp=2, sequence_parallel=True, ep=2),
    "ep2 dp2": Layout(ep=2),
}
AFTER_STEP = {"ep2": Layout(ep=2), "ep2 sharded": Layout(ep=2, use_distributed_optimizer=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("experts")
    write_tiny_model(where, family="qwen3_moe", seed=1, **SHAPE)
    return str(where)


@pytest.fixture(scope="module")
def steps(folder: str) -> dict[str, list[dict[str, Any]]]:
    """case -> what each rank returned."""
    found: dict[str, list[dict[str, Any]]] = {}
    for size, layouts in ((1, {"one": Layout()}), (2, ON_TWO), (4, ON_FOUR)):
        cases: list[Any] = [(name, "actor", layout, 24, None) for name, layout in layouts.items()]
        if size < 4:
            after = {"one": Layout()} if size == 1 else AFTER_STEP
            cases += [(f"after {name}", "actor", layout, 24, "adamw") for name, layout in after.items()]
        ranks = run_ranks(size, all_steps, folder, cases, timeout_s=240)
        found |= {case: [rank[case] for rank in ranks] for case in ranks[0]}
    return found


@pytest.mark.parametrize("layout", [*ON_TWO, *ON_FOUR])
def test_gradient_does_not_depend_on_where_experts_are(steps: dict, layout: str) -> None:
    want, got = steps["one"][0]["tensors"], steps[layout][0]["tensors"]
    assert sorted(got) == sorted(want)
    scale = max(t.abs().max().item() for t in want.values())
    assert scale > 1e-3
    assert sum(bool(t.any()) for n, t in want.items() if ".experts." in n) == 2 * 4 * 3, "every expert learns"
    for name, gradient in want.items():
        error = (got[name] - gradient).abs().max().item() / max(gradient.abs().max().item(), 1e-2 * scale)
        assert error < 10 * TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("layout", [*ON_TWO, *ON_FOUR])
def test_loss_and_statistics_do_not_depend_on_where_experts_are(steps: dict, layout: str) -> None:
    want, got = steps["one"][0]["stats"], merge_stats([rank["stats"] for rank in steps[layout]])
    assert sorted(got) == sorted(want)
    for name, stat in want.items():
        assert got[name].result() == pytest.approx(stat.result(), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("layout", AFTER_STEP)
def test_weights_after_a_clipped_step_do_not_depend_on_where_experts_are(steps: dict, layout: str) -> None:
    want, got = steps["after one"][0], steps[f"after {layout}"][0]
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    for name, weights in want["tensors"].items():
        error = (got["tensors"][name] - weights).abs().max().item() / weights.abs().max().item()
        assert error < TOLERANCE, f"{name}: relative error {error:.1e}"
