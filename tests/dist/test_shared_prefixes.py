"""What rows begin with in common is computed once, and nothing else changes: for models, layouts and losses.

Over layouts in float32, as they run; on one rank in float64 too, where no rounding hides an error of the method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loss_cases import ARGS
from loss_cover import FACTORS, LOSSES
from parity_cases import Case, Found, Table, make_alike_step
from parity_compare import LOOSER, TOLERANCE, assert_same_after, assert_same_gradient, assert_same_stats
from spawn import Ranks
from teacher_cases import student_gradients, teacher_columns
from tiny_models import write_model
from torch import Tensor

from megarl.algo import POLICY_LOSSES
from megarl.batch import Batch
from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions

pytestmark = pytest.mark.dist

SHAPE = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "layers": 4}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
RECOMPUTED = ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "tp2": Layout(tp=2),
        "tp2+sp": Layout(**SP),
        "pp2": Layout(pp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "dp2": Layout(),
    },
    4: {"tp2+sp pp2": Layout(**SP, pp=2), "pp2 dp2": Layout(pp=2)},
}
ROLES = ("actor", "critic", "actor with reference")
# Experts, latent attention, windows, windows and sinks: on one rank, and with what cuts them.
FAMILIES: dict[str, Layout] = {
    "qwen3_moe": Layout(ep=2),
    "deepseek_v3": Layout(**SP, ep=2, etp=1),
    "mistral": Layout(tp=2),
    "gpt_oss": Layout(**SP, ep=2, etp=1),
}
BY_FLEX: dict[str, tuple[Layout, dict[str, Any]]] = {
    "by flex": (Layout(**SP), {"by_flex": True}),
    "by flex in stages": (Layout(pp=2), {"by_flex": True}),
}
SHARDED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "distributed optimizer": (Layout(use_distributed_optimizer=True), {"optim": "adamw"}),
    "fsdp": (Layout(), {"optim": "adamw", "engine": ExecutionOptions("fsdp")}),
}
CUT_ADAPTERS = {"tp2+sp": Layout(**SP), "pp2": Layout(pp=2)}
SHARED: dict[str, Any] = {"alike": True, "shares_prefixes": True}
IN_FLOAT32 = 1e-5 * LOOSER  # of a gradient, relative


def case(role: str, layout: Layout, **more: Any) -> Case:
    steps = 0 if "reference" in role else 3
    return Case(role, layout, max_tokens=40, num_steps=steps, **(SHARED | more))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("models")
    folder = str(write_tiny_model(root / "qwen3", seed=1, **SHAPE))
    apart = {role: case(role, Layout(), shares_prefixes=False) for role in ROLES}
    one = {f"one/{role}": case(role, Layout()) for role in ROLES} | {
        "narrowed apart": case("actor", Layout(), narrowed=True, shares_prefixes=False),
        "narrowed": case("actor", Layout(), narrowed=True),
        "recomputed": case("actor", Layout(), engine=RECOMPUTED),
        "adamw apart": case("actor", Layout(), optim="adamw", shares_prefixes=False),
        "adapters apart": case("actor", Layout(), lora=True, shares_prefixes=False),
        "adapters": case("actor", Layout(), lora=True),
    }
    tables = [Table(1, folder, apart | one)]
    for size, layouts in LAYOUTS.items():
        named = {f"{name}/{role}": case(role, layout) for name, layout in layouts.items() for role in ROLES}
        if size == 2:
            named["adapters dp2"] = case("actor", Layout(), lora=True)
            named |= {name: case("actor", layout, **how) for name, (layout, how) in BY_FLEX.items()}
            named |= {name: case("actor", layout, **how) for name, (layout, how) in SHARDED.items()}
            for name, layout in CUT_ADAPTERS.items():  # each rank has other ones than a rank of another layout
                named[f"adapters {name} apart"] = case("actor", layout, lora=True, shares_prefixes=False)
                named[f"adapters {name}"] = case("actor", layout, lora=True)
            named["gspo dp2"] = of_episodes(max_tokens=80, shares_prefixes=True)
        tables.append(Table(size, folder, named))
    tables.append(Table(1, folder, {"gspo apart": of_episodes(max_tokens=80)}))
    for family, layout in FAMILIES.items():
        of_family = str(write_model(root / family, family, tied=False))
        alone = {f"{family} apart": case("actor", Layout(), shares_prefixes=False)}
        alone |= {f"{family} adapters apart": case("actor", Layout(), lora=True, shares_prefixes=False)}
        alone |= {f"{family} critic apart": case("critic", Layout(), shares_prefixes=False)}
        shared = {f"{family} one": case("actor", Layout()), f"{family} critic": case("critic", Layout())}
        tables.append(Table(1, of_family, alone | shared | {f"{family} adapters": case("actor", Layout(), lora=True)}))
        cut = {f"{family} cut": case("actor", layout), f"{family} in stages": case("actor", Layout(pp=2))}
        tables.append(Table(2, of_family, cut))
    return Found(*tables)


def of_episodes(**how: Any) -> Case:
    """A loss with one ratio for all rows of a sample."""
    return Case("actor", alike=True, policy_loss="gspo", policy_args=ARGS.get("gspo", {}), **how)


def assert_same_columns(got: list[dict[str, Any]], apart: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    lengths, seen = make_alike_step(4).lengths, set()
    for name, column in apart["columns"].items():
        parts = column.split(lengths[apart["indices"]].tolist())
        whole = dict(zip(apart["indices"], parts, strict=True))
        for rank in (rank for rank in got if rank["columns"]):
            own = rank["columns"][name].split(lengths[rank["indices"]].tolist())
            for index, part in zip(rank["indices"], own, strict=True):
                error = (part - whole[index]).abs().max().item()
                assert error < tolerance * max(1.0, whole[index].abs().max().item()), f"{name} of row {index}"
                seen.add(index)
    assert len(seen) == len(lengths)


def assert_same(got: list[dict[str, Any]], apart: dict[str, Any], *, steps: bool) -> None:
    assert_same_columns(got, apart)
    assert_same_gradient(got[0]["gradient"], apart["gradient"], IN_FLOAT32)
    if steps:
        assert_same_stats(got, [apart])
        assert_same_after(got[0], apart)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "layout",
    ["one", *LAYOUTS[2], *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS[4])],
)
def test_columns_gradient_statistics_and_steps_are_those_of_rows_apart(found: Found, layout: str, role: str) -> None:
    assert_same(found[f"{layout}/{role}"], found[role][0], steps="reference" not in role)


@pytest.mark.parametrize("where", ["one", "cut", "in stages"])
@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_so_are_those_of_every_kind_of_attention_and_of_experts(found: Found, family: str, where: str) -> None:
    assert_same(found[f"{family} {where}"], found[f"{family} apart"][0], steps=True)


@pytest.mark.parametrize("what", ["adapters", "critic"])
@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_so_are_those_of_their_adapters_and_critics(found: Found, family: str, what: str) -> None:
    assert_same(found[f"{family} {what}"], found[f"{family} {what} apart"][0], steps=True)


@pytest.mark.parametrize("how", SHARDED)
def test_so_are_the_steps_of_what_shards_the_optimizer(found: Found, how: str) -> None:
    """Of which no rank has the whole gradient."""
    got, apart = found[how], found["adamw apart"][0]
    assert_same_columns(got, apart)
    assert_same_stats(got, [apart])
    assert_same_after(got[0], apart)


def test_so_is_that_of_a_loss_with_one_ratio_for_a_sample_over_two_ranks(found: Found) -> None:
    got, apart = found["gspo dp2"], found["gspo apart"][0]
    assert sum(rank["num_places"] for rank in got) < apart["num_places"]
    assert_same_gradient(got[0]["gradient"], apart["gradient"], IN_FLOAT32)
    assert_same_stats(got, [apart])


def test_so_are_those_with_tokens_that_could_not_be_drawn_and_with_layers_computed_again(found: Found) -> None:
    assert_same(found["narrowed"], found["narrowed apart"][0], steps=True)
    assert_same(found["recomputed"], found["actor"][0], steps=True)


@pytest.mark.parametrize("where", ["adapters", "adapters dp2"])
def test_so_are_those_of_adapters(found: Found, where: str) -> None:
    apart = found["adapters apart"][0]
    assert all(gradient.any() for gradient in apart["gradient"].values())
    assert_same(found[where], apart, steps=True)


@pytest.mark.parametrize("layout", CUT_ADAPTERS)
def test_so_are_those_of_adapters_that_are_cut(found: Found, layout: str) -> None:
    got, apart = found[f"adapters {layout}"], found[f"adapters {layout} apart"]
    assert_same_columns(got, next(rank for rank in apart if rank["columns"]))
    assert_same_gradient(got[0]["gradient"], apart[0]["gradient"], IN_FLOAT32)
    assert_same_stats(got, apart)
    assert_same_after(got[0], apart[0])


@pytest.mark.parametrize("where", BY_FLEX)
def test_so_are_those_of_the_calls_that_are_made_on_gpus(found: Found, where: str) -> None:
    """Rows are padded to whole blocks, and are cut over ranks."""
    assert_same(found[where], found["actor"][0], steps=True)
    assert found[where][0]["num_places"] % 128 == 0


def test_there_is_less_to_compute(found: Found) -> None:
    apart = found["actor"][0]["num_places"]
    assert apart == make_alike_step(4).num_tokens
    assert found["one/actor"][0]["num_places"] < 0.75 * apart
    assert found["one/actor"][0]["num_places"] < found["narrowed"][0]["num_places"] < apart, "only what is not learnt"


FLEX = ("qwen3", *FAMILIES)
EXACT = 1e-10  # some hundred thousand roundings of float64; the worst that was seen is 7e-15
STEPS: dict[str, dict[str, Any]] = {
    **{loss: {"policy_loss": loss, "policy_args": ARGS.get(loss, {})} for loss in LOSSES if loss in POLICY_LOSSES},
    **{mode: {"policy_loss": "ppo", "agg_mode": mode} for mode in FACTORS["mode"] if mode != Case.agg_mode},
}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of each family, and of each loss over samples of several rows, both ways of packing."""
    root = tmp_path_factory.mktemp("exact")

    def both(name: str, role: str, **more: Any) -> dict[str, Case]:
        ways: dict[str, dict[str, Any]] = {f"{name} apart": {}, name: {"shares_prefixes": True}}
        ways |= {f"{name} by flex": {"shares_prefixes": True, "by_flex": True}} if name in FLEX else {}
        return {way: Case(role, exact=True, alike=True, **how, **more) for way, how in ways.items()}

    tables = []
    for family in ("qwen3", *FAMILIES):
        tables.append(
            Table(
                1,
                str(write_model(root / family, family, tied=False)),
                both(family, "actor with reference", max_tokens=40),
            )
        )
    whole = str(write_model(root / "whole", "qwen3", tied=False))
    others = both("critic", "critic", max_tokens=40) | both("adapters", "actor", max_tokens=40, lora=True)
    tables.append(Table(1, whole, others))
    folder = str(write_model(root / "small", "qwen3", tied=False, num_hidden_layers=1))
    steps = [both(name, "actor", max_tokens=80, **how) for name, how in STEPS.items()]
    return Found(*tables, Table(1, folder, {name: one for of_step in steps for name, one in of_step.items()}))


