"""How a layout is computed does not change what is computed: recomputed, overlapped, put away, without a wrapper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Case, all_runs, refusals
from parity_compare import LOOSER
from spawn import Ranks, run_ranks
from tiny_models import tiny_model

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions

pytestmark = pytest.mark.dist
SHAPE = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
SHARDED = Layout(use_distributed_optimizer=True)
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
OVERLAP = ExecutionOptions(overlap_grad_reduce=True)
OVERLAP_BOTH = ExecutionOptions(overlap_grad_reduce=True, overlap_param_gather=True)
FSDP = ExecutionOptions("fsdp")
OFFLOAD = ExecutionOptions(param_offload=True, optimizer_offload=True)

Folders = dict[str, str]
Found = dict[str, list[dict[str, Any]]]  # case -> what each rank returned


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "dense", seed=1, **SHAPE)
    tiny_model("qwen3_moe", tied=True, num_hidden_layers=2).save_pretrained(root / "experts")
    return {name: str(root / name) for name in ("dense", "experts")}


@pytest.fixture(scope="module")
def alone(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Found:
    dense, experts = Case(folders["dense"]), Case(folders["experts"])
    cases = {
        "dense": dense,
        "dense bf16": replace(dense, dtype="bfloat16"),
        "experts": experts,
        "selective": replace(dense, engine=ExecutionOptions(recompute_granularity="selective")),
        "uniform": replace(dense, engine=ExecutionOptions(recompute_method="uniform", **FULL)),
        "block": replace(dense, engine=ExecutionOptions(recompute_method="block", **FULL)),
        "experts uniform": replace(experts, engine=ExecutionOptions(recompute_method="uniform", **FULL)),
        "adapters": replace(dense, with_adapters=True),
        "adapters uniform": replace(
            dense, with_adapters=True, engine=ExecutionOptions(recompute_method="uniform", **FULL)
        ),
        "none": replace(dense, engine=ExecutionOptions("none")),
        "none bf16": replace(dense, dtype="bfloat16", engine=ExecutionOptions("none")),
        "offloaded": replace(dense, engine=OFFLOAD),
        "offloaded bf16": replace(dense, dtype="bfloat16", engine=OFFLOAD),
        "offloaded, late": replace(dense, engine=OFFLOAD, comes_late=True),
        "offloaded bf16, late": replace(dense, dtype="bfloat16", engine=OFFLOAD, comes_late=True),
        "parameters offloaded": replace(dense, engine=ExecutionOptions(param_offload=True)),
        "adapters offloaded": replace(dense, with_adapters=True, engine=OFFLOAD),
        "muon": replace(dense, optim="muon", with_gradients=True),
        "muon experts": replace(experts, optim="muon"),
        "muon none": replace(dense, optim="muon", engine=ExecutionOptions("none")),
    }
    root = str(tmp_path_factory.mktemp("alone"))
    return {name: [run] for name, run in run_ranks(1, all_runs, cases, root, timeout_s=400)[0].items()}


@pytest.fixture(scope="module")
def on_two(folders: Folders, two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Found:
    dense, experts = Case(folders["dense"]), Case(folders["experts"])
    cases = {
        "dp2": dense,
        "dp2 overlap": replace(dense, engine=OVERLAP),
        "dp2 adapters": replace(dense, with_adapters=True),
        "dp2 adapters overlap": replace(dense, with_adapters=True, engine=OVERLAP),
        "dp2 sharded": replace(dense, layout=SHARDED),
        "dp2 sharded overlap": replace(dense, layout=SHARDED, engine=OVERLAP_BOTH),
        "dp2 sharded gather": replace(dense, layout=SHARDED, engine=ExecutionOptions(overlap_param_gather=True)),
        "dp2 sharded overlap bf16": replace(dense, layout=SHARDED, engine=OVERLAP_BOTH, dtype="bfloat16"),
        "dp2 sharded bf16": replace(dense, layout=SHARDED, dtype="bfloat16"),
        "dp2 sharded offloaded": replace(dense, layout=SHARDED, engine=OFFLOAD),
        "dp2 sharded bf16, late": replace(dense, layout=SHARDED, engine=OFFLOAD, dtype="bfloat16", comes_late=True),
        "dp2 sharded overlap offloaded": replace(
            dense, layout=SHARDED, engine=replace(OVERLAP_BOTH, param_offload=True, optimizer_offload=True)
        ),
        "ep2": replace(experts, layout=Layout(ep=2)),
        "ep2 overlap": replace(experts, layout=Layout(ep=2), engine=OVERLAP),
        "pp2 vpp2": replace(dense, layout=Layout(pp=2, vpp=2)),
        "pp2 vpp2 overlap": replace(dense, layout=Layout(pp=2, vpp=2), engine=OVERLAP),
        "fsdp": replace(dense, engine=FSDP),
        "fsdp offloaded": replace(dense, engine=replace(FSDP, param_offload=True, optimizer_offload=True)),
        "fsdp bf16, late": replace(
            dense,
            engine=replace(FSDP, param_offload=True, optimizer_offload=True),
            dtype="bfloat16",
            comes_late=True,
        ),
        "fsdp saved": replace(dense, engine=FSDP, saved_under=Layout()),
        "fsdp saved bf16": replace(dense, engine=FSDP, saved_under=Layout(), dtype="bfloat16"),
        "fsdp bf16": replace(dense, engine=FSDP, dtype="bfloat16"),
        "fsdp cp2": replace(dense, engine=FSDP, layout=Layout(cp=2)),
        "muon dp2": replace(dense, optim="muon"),
        "muon tp2": replace(dense, optim="muon", layout=Layout(tp=2)),
        "muon pp2": replace(dense, optim="muon", layout=Layout(pp=2)),
        "muon ep2": replace(experts, optim="muon", layout=Layout(ep=2)),
        "muon tp2 etp2": replace(experts, optim="muon", layout=Layout(tp=2, sequence_parallel=True)),
        "muon tp2 to dp2": replace(dense, optim="muon", saved_under=Layout(tp=2)),
        "muon tp2 to dp2 bf16": replace(dense, optim="muon", saved_under=Layout(tp=2), dtype="bfloat16"),
        "muon tp2 bf16": replace(dense, optim="muon", layout=Layout(tp=2), dtype="bfloat16"),
        "muon dp2 offloaded": replace(dense, optim="muon", engine=OFFLOAD, comes_late=True),
    }
    ranks = two_ranks.run(all_runs, cases, str(tmp_path_factory.mktemp("two")), timeout_s=500)
    return {name: [rank[name] for rank in ranks] for name in cases}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit: weights, and log-probs before each step; the norm's sum over buckets may round differently."""
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    for step, other in zip(got["seen"], expected["seen"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step, other, strict=True))
    assert sorted(got["weights"]) == sorted(expected["weights"])
    assert all(torch.equal(got["weights"][name], tensor) for name, tensor in expected["weights"].items())


