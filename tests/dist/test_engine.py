"""How a layout is computed does not change what is computed: recomputed, overlapped, put away, without a wrapper."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CLIP, Case, all_runs, refusals
from parity_compare import LOOSER
from rank_answers import Answers
from spawn import Ranks
from tiny_models import tiny_model

from megarl.arch.layout import Layout
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.mcore.models.execution import ExecutionOptions

pytestmark = pytest.mark.dist
SHAPE = TinySizes(hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, ffn=48)
SHARDED = Layout(use_distributed_optimizer=True)
UNIFORM = ExecutionOptions(recompute_granularity="full", recompute_num_layers=1, recompute_method="uniform")
OVERLAP = ExecutionOptions(overlap_grad_reduce=True)
OVERLAP_BOTH = ExecutionOptions(overlap_grad_reduce=True, overlap_param_gather=True)
FSDP = ExecutionOptions("fsdp")
OFFLOAD = ExecutionOptions(param_offload=True, optimizer_offload=True)
FSDP_OFFLOAD = replace(FSDP, param_offload=True, optimizer_offload=True)
DENSE, EXPERTS = Case("dense"), Case("experts")
# A wrapper must sum what tied and untied heads learn alike, and all ranks must clip by the same norm.
UNTIED, UNTIED_EXPERTS = Case("untied dense", optim="clipped"), Case("untied experts", optim="clipped")
BF16, MUON, ADAPTERS = (
    replace(DENSE, **x) for x in ({"dtype": "bfloat16"}, {"optim": "muon"}, {"with_adapters": True})
)
ALONE = {
    "dense": DENSE,
    "dense bf16": BF16,
    "uniform": replace(DENSE, engine=UNIFORM),
    "adapters": ADAPTERS,
    "adapters uniform": replace(ADAPTERS, engine=UNIFORM),
    "none": replace(DENSE, engine=ExecutionOptions("none")),
    "offloaded": replace(DENSE, engine=OFFLOAD),
    "offloaded bf16, late": replace(BF16, engine=OFFLOAD, comes_late=True),
    "parameters offloaded": replace(DENSE, engine=ExecutionOptions(param_offload=True)),
    "adapters offloaded": replace(ADAPTERS, engine=OFFLOAD),
    "muon": replace(MUON, with_gradients=True),
}
MORE_ALONE = {
    "untied dense": UNTIED,
    "untied experts": UNTIED_EXPERTS,
    "experts": EXPERTS,
    "experts uniform": replace(EXPERTS, engine=UNIFORM),
    "none bf16": replace(BF16, engine=ExecutionOptions("none")),
    "muon experts": replace(EXPERTS, optim="muon"),
    "muon none": replace(MUON, engine=ExecutionOptions("none")),
}
ON_TWO = {
    "dp2": DENSE,
    "dp2 overlap": replace(DENSE, engine=OVERLAP),
    "dp2 adapters": ADAPTERS,
    "dp2 adapters overlap": replace(ADAPTERS, engine=OVERLAP),
    "dp2 sharded": replace(DENSE, layout=SHARDED),
    "dp2 sharded overlap offloaded": replace(
        DENSE, layout=SHARDED, engine=replace(OVERLAP_BOTH, param_offload=True, optimizer_offload=True)
    ),
    "dp2 sharded bf16": replace(BF16, layout=SHARDED),
    "dp2 sharded bf16, late": replace(BF16, layout=SHARDED, engine=OFFLOAD, comes_late=True),
    "ep2": replace(EXPERTS, layout=Layout(ep=2)),
    "ep2 overlap": replace(EXPERTS, layout=Layout(ep=2), engine=OVERLAP),
    "pp2 vpp2": replace(DENSE, layout=Layout(pp=2, vpp=2)),
    "pp2 vpp2 overlap": replace(DENSE, layout=Layout(pp=2, vpp=2), engine=OVERLAP),
    "fsdp": replace(DENSE, engine=FSDP),
    "fsdp offloaded": replace(DENSE, engine=FSDP_OFFLOAD),
    "fsdp bf16": replace(BF16, engine=FSDP),
    "fsdp bf16, late": replace(BF16, engine=FSDP_OFFLOAD, comes_late=True),
    "fsdp bf16 saved": replace(BF16, engine=FSDP, saved_under=Layout()),
    "fsdp cp2": replace(DENSE, engine=FSDP, layout=Layout(cp=2)),
    "untied fsdp": replace(UNTIED, engine=FSDP),
    "untied fsdp cp2": replace(UNTIED, engine=FSDP, layout=Layout(cp=2)),
    "untied sharded": replace(UNTIED, layout=SHARDED, engine=OVERLAP_BOTH),
    "untied pp2": replace(UNTIED, layout=Layout(pp=2)),
    "untied experts tp2 etp2": replace(UNTIED_EXPERTS, layout=Layout(tp=2, sequence_parallel=True)),
    "untied experts ep2": replace(UNTIED_EXPERTS, layout=Layout(ep=2)),
    "muon dp2": MUON,
    "muon dp2 offloaded": replace(MUON, engine=OFFLOAD, comes_late=True),
    "muon pp2": replace(MUON, layout=Layout(pp=2)),
    "muon ep2": replace(EXPERTS, optim="muon", layout=Layout(ep=2)),
    "muon tp2 etp2": replace(EXPERTS, optim="muon", layout=Layout(tp=2, sequence_parallel=True)),
    "muon tp2 to dp2": replace(MUON, saved_under=Layout(tp=2)),
    "muon tp2 to dp2 bf16": replace(MUON, saved_under=Layout(tp=2), dtype="bfloat16"),
    "muon tp2 bf16": replace(MUON, layout=Layout(tp=2), dtype="bfloat16"),
}


def untied(cases: Mapping[str, Case]) -> dict[str, Case]:
    """The same of models whose heads have weights of their own; adapters leave heads alone."""
    tied = {name: case for name, case in cases.items() if "untied" not in case.folder and not case.with_adapters}
    return {f"{name}, untied": replace(case, folder=f"untied {case.folder}") for name, case in tied.items()}


UNTIED_ALONE = untied(ALONE | MORE_ALONE)
UNTIED_ON_TWO = untied({name: case for name, case in ON_TWO.items() if name != "fsdp cp2"})  # it is there, and clipped
ON_FOUR = {
    "fsdp tp2": replace(DENSE, layout=Layout(tp=2), engine=FSDP),
    "fsdp tp2+sp cp2": replace(DENSE, layout=Layout(tp=2, cp=2, sequence_parallel=True), engine=FSDP),
    "fsdp ep2": replace(EXPERTS, layout=Layout(ep=2), engine=FSDP),
    "fsdp tp2+sp ep2 etp1": replace(EXPERTS, layout=Layout(tp=2, ep=2, etp=1, sequence_parallel=True), engine=FSDP),
}
ON_FOUR |= {
    f"untied {name}": replace(case, folder=f"untied {case.folder}", optim="clipped") for name, case in ON_FOUR.items()
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "dense", SHAPE, seed=1)
    tiny_model("qwen3_moe", tied=True, num_hidden_layers=2).save_pretrained(root / "experts")
    write_tiny_model(root / "untied dense", SHAPE, seed=1, tied=False)
    tiny_model("qwen3_moe", tied=False, num_hidden_layers=2).save_pretrained(root / "untied experts")
    return {folder.name: str(folder) for folder in root.iterdir()}


@pytest.fixture(scope="module")
def found(
    folders: dict[str, str], one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks, tmp_path_factory: Any
) -> Answers:
    """Case -> what each rank returned."""
    groups = []
    tables = [(one_rank, ALONE), (one_rank, MORE_ALONE | UNTIED_ALONE), (four_ranks, ON_FOUR)]
    for ranks, cases in (*tables, (two_ranks, ON_TWO), (two_ranks, UNTIED_ON_TWO)):
        own = {name: replace(case, folder=folders[case.folder]) for name, case in cases.items()}
        root = str(tmp_path_factory.mktemp("checkpoints"))
        groups.append((cases, partial(ranks.run, all_runs, own, root, timeout_s=500)))
    return Answers(*groups)


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit: weights, and log-probs before each step; the norm's sum over buckets may round differently."""
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    for step, other in zip(got["seen"], expected["seen"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step, other, strict=True))
    assert sorted(got["weights"]) == sorted(expected["weights"])
    assert all(torch.equal(got["weights"][name], tensor) for name, tensor in expected["weights"].items())


