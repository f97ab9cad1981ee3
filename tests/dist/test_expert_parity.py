"""Optimizer steps of a model with experts under every way of laying these out: the same loss, gradient, weights."""

from __future__ import annotations

from typing import Any

import pytest
from parity_cases import Case, Found, Table
from parity_compare import assert_same_after, assert_same_gradient, assert_same_stats

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions

pytestmark = pytest.mark.dist

SHAPE = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "moe_intermediate_size": 24}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "ep2": Layout(ep=2),
        "pp2": Layout(pp=2),
        "cp2": Layout(cp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "tp2+sp": Layout(**SP),
        "tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1),
    },
    4: {
        "pp2 ep2": Layout(pp=2, ep=2),
        "pp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2),
        "ep2 etp2": Layout(ep=2, etp=2),
        "tp2+sp ep2": Layout(**SP, ep=2),
        "tp2+sp pp2 vpp2": Layout(**SP, pp=2, vpp=2),
        "cp2 ep4": Layout(cp=2, ep=4),
        "ep2 dp2": Layout(ep=2),
    },
    8: {"tp2+sp pp2 vpp2 ep2 etp1": Layout(**SP, pp=2, vpp=2, ep=2, etp=1), "tp2+sp ep4": Layout(**SP, ep=4)},
}
# Every kind of parallelism beside experts once; the other layouts are long.
SLOW = ("ep2", "tp2+sp ep2 etp1", "pp2 vpp2 ep2", "cp2 ep4", "tp2+sp pp2 vpp2 ep2 etp1")
EVERY = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.long)
    for layouts in LAYOUTS.values()
    for name in layouts
]
SHARDED = {
    2: {"ep2": Layout(ep=2, use_distributed_optimizer=True)},
    4: {"pp2 vpp2 ep2": Layout(pp=2, vpp=2, ep=2, use_distributed_optimizer=True)},
}
RECOMPUTED = ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
ROLES = ("actor", "critic")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = str(write_tiny_model(tmp_path_factory.mktemp("experts") / "model", family="qwen3_moe", seed=1, **SHAPE))
    alone = {f"one/{role}": Case(role, num_steps=3) for role in ROLES}
    tables = [Table(1, folder, alone | {"sharded one": Case("actor", optim="adamw", num_steps=3)})]
    for size, layouts in LAYOUTS.items():
        cases = {f"{name}/{role}": Case(role, how, num_steps=3) for name, how in layouts.items() for role in ROLES}
        is_slow = {name: name.rpartition("/")[0] in SLOW for name in cases}
        tables += [
            Table(size, folder, {name: case for name, case in cases.items() if is_slow[name] is wanted})
            for wanted in (True, False)
        ]
        sharded = SHARDED.get(size, {})
        tables.append(
            Table(
                size,
                folder,
                {f"sharded {n}": Case("actor", how, optim="adamw", num_steps=3) for n, how in sharded.items()},
            )
        )
    recomputed = {f"{name} recomputed": Case("actor", how, RECOMPUTED) for name, how in LAYOUTS[2].items()}
    tables.append(Table(2, folder, recomputed))
    return Found(*tables)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("layout", EVERY)
def test_gradient_does_not_depend_on_where_experts_are(found: Found, layout: str, role: str) -> None:
    expected = found[f"one/{role}"][0]["gradient"]
    assert sum(bool(t.any()) for n, t in expected.items() if ".experts." in n) == 4 * 4 * 3, "every expert learns"
    assert_same_gradient(found[f"{layout}/{role}"][0]["gradient"], expected)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("layout", EVERY)
def test_loss_and_statistics_do_not_depend_on_where_experts_are(found: Found, layout: str, role: str) -> None:
    assert_same_stats(found[f"{layout}/{role}"], found[f"one/{role}"])


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("layout", EVERY)
def test_weights_after_three_clipped_steps_do_not_depend_on_where_experts_are(
    found: Found, layout: str, role: str
) -> None:
    assert_same_after(found[f"{layout}/{role}"][0], found[f"one/{role}"][0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for layouts in SHARDED.values() for name in layouts])
def test_weights_after_three_steps_of_a_sharded_optimizer_do_not_depend_on_where_experts_are(
    found: Found, layout: str
) -> None:
    assert_same_after(found[f"sharded {layout}"][0], found["sharded one"][0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_gradient_does_not_depend_on_what_is_recomputed(found: Found, layout: str) -> None:
    assert_same_gradient(found[f"{layout} recomputed"][0]["gradient"], found["one/actor"][0]["gradient"])
