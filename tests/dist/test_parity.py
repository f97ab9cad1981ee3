"""One optimizer step under every layout and every cut into micro-batches: the same loss, columns and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_cases import all_steps, make_step
from spawn import run_ranks

from megarl.data.tiny import write_tiny_model
from megarl.mcore.logprobs import NAMES
from megarl.mcore.setup import Layout
from megarl.sample import merge_stats

pytestmark = pytest.mark.dist

# Float32 sums in another order: relative to the largest entry of a tensor, 2e-6 is some twenty roundings.
TOLERANCE = 2e-6
SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
ON_TWO = {
    "tp2": Layout(tp=2),
    "tp2+sp": Layout(tp=2, sequence_parallel=True),
    "pp2": Layout(pp=2),
    "dp2": Layout(),
    "cp2": Layout(cp=2),
}
ON_FOUR = {
    "tp2pp2": Layout(tp=2, pp=2),
    "tp2dp2": Layout(tp=2),
    "pp2dp2": Layout(pp=2),
    "tp2cp2+sp": Layout(tp=2, cp=2, sequence_parallel=True),
}
CUTS = {"whole": 4096, "cut": 24}
WITH_REFERENCE = "actor with reference"
RUNS = [(role, cut) for role in ("actor", "critic") for cut in CUTS] + [(WITH_REFERENCE, "cut")]


def cases(layouts: dict[str, Layout], runs: list[tuple[str, str]]) -> list[tuple[str, str, Layout, int, str | None]]:
    return [
        (f"{role}/{name}/{cut}", role, layout, CUTS[cut], None)
        for role, cut in runs
        for name, layout in layouts.items()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("model")
    write_tiny_model(where, seed=1, **SHAPE)
    return str(where)


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, Any]:
    runs = [(role, "whole") for role in dict(RUNS)]
    return run_ranks(1, all_steps, folder, cases({"one": Layout()}, runs), timeout_s=120)[0]


@pytest.fixture(scope="module")
def on_ranks(folder: str) -> dict[str, list[dict[str, Any]]]:
    """case -> what each rank returned."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for size, layouts in ((2, ON_TWO), (4, ON_FOUR)):
        ranks = run_ranks(size, all_steps, folder, cases(layouts, RUNS), timeout_s=240)
        by_case |= {case: [rank[case] for rank in ranks] for case in ranks[0]}
    return by_case


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    error = (got - want).abs().max().item() / max(want.abs().max().item(), 1e-8)
    assert error < TOLERANCE, f"{what}: relative error {error:.1e}"


@pytest.mark.parametrize("layout", [*ON_TWO, *ON_FOUR])
@pytest.mark.parametrize(("role", "cut"), RUNS)
def test_gradient_does_not_depend_on_the_layout(alone: dict, on_ranks: dict, role: str, layout: str, cut: str) -> None:
    want = alone[f"{role}/one/whole"]["tensors"]
    got = on_ranks[f"{role}/{layout}/{cut}"][0]["tensors"]
    assert sorted(got) == sorted(want)
    assert max(t.abs().max() for t in want.values()) > 1e-3
    scale = max(t.abs().max().item() for t in want.values())
    for name, gradient in want.items():
        error = (got[name] - gradient).abs().max().item() / max(gradient.abs().max().item(), 1e-2 * scale)
        assert error < 10 * TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("layout", [*ON_TWO, *ON_FOUR])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_loss_and_statistics_do_not_depend_on_the_layout(
    alone: dict, on_ranks: dict, role: str, layout: str, cut: str
) -> None:
    want = alone[f"{role}/one/whole"]["stats"]
    got = merge_stats([rank["stats"] for rank in on_ranks[f"{role}/{layout}/{cut}"]])
    assert sorted(got) == sorted(want)
    for name, stat in want.items():
        assert got[name].result() == pytest.approx(stat.result(), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", [*ON_TWO, *ON_FOUR])
def test_columns_do_not_depend_on_the_layout(alone: dict, on_ranks: dict, layout: str, name: str) -> None:
    reference = alone[f"{WITH_REFERENCE}/one/whole"]
    batch = make_step(vocab_size=4)
    whole = dict(zip(reference["indices"], reference["columns"][name].split(
        batch.lengths[reference["indices"]].tolist()), strict=True))  # fmt: skip
    seen = 0
    for rank in on_ranks[f"{WITH_REFERENCE}/{layout}/cut"]:
        if not rank["columns"]:
            continue
        lengths = batch.lengths[rank["indices"]].tolist()
        for index, column in zip(rank["indices"], rank["columns"][name].split(lengths), strict=True):
            error = (column - whole[index]).abs().max().item()
            assert error < TOLERANCE * max(1.0, whole[index].abs().max().item()), f"sequence {index}: {error:.1e}"
            assert column[0] == 0, "nothing predicts a first token"
            seen += 1
    assert seen == batch.num_sequences


def test_the_cut_makes_several_micro_batches(on_ranks: dict) -> None:
    assert on_ranks["actor/tp2/cut"][0]["num_micros"] > 2
    assert on_ranks["actor/tp2/whole"][0]["num_micros"] == 1


AFTER_STEP = {
    "sgd": {"tp2": Layout(tp=2), "pp2": Layout(pp=2), "dp2": Layout()},
    # Megatron shards Adam only.  With eps=1 the update is smooth in the gradient: no noise is divided by noise.
    "adamw": {"dp2": Layout(), "dp2 sharded": Layout(use_distributed_optimizer=True)},
}


@pytest.fixture(scope="module")
def after_step(folder: str) -> dict[str, dict[str, Any]]:
    alone = [(f"{optim}/one", "actor", Layout(), 24, optim) for optim in AFTER_STEP]
    pairs = [
        (f"{optim}/{name}", "actor", layout, 24, optim)
        for optim, layouts in AFTER_STEP.items()
        for name, layout in layouts.items()
    ]
    return {
        k: v
        for n, cases in ((1, alone), (2, pairs))
        for k, v in run_ranks(n, all_steps, folder, cases, timeout_s=120)[0].items()
    }


@pytest.mark.parametrize(("optim", "layout"), [(o, name) for o, layouts in AFTER_STEP.items() for name in layouts])
def test_weights_after_a_clipped_step_do_not_depend_on_the_layout(after_step: dict, optim: str, layout: str) -> None:
    want, got = after_step[f"{optim}/one"], after_step[f"{optim}/{layout}"]
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    for name, weights in want["tensors"].items():
        assert_close(got["tensors"][name], weights, name)
