"""Optimizer steps under every layout and every cut into micro-batches: the same columns, loss, gradient, weights."""

from __future__ import annotations

from typing import Any

import pytest
from parity_cases import Case, Found, Table, make_step
from parity_compare import TOLERANCE, assert_same_after, assert_same_gradient, assert_same_stats

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout
from megarl.mcore.logprobs.logprobs import NAMES
from megarl.mcore.training.execution import ExecutionOptions

pytestmark = pytest.mark.dist

SHAPE = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
FAST: dict[int, dict[str, Layout]] = {
    2: {
        "tp2": Layout(tp=2),
        "tp2+sp": Layout(**SP),
        "pp2": Layout(pp=2),
        "dp2": Layout(),
        "cp2": Layout(cp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
    },
}
SLOW: dict[int, dict[str, Layout]] = {
    4: {
        "tp2 pp2": Layout(tp=2, pp=2),
        "tp2+sp cp2": Layout(**SP, cp=2),
        "pp2 vpp2 dp2": Layout(pp=2, vpp=2),
        "cp2 pp2 vpp2": Layout(cp=2, pp=2, vpp=2),
        "cp2 dp2": Layout(cp=2),
    },
}
LONG: dict[int, dict[str, Layout]] = {
    2: {"pp2 uneven": Layout(pp=2, first_stage_layers=3)},
    4: {
        "tp2 dp2": Layout(tp=2),
        "pp2 dp2": Layout(pp=2),
        "pp4": Layout(pp=4),
        "tp2+sp pp2 vpp2": Layout(**SP, pp=2, vpp=2),
    },
}
# Of a model with twice the layers.
DEEP_SLOW: dict[int, dict[str, Layout]] = {
    4: {"pp4 vpp2": Layout(pp=4, vpp=2)},
    8: {"tp2+sp pp2 vpp2 dp2": Layout(**SP, pp=2, vpp=2)},
}
DEEP_LONG: dict[int, dict[str, Layout]] = {
    2: {"pp2 vpp2 uneven": Layout(pp=2, vpp=2, first_stage_layers=2, last_stage_layers=6)},
    4: {
        "pp4 uneven": Layout(pp=4, first_stage_layers=1, last_stage_layers=3),
        "pp2 vpp4 dp2": Layout(pp=2, vpp=4),
    },
    8: {
        "tp2 pp2 cp2": Layout(tp=2, pp=2, cp=2),
        "pp4 vpp2 dp2": Layout(pp=4, vpp=2),
    },
}
CUTS = {"whole": 4096, "cut": 24}
WITH_REFERENCE = "actor with reference"
RUNS = [("actor", "whole"), ("actor", "cut"), ("critic", "cut"), (WITH_REFERENCE, "cut")]
# Megatron shards Adam only.  With eps=1 the update is smooth in the gradient: no noise is divided by noise.
SHARDED = {
    1: {"one": Layout()},
    2: {"dp2": Layout(use_distributed_optimizer=True), "pp2 vpp2": Layout(pp=2, vpp=2, use_distributed_optimizer=True)},
    4: {
        "tp2+sp dp2": Layout(**SP, use_distributed_optimizer=True),
        "pp2 vpp2 dp2": Layout(pp=2, vpp=2, use_distributed_optimizer=True),
        "cp2 dp2": Layout(cp=2, use_distributed_optimizer=True),
    },
}
RECOMPUTED = {
    "full": ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "block": ExecutionOptions(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    "selective": ExecutionOptions(recompute_granularity="selective"),
}
RECOMPUTED_LAYOUTS = {"tp2+sp": Layout(**SP), "pp2 vpp2": Layout(pp=2, vpp=2), "cp2": Layout(cp=2)}
# Numbers of micro-batches that interleaved stages run: by this many tokens in each.
COUNTS = {1: 4096, 2: 72, 3: 40, 5: 18, 7: 13}
COUNTED = {"pp2 vpp2": Layout(pp=2, vpp=2), "pp2 vpp4": Layout(pp=2, vpp=4)}


def cases(layouts: dict[str, Layout]) -> dict[str, Case]:
    return {
        f"{layout}/{role}/{cut}": Case(role, how, max_tokens=CUTS[cut], num_steps=0 if role == WITH_REFERENCE else 3)
        for role, cut in RUNS
        for layout, how in layouts.items()
    }


def layouts_of(*worlds: dict[int, dict[str, Layout]]) -> list[str]:
    return [layout for world in worlds for layouts in world.values() for layout in layouts]


MARKED = {
    **dict.fromkeys(layouts_of(SLOW, DEEP_SLOW), pytest.mark.slow),
    **dict.fromkeys(layouts_of(LONG, DEEP_LONG), pytest.mark.long),
}
EVERY_LAYOUT = [pytest.param(layout, marks=MARKED.get(layout, ())) for layout in (*layouts_of(FAST), *MARKED)]
EVERY_RUN = [
    pytest.param(layout, role, cut, marks=MARKED.get(layout, ()))
    for layout in (*layouts_of(FAST), *MARKED)
    for role, cut in RUNS
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder, deep = (
        str(write_tiny_model(tmp_path_factory.mktemp("model") / name, seed=1, layers=layers, **SHAPE))
        for name, layers in (("shallow", 4), ("deep", 8))
    )
    adam = {
        size: {f"sharded {name}": Case("actor", layout, optim="adamw", num_steps=3) for name, layout in layouts.items()}
        for size, layouts in SHARDED.items()
    }
    alone = cases({"one": Layout()})
    tables = [Table(1, folder, alone | adam[1]), Table(1, deep, {f"deep {name}": case for name, case in alone.items()})]
    tables += [Table(size, folder, cases(layouts)) for world in (FAST, SLOW, LONG) for size, layouts in world.items()]
    tables += [Table(size, folder, adam[size]) for size in SHARDED if size > 1]
    tables += [Table(size, deep, cases(layouts)) for world in (DEEP_SLOW, DEEP_LONG) for size, layouts in world.items()]
    recomputed = {
        f"{layout}/{engine}": Case("actor", how, RECOMPUTED[engine])
        for layout, how in RECOMPUTED_LAYOUTS.items()
        for engine in RECOMPUTED
    }
    tables.append(Table(2, folder, recomputed))
    counted = {
        f"{layout}/{count}": Case("actor", how, max_tokens=tokens)
        for layout, how in COUNTED.items()
        for count, tokens in COUNTS.items()
    }
    tables.append(Table(2, deep, counted))
    return Found(*tables)


def alone(found: Found, layout: str, role: str) -> list[dict[str, Any]]:
    """The same on one rank: of an actor, in one micro-batch."""
    cut = "whole" if role == "actor" else "cut"
    return found[f"{'deep ' if layout in layouts_of(DEEP_SLOW, DEEP_LONG) else ''}one/{role}/{cut}"]


@pytest.mark.parametrize(("layout", "role", "cut"), EVERY_RUN)
def test_gradient_does_not_depend_on_the_layout(found: Found, layout: str, role: str, cut: str) -> None:
    assert_same_gradient(found[f"{layout}/{role}/{cut}"][0]["gradient"], alone(found, layout, role)[0]["gradient"])


@pytest.mark.parametrize(("layout", "role", "cut"), [run for run in EVERY_RUN if WITH_REFERENCE not in run.values])
def test_loss_and_statistics_do_not_depend_on_the_layout(found: Found, layout: str, role: str, cut: str) -> None:
    assert_same_stats(found[f"{layout}/{role}/{cut}"], alone(found, layout, role))


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_weights_after_three_clipped_steps_do_not_depend_on_the_layout(found: Found, layout: str, role: str) -> None:
    assert_same_after(found[f"{layout}/{role}/cut"][0], alone(found, layout, role)[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_columns_do_not_depend_on_the_layout(found: Found, layout: str, name: str) -> None:
    reference = alone(found, layout, WITH_REFERENCE)[0]
    batch = make_step(vocab_size=4)
    parts = reference["columns"][name].split(batch.lengths[reference["indices"]].tolist())
    whole = dict(zip(reference["indices"], parts, strict=True))
    seen = 0
    for rank in found[f"{layout}/{WITH_REFERENCE}/cut"]:
        if not rank["columns"]:
            continue
        lengths = batch.lengths[rank["indices"]].tolist()
        for index, column in zip(rank["indices"], rank["columns"][name].split(lengths), strict=True):
            error = (column - whole[index]).abs().max().item()
            assert error < TOLERANCE * max(1.0, whole[index].abs().max().item()), f"sequence {index}: {error:.1e}"
            assert column[0] == 0, "nothing predicts a first token"
            seen += 1
    assert seen == batch.num_sequences


def test_the_cut_makes_several_micro_batches(found: Found) -> None:
    assert found["tp2/actor/cut"][0]["num_micros"] > 2
    assert found["tp2/actor/whole"][0]["num_micros"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*SHARDED[2], *SHARDED[4]])
def test_weights_after_three_steps_of_a_sharded_optimizer_do_not_depend_on_the_layout(
    found: Found, layout: str
) -> None:
    assert_same_after(found[f"sharded {layout}"][0], found["sharded one"][0])


@pytest.mark.slow
@pytest.mark.parametrize("engine", RECOMPUTED)
@pytest.mark.parametrize("layout", RECOMPUTED_LAYOUTS)
def test_gradient_does_not_depend_on_what_is_recomputed(found: Found, layout: str, engine: str) -> None:
    assert_same_gradient(found[f"{layout}/{engine}"][0]["gradient"], alone(found, layout, "actor")[0]["gradient"])


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("layout", COUNTED)
def test_interleaved_stages_run_any_number_of_micro_batches(found: Found, layout: str, count: int) -> None:
    got = found[f"{layout}/{count}"]
    assert got[0]["num_micros"] == count
    assert_same_gradient(got[0]["gradient"], found["deep one/actor/whole"][0]["gradient"])
    assert_same_stats(got, found["deep one/actor/whole"])