@pytest.mark.parametrize(
    ("case", "like"),
    [
        ("selective", "dense"),
        ("uniform", "dense"),
        ("block", "dense"),
        ("experts uniform", "experts"),
        ("none", "dense"),
        ("none bf16", "dense bf16"),
        ("offloaded", "dense"),
        ("offloaded bf16", "dense bf16"),
        ("offloaded, late", "dense"),
        ("offloaded bf16, late", "dense bf16"),
        ("parameters offloaded", "dense"),
        ("adapters offloaded", "adapters"),
        ("muon none", "muon"),
    ],
)
def test_alone_every_engine_gives_the_same_bits(alone: Found, case: str, like: str) -> None:
    assert_same(alone[case][0], alone[like][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "like"),
    [
        ("dp2 overlap", "dp2"),
        ("dp2 adapters overlap", "dp2 adapters"),
        ("dp2 sharded overlap", "dp2 sharded"),
        ("dp2 sharded gather", "dp2 sharded"),
        ("dp2 sharded overlap bf16", "dp2 sharded bf16"),
        ("dp2 sharded offloaded", "dp2 sharded"),
        ("dp2 sharded bf16, late", "dp2 sharded bf16"),
        ("dp2 sharded overlap offloaded", "dp2 sharded"),
        ("ep2 overlap", "ep2"),
        ("pp2 vpp2 overlap", "pp2 vpp2"),
        ("muon dp2 offloaded", "muon dp2"),
        ("fsdp offloaded", "fsdp"),
        ("fsdp bf16, late", "fsdp bf16"),
        ("fsdp saved", "fsdp"),
        ("fsdp saved bf16", "fsdp bf16"),
    ],
)
def test_on_two_ranks_every_engine_gives_the_same_bits(on_two: Found, case: str, like: str) -> None:
    for got, expected in zip(on_two[case], on_two[like], strict=True):
        assert_same(got, expected)