@pytest.mark.parametrize("family", ["qwen3", *FAMILIES, "critic", "adapters"])
def test_in_float64_whole_models_agree_to_its_rounding(exact: Found, family: str) -> None:
    """Angles of positions are float32 in Megatron, the same for both; routers are told to take float64."""
    got, apart = exact[family], exact[f"{family} apart"][0]
    assert {gradient.dtype for gradient in apart["gradient"].values()} == {torch.float64}
    assert got[0]["num_places"] < 0.75 * apart["num_places"]
    assert_same_columns(got, apart, EXACT)
    assert_same_gradient(got[0]["gradient"], apart["gradient"], EXACT)


@pytest.mark.parametrize("family", FLEX)
def test_so_they_do_by_the_calls_that_are_made_on_gpus(exact: Found, family: str) -> None:
    """Of torch's own definition of FlexAttention: its kernels are in tests/gpu/test_flex_tree_gpu.py."""
    got, apart = exact[f"{family} by flex"], exact[f"{family} apart"][0]
    assert got[0]["num_places"] % 128 == 0, "whole blocks"
    assert_same_columns(got, apart, EXACT)
    assert_same_gradient(got[0]["gradient"], apart["gradient"], EXACT)


@pytest.mark.parametrize("name", STEPS)
def test_every_loss_and_aggregation_agrees_over_samples_of_several_rows(exact: Found, name: str) -> None:
    got, apart = exact[name], exact[f"{name} apart"][0]
    assert got[0]["num_places"] < apart["num_places"]
    assert_same_gradient(got[0]["gradient"], apart["gradient"], EXACT)
    assert_same_stats(got, [apart])


