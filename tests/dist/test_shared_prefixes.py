"""What rows begin with in common is computed once, and nothing else changes: for models, layouts and losses."""

from __future__ import annotations

from typing import Any

import pytest
from parity_cases import Case, Found, Table, make_alike_step
from parity_compare import TOLERANCE, assert_same_after, assert_same_gradient, assert_same_stats
from tiny_models import write_model

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
SHARED: dict[str, Any] = {"alike": True, "shares_prefixes": True}


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
        "adapters apart": case("actor", Layout(), lora=True, shares_prefixes=False),
        "adapters": case("actor", Layout(), lora=True),
    }
    tables = [Table(1, folder, apart | one)]
    for size, layouts in LAYOUTS.items():
        named = {f"{name}/{role}": case(role, layout) for name, layout in layouts.items() for role in ROLES}
        named |= {"adapters dp2": case("actor", Layout(), lora=True)} if size == 2 else {}
        tables.append(Table(size, folder, named))
    for family, layout in FAMILIES.items():
        of_family = str(write_model(root / family, family, tied=False))
        alone = {f"{family} apart": case("actor", Layout(), shares_prefixes=False)}
        tables.append(Table(1, of_family, alone | {f"{family} one": case("actor", Layout())}))
        tables.append(Table(2, of_family, {f"{family} cut": case("actor", layout)}))
    return Found(*tables)


def assert_same_columns(got: list[dict[str, Any]], apart: dict[str, Any]) -> None:
    lengths, seen = make_alike_step(4).lengths, set()
    for name, column in apart["columns"].items():
        parts = column.split(lengths[apart["indices"]].tolist())
        whole = dict(zip(apart["indices"], parts, strict=True))
        for rank in (rank for rank in got if rank["columns"]):
            own = rank["columns"][name].split(lengths[rank["indices"]].tolist())
            for index, part in zip(rank["indices"], own, strict=True):
                error = (part - whole[index]).abs().max().item()
                assert error < TOLERANCE * max(1.0, whole[index].abs().max().item()), f"{name} of row {index}"
                seen.add(index)
    assert len(seen) == len(lengths)


def assert_same(got: list[dict[str, Any]], apart: dict[str, Any], *, steps: bool) -> None:
    assert_same_columns(got, apart)
    assert_same_gradient(got[0]["gradient"], apart["gradient"])
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


@pytest.mark.parametrize("where", ["one", "cut"])
@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_so_are_those_of_every_kind_of_attention_and_of_experts(found: Found, family: str, where: str) -> None:
    assert_same(found[f"{family} {where}"], found[f"{family} apart"][0], steps=True)


def test_so_are_those_with_tokens_that_could_not_be_drawn_and_with_layers_computed_again(found: Found) -> None:
    assert_same(found["narrowed"], found["narrowed apart"][0], steps=True)
    assert_same(found["recomputed"], found["actor"][0], steps=True)


@pytest.mark.parametrize("where", ["adapters", "adapters dp2"])
def test_so_are_those_of_adapters(found: Found, where: str) -> None:
    apart = found["adapters apart"][0]
    assert all(gradient.any() for gradient in apart["gradient"].values())
    assert_same(found[where], apart, steps=True)


def test_there_is_less_to_compute(found: Found) -> None:
    apart = found["actor"][0]["num_places"]
    assert apart == make_alike_step(4).num_tokens
    assert found["one/actor"][0]["num_places"] < 0.75 * apart
    assert found["one/actor"][0]["num_places"] < found["narrowed"][0]["num_places"] < apart, "only what is not learnt"