def test_a_stage_that_frees_what_it_sent_computes_the_same_bits(
    folders: Folders, two_ranks: Ranks, tmp_path: Path
) -> None:
    kept = Case(folders["dense"], Layout(pp=2), dtype="bfloat16", num_steps=2)
    adapted = replace(kept, engine=ExecutionOptions(recompute_method="uniform", **FULL), with_adapters=True)
    cases = {"kept": kept, "freed": replace(kept, frees_outputs=True)}
    cases |= {"adapted": adapted, "adapted freed": replace(adapted, frees_outputs=True)}
    for found in two_ranks.run(all_runs, cases, str(tmp_path), timeout_s=200):
        assert_same(found["freed"], found["kept"])
        assert_same(found["adapted freed"], found["adapted"])


def assert_as_alone(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5 * LOOSER)
    assert_close(got["weights"], expected["weights"], 1e-5 * LOOSER)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fsdp", "fsdp cp2"])
def test_fully_sharded_it_is_the_same_model(alone: Found, on_two: Found, case: str) -> None:
    assert_as_alone(on_two[case][0], alone["dense"][0])


@pytest.mark.slow
def test_fully_sharded_it_is_the_same_model_under_other_parallelisms(
    alone: Found, folders: Folders, tmp_path: Path
) -> None:
    cases = {
        "tp2": Case(folders["dense"], Layout(tp=2), FSDP),
        "tp2+sp cp2": Case(folders["dense"], Layout(tp=2, cp=2, sequence_parallel=True), FSDP),
        "ep2": Case(folders["experts"], Layout(ep=2), FSDP),
        "tp2+sp ep2 etp1": Case(folders["experts"], Layout(tp=2, ep=2, etp=1, sequence_parallel=True), FSDP),
    }
    found = run_ranks(4, all_runs, cases, str(tmp_path), timeout_s=300)[0]
    for name, like in zip(cases, ("dense", "dense", "experts", "experts"), strict=True):
        assert_as_alone(found[name], alone[like][0])


@pytest.mark.slow
def test_fully_sharded_each_rank_holds_a_part(on_two: Found) -> None:
    whole, _ = on_two["dp2"][0]["bytes"]
    first, *later = on_two["fsdp offloaded"][0]["moved"]
    # Weights twice, as those that compute and those that are stepped; a layer's parts are padded to equal sizes.
    assert whole <= first[0] < 1.1 * whole
    assert whole / 2 <= first[1] < 0.55 * whole
    assert first[2] == 0
    assert all(whole <= moments < 1.1 * whole for _, _, moments in later)


def test_the_runs_move_the_weights(alone: Found) -> None:
    first, last = alone["dense"][0]["seen"][0], alone["dense"][0]["seen"][-1]
    assert max((a - b).abs().max().item() for a, b in zip(first, last, strict=True)) > 0.05


def test_adapters_move_where_layers_are_recomputed(alone: Found) -> None:
    """The input of the first layer comes from a frozen embedding; sums of gradients are made in another order."""
    assert_as_alone(alone["adapters uniform"][0], alone["adapters"][0])
    first, last = alone["adapters uniform"][0]["seen"][0], alone["adapters uniform"][0]["seen"][-1]
    assert max((a - b).abs().max().item() for a, b in zip(first, last, strict=True)) > 1e-3


def test_what_is_offloaded_is_counted_in_bytes(alone: Found) -> None:
    weights, moments = alone["offloaded"][0]["bytes"]
    assert moments == 2 * weights, "AdamW in float32"
    first, *later = alone["offloaded"][0]["moved"]
    assert first == (weights, weights, 0), "there are no moments before the first step"
    assert later == [(weights, weights, moments)] * 2


def test_weights_are_copied_after_a_step_and_not_after_a_look(alone: Found) -> None:
    weights, moments = alone["offloaded"][0]["bytes"]
    assert alone["offloaded"][0]["copied"] == [(weights, 0), *[(weights + moments, moments)] * 2]
    (first, again), *later = alone["adapters offloaded"][0]["copied"]
    assert again == 0, "there are no moments before the first step"
    assert all(0 < night - nap < first / 4 for night, nap in later), "the frozen base is not copied"