SAME_BITS = {
    "uniform": "dense",
    "none": "dense",
    "offloaded": "dense",
    "offloaded bf16, late": "dense bf16",
    "parameters offloaded": "dense",
    "adapters offloaded": "adapters",
}
MORE_SAME_BITS = {
    "experts uniform": "experts",
    "none bf16": "dense bf16",
    "muon none": "muon",
    "dp2 overlap": "dp2",
    "dp2 adapters overlap": "dp2 adapters",
    "dp2 sharded overlap offloaded": "dp2 sharded",
    "dp2 sharded bf16, late": "dp2 sharded bf16",
    "ep2 overlap": "ep2",
    "pp2 vpp2 overlap": "pp2 vpp2",
    "muon dp2 offloaded": "muon dp2",
    "fsdp offloaded": "fsdp",
    "fsdp bf16, late": "fsdp bf16",
    "fsdp bf16 saved": "fsdp bf16",
}
MORE_SAME_BITS |= {
    f"{case}, untied": f"{like}, untied"
    for case, like in (SAME_BITS | MORE_SAME_BITS).items()
    if f"{case}, untied" in UNTIED_ALONE | UNTIED_ON_TWO
}


@pytest.mark.parametrize(
    ("case", "like"),
    [*SAME_BITS.items(), *(pytest.param(*pair, marks=pytest.mark.full) for pair in MORE_SAME_BITS.items())],
)
def test_every_engine_gives_the_same_bits(found: Answers, case: str, like: str) -> None:
    for got, expected in zip(found[case], found[like], strict=True):
        assert_same(got, expected)