def taught(top_k: bool) -> Batch:
    """What two teachers say of each token, which differs where rows are equal, too."""
    g, batch = torch.Generator().manual_seed(9), make_alike_step(45)
    num, teacher = batch.num_tokens, 1 + torch.arange(len(batch.lengths))[batch.row_ids] % 2
    said = {"teacher": teacher, "distill_weight": torch.ones(num), "teacher_hidden": torch.randn(num, 48, generator=g)}
    if top_k:
        logits = torch.randn(num, 45, generator=g).log_softmax(-1).topk(6)
        said |= {"teacher_ids": logits.indices.int(), "teacher_top_log_probs": logits.values}
    return batch.with_columns(**said)


def test_so_are_a_teachers_hidden_states_and_likeliest_tokens(tmp_path: Path) -> None:
    folder, batch = str(write_model(tmp_path / "teacher", "qwen3", tied=False)), make_alike_step(45)
    with Ranks(1) as rank:
        apart, got = (
            by_row(batch, rank.run(teacher_columns, folder, batch, {"one": Layout()}, 6, shares)[0]["one"])
            for shares in (False, True)
        )
    assert got.keys() == apart.keys()
    for key, column in apart.items():
        assert (got[key] - column).abs().max() < 2e-5, key


def by_row(batch: Batch, told: list[tuple[list[int], dict[str, Tensor]]]) -> dict[tuple[str, int], Tensor]:
    """Hidden states, and the tokens' log-probs: which token is the sixth may be a matter of rounding."""
    ((indices, columns),) = told
    found = {}
    for name in ("hidden_states", "top_log_probs"):
        parts = columns[name].split(batch.lengths[indices].tolist())
        found |= {(name, index): part for index, part in zip(indices, parts, strict=True)}
    return found


@pytest.mark.parametrize("top_k", [False, True], ids=["hidden states", "likeliest tokens"])
def test_students_of_teachers_over_the_vocabulary_share_what_they_do_not_learn(tmp_path: Path, *, top_k: bool) -> None:
    shapes: dict[str, dict[str, Any]] = {"student": {}, "first": {"hidden_size": 48}, "second": {"hidden_size": 16}}
    folders = [str(write_model(tmp_path / name, "qwen3", tied=False, **more)) for name, more in shapes.items()]
    what = (folders[0], folders[1:], taught(top_k), {"one": (Layout(), "reverse_kl")}, top_k, None)
    with Ranks(1) as rank:
        apart, got = (rank.run(student_gradients, *what, shares)[0]["one"] for shares in (False, True))
    assert got["num_places"] < apart["num_places"]
    assert_same_gradient(got["gradient"], apart["gradient"])
    assert_same_stats([got], [apart])