def test_float32_copies_are_offloaded_with_the_optimizer(alone: Found) -> None:
    weights, moments = alone["offloaded bf16"][0]["bytes"]
    assert moments == 2 * 2 * weights, "two moments of twice the bytes"
    first, *later = alone["offloaded bf16"][0]["moved"]
    assert first == (weights, 2 * weights, 2 * weights)
    assert later == [(weights, 2 * weights, 2 * weights + moments)] * 2


def test_only_what_was_asked_for_is_offloaded(alone: Found) -> None:
    weights, _ = alone["parameters offloaded"][0]["bytes"]
    assert alone["parameters offloaded"][0]["moved"] == [(weights, weights, 0)] * 3
    assert alone["dense"][0]["moved"] == [(0, 0, 0)] * 3


# Newton-Schulz multiplies differences of rounding (relative to the largest entry) by up to 3.4 in each of 5 iterations.
MUON_TOLERANCE = {"": 1e-4, "bf16": 2e-2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "like"),
    [
        ("muon dp2", "muon"),
        ("muon tp2", "muon"),
        ("muon pp2", "muon"),
        ("muon ep2", "muon experts"),
        ("muon tp2 etp2", "muon experts"),
    ],
)
def test_muon_does_not_depend_on_the_layout(alone: Found, on_two: Found, case: str, like: str) -> None:
    expected = alone[like][0]
    assert on_two[case][0]["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert_close(on_two[case][0]["weights"], expected["weights"], MUON_TOLERANCE[""])


@pytest.mark.slow
def test_a_checkpoint_of_muon_goes_on_under_another_layout(alone: Found, on_two: Found) -> None:
    assert_close(on_two["muon tp2 to dp2"][0]["weights"], alone["muon"][0]["weights"], MUON_TOLERANCE[""])
    bf16 = [on_two[name][0]["weights"] for name in ("muon tp2 to dp2 bf16", "muon tp2 bf16")]
    assert_close(*bf16, MUON_TOLERANCE["bf16"])


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        error = (got[name] - tensor).abs().max() / tensor.abs().max()
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def test_muon_is_its_formula_on_every_projection_by_itself(alone: Found) -> None:
    """Each step from the weights before it; q, k, v, gate and up are matrices of their own, as in the HF model."""
    means: dict[str, torch.Tensor] = {}
    squares: dict[str, torch.Tensor] = {}
    for t, (before, gradients, after) in enumerate(alone["muon"][0]["traced"], start=1):
        for name, weight in before.items():
            w, g = weight.double(), gradients[name].double()
            is_matrix = ".layers." in name and w.ndim == 2
            beta = 0.9
            means[name] = beta * means.get(name, torch.zeros_like(w)) + (1 - beta) * g
            squares[name] = 0.999 * squares.get(name, torch.zeros_like(w)) + 0.001 * g * g
            if is_matrix:
                update = orthogonal((1 - beta) * g + beta * means[name]) * 0.2 * max(w.shape) ** 0.5
            else:
                update = means[name] / (1 - beta**t) / ((squares[name] / (1 - 0.999**t)).sqrt() + 1e-3)
            decay = 0.1 if w.ndim == 2 else 0.0
            expected = w - 1e-2 * (update + decay * w)
            error = (after[name] - expected).abs().max() / expected.abs().max()
            assert error < 2e-5, f"step {t}, {name}: {error:.1e}"


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Jordan's iteration on singular values: U p(p(..p(S / |S|))) V^T, p(s) = 3.4445 s - 4.775 s^3 + 2.0315 s^5."""
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def test_an_engine_that_does_not_go_with_the_layout_is_refused(folders: Folders, two_ranks: Ranks) -> None:
    found = two_ranks.run(refusals, folders["dense"])[0]
    assert found["gather"].startswith("overlap_param_gather=true: expected use_distributed_optimizer=true")
    assert "of 2 ranks, tensor_model_parallel_size=2 and expert_model_parallel_size*expert" in found["fsdp tp2"]
    assert found["fsdp pp2"].startswith(
        "strategy=fsdp: expected pipeline_model_parallel_size=1 and no adapters, has 2 and"
    )
    assert found["fsdp muon"] == "optim.name=muon: expected adamw with strategy=fsdp"
    assert found["sharded muon"] == "optim.name=muon: expected use_distributed_optimizer=false and no lora"
    assert found["none sharded"].startswith("strategy=none: expected one process and use_distributed_optimizer=false")