@pytest.mark.full
def test_a_stage_that_frees_what_it_sent_computes_the_same_bits(
    folders: dict[str, str], two_ranks: Ranks, tmp_path: Path
) -> None:
    kept = Case(folders["dense"], Layout(pp=2), dtype="bfloat16", num_steps=2)
    adapted = replace(kept, engine=UNIFORM, with_adapters=True)
    cases = {"kept": kept, "freed": replace(kept, frees_outputs=True)}
    cases |= {"adapted": adapted, "adapted freed": replace(adapted, frees_outputs=True)}
    for found in two_ranks.run(all_runs, cases, str(tmp_path), timeout_s=200):
        assert_same(found["freed"], found["kept"])
        assert_same(found["adapted freed"], found["adapted"])


def assert_as_alone(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5 * LOOSER)
    assert_close(got["weights"], expected["weights"], 1e-5 * LOOSER)


@pytest.mark.full
@pytest.mark.parametrize("case", ["fsdp", "fsdp cp2", *ON_FOUR, *(n for n in ON_TWO if n.startswith("untied"))])
def test_fully_sharded_or_untied_and_clipped_it_is_the_same_model(found: Answers, case: str) -> None:
    untied, kind = case.startswith("untied"), "experts" if "ep2" in case or "experts" in case else "dense"
    expected = found[f"untied {kind}" if untied else kind][0]
    assert_as_alone(found[case][0], expected)
    assert not untied or min(expected["norms"]) > CLIP


@pytest.mark.full
def test_fully_sharded_each_rank_holds_a_part(found: Answers) -> None:
    whole, _ = found["dp2"][0]["bytes"]
    first, *later = found["fsdp offloaded"][0]["moved"]
    # Weights twice, as those that compute and those that are stepped; a layer's parts are padded to equal sizes.
    assert whole <= first[0] < 1.1 * whole
    assert whole / 2 <= first[1] < 0.55 * whole
    assert first[2] == 0
    assert all(whole <= moments < 1.1 * whole for _, _, moments in later)


def test_the_runs_move_the_weights(found: Answers) -> None:
    first, last = found["dense"][0]["seen"][0], found["dense"][0]["seen"][-1]
    assert max((a - b).abs().max().item() for a, b in zip(first, last, strict=True)) > 0.05


def test_adapters_move_where_layers_are_recomputed(found: Answers) -> None:
    """The input of the first layer comes from a frozen embedding; sums of gradients are made in another order."""
    assert_as_alone(found["adapters uniform"][0], found["adapters"][0])
    first, last = found["adapters uniform"][0]["seen"][0], found["adapters uniform"][0]["seen"][-1]
    assert max((a - b).abs().max().item() for a, b in zip(first, last, strict=True)) > 1e-3


def test_what_is_offloaded_is_counted_in_bytes(found: Answers) -> None:
    weights, moments = found["offloaded"][0]["bytes"]
    assert moments == 2 * weights, "AdamW in float32"
    first, *later = found["offloaded"][0]["moved"]
    assert first == (weights, weights, 0), "there are no moments before the first step"
    assert later == [(weights, weights, moments)] * 2


def test_weights_are_copied_after_a_step_and_not_after_a_look(found: Answers) -> None:
    weights, moments = found["offloaded"][0]["bytes"]
    assert found["offloaded"][0]["copied"] == [(weights, 0), *[(weights + moments, moments)] * 2]
    (first, again), *later = found["adapters offloaded"][0]["copied"]
    assert again == 0, "there are no moments before the first step"
    assert all(0 < night - nap < first / 4 for night, nap in later), "the frozen base is not copied"


def test_float32_copies_are_offloaded_with_the_optimizer(found: Answers) -> None:
    weights, moments = found["offloaded bf16, late"][0]["bytes"]
    assert moments == 2 * 2 * weights, "two moments of twice the bytes"
    first, *later = found["offloaded bf16, late"][0]["moved"]
    assert first == (weights, 2 * weights, 2 * weights)
    assert later == [(weights, 2 * weights, 2 * weights + moments)] * 2


def test_only_what_was_asked_for_is_offloaded(found: Answers) -> None:
    weights, _ = found["parameters offloaded"][0]["bytes"]
    assert found["parameters offloaded"][0]["moved"] == [(weights, weights, 0)] * 3
    assert found["dense"][0]["moved"] == [(0, 0, 0)] * 3


# Newton-Schulz multiplies differences of rounding (relative to the largest entry) by up to 3.4 in each of 5 iterations.
MUON_TOLERANCE = {"": 1e-4, "bf16": 2e-2}


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "like"),
    [("muon dp2", "muon"), ("muon pp2", "muon"), ("muon ep2", "muon experts"), ("muon tp2 etp2", "muon experts")],
)
@pytest.mark.parametrize("head", ["", ", untied"], ids=["tied", "untied"])
def test_muon_does_not_depend_on_the_layout(found: Answers, case: str, like: str, head: str) -> None:
    got, expected = found[case + head][0], found[like + head][0]
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    assert_close(got["weights"], expected["weights"], MUON_TOLERANCE[""])


@pytest.mark.full
@pytest.mark.parametrize("head", ["", ", untied"], ids=["tied", "untied"])
def test_a_checkpoint_of_muon_goes_on_under_another_layout(found: Answers, head: str) -> None:
    got, expected = (found[name + head][0]["weights"] for name in ("muon tp2 to dp2", "muon"))
    assert_close(got, expected, MUON_TOLERANCE[""])
    bf16 = [found[name + head][0]["weights"] for name in ("muon tp2 to dp2 bf16", "muon tp2 bf16")]
    assert_close(*bf16, MUON_TOLERANCE["bf16"])


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        error = (got[name] - tensor).abs().max() / tensor.abs().max()
        assert error < tolerance, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("case", ["muon", pytest.param("muon, untied", marks=pytest.mark.full)])
def test_muon_is_its_formula_on_every_projection_by_itself(found: Answers, case: str) -> None:
    """Each step from the weights before it; q, k, v, gate and up are matrices of their own, as in the HF model."""
    means: dict[str, torch.Tensor] = {}
    squares: dict[str, torch.Tensor] = {}
    for t, (before, gradients, after) in enumerate(found[case][0]["traced"], start=1):
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


def test_an_engine_that_does_not_go_with_the_layout_is_refused(folders: dict[str, str], two_ranks: Ranks) -> None:
    found = two_ranks.run(refusals, folders["dense"])[0]
    for case, words in {
        "gather": "overlap_param_gather=true: expected use_distributed_optimizer=true",
        "fsdp tp2": "of 2 ranks, tensor_model_parallel_size=2 and expert_model_parallel_size*expert",
        "fsdp pp2": "strategy=fsdp: expected pipeline_model_parallel_size=1 and no adapters, has 2 and",
        "fsdp muon": "optim.name=muon: expected adamw with strategy=fsdp",
        "sharded muon": "optim.name=muon: expected use_distributed_optimizer=false and no lora",
        "none sharded": "strategy=none: expected one process and use_distributed_optimizer=false",
    }.items():
        assert words in found[case]
