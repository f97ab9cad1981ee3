"""Optimizer steps under every layout and every cut into micro-batches: the same columns, loss, gradient, weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import Case, Found, Table, make_step, with_support
from parity_compare import assert_same_after, assert_same_columns, assert_same_gradient, assert_same_stats, by_row
from transformers import AutoModelForCausalLM

from megarl.arch.layout import Layout
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.mcore.models.execution import ExecutionOptions
from megarl.samples.ragged import COUNTS, gathered
from megarl.samples.sample import SUPPORT

pytestmark = pytest.mark.dist

SHAPE = TinySizes(hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48)
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SHALLOW: dict[int, dict[str, Layout]] = {
    2: {
        "tp2": Layout(tp=2),
        "tp2+sp": Layout(**SP),
        "pp2": Layout(pp=2),
        "dp2": Layout(),
        "cp2": Layout(cp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "pp2 uneven": Layout(pp=2, first_stage_layers=3),
    },
    4: {
        "tp2 pp2": Layout(tp=2, pp=2),
        "tp2+sp cp2": Layout(**SP, cp=2),
        "pp2 vpp2 dp2": Layout(pp=2, vpp=2),
        "cp2 pp2 vpp2": Layout(cp=2, pp=2, vpp=2),
        "cp2 dp2": Layout(cp=2),
        "tp4": Layout(tp=4),  # two ranks share each head of keys and values
    },
}
# Of a model with twice the layers.
DEEP: dict[int, dict[str, Layout]] = {
    2: {"deep pp2 vpp2 uneven": Layout(pp=2, vpp=2, first_stage_layers=2, last_stage_layers=6)},
    4: {"deep pp4 vpp2": Layout(pp=4, vpp=2)},
    8: {"deep tp2+sp pp2 vpp2 dp2": Layout(**SP, pp=2, vpp=2)},
}
# Of tokens that could be drawn from a part of the vocabulary only.
NARROWED: dict[int, dict[str, Layout]] = {
    2: {f"narrowed {name}": SHALLOW[2][name] for name in ("tp2", "tp2+sp", "cp2", "pp2 vpp2", "dp2")},
    4: {"narrowed tp2+sp cp2": SHALLOW[4]["tp2+sp cp2"]},
}


def untied(worlds: dict[int, dict[str, Layout]]) -> dict[int, dict[str, Layout]]:
    """The same of a model whose head has weights of its own, as large ones have."""
    return {size: {f"untied {name}": layout for name, layout in layouts.items()} for size, layouts in worlds.items()}


UNTIED, UNTIED_DEEP, UNTIED_NARROWED = untied(SHALLOW), untied(DEEP), untied(NARROWED)
ACTORS = ("actor", "actor with reference")
ROLES = (*ACTORS, "critic")
# test_loss_splits.py has the loss, gradient and statistics of every loss under each of these layouts, too.
FAST = {f"{layout}/actor" for layout in ("tp2+sp", "dp2", "cp2", "pp2 vpp2")}
FAST |= {"tp2/actor with reference", "pp2/critic"}
# Megatron shards Adam only.  With eps=1 the update is smooth in the gradient: no noise is divided by noise.
SHARDED = {
    2: {"dp2": Layout(use_distributed_optimizer=True)},
    4: {
        "tp2+sp dp2": Layout(**SP, use_distributed_optimizer=True),
        "pp2 vpp2 dp2": Layout(pp=2, vpp=2, use_distributed_optimizer=True),
        "cp2 dp2": Layout(cp=2, use_distributed_optimizer=True),
    },
}
# Whole layers that are computed again are in test_router_replay.py, and those of one rank in test_engine.py.
SELECTIVE = ExecutionOptions(recompute_granularity="selective")
# Numbers of micro-batches that interleaved stages run: by this many tokens in each.
COUNTS_OF_MICROS = {1: 4096, 2: 72, 3: 40, 5: 18, 7: 13}
COUNTED = {"pp2 vpp2": Layout(pp=2, vpp=2), "pp2 vpp4": Layout(pp=2, vpp=4)}


def cases(layouts: dict[str, Layout], roles: tuple[str, ...] = ROLES, **more: Any) -> dict[str, Case]:
    """An actor with a reference takes no steps."""
    return {
        f"{layout}/{role}": Case(role, how, num_steps=0 if "reference" in role else 2, **more)
        for layout, how in layouts.items()
        for role in roles
    }


def every(worlds: dict[int, dict[str, Layout]], roles: tuple[str, ...] = ROLES) -> list[str]:
    return [name for layouts in worlds.values() for name in cases(layouts, roles)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "shallow", replace(SHAPE, layers=4), seed=1)


@pytest.fixture(scope="module")
def found(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("models")
    deep = str(write_tiny_model(root / "deep", replace(SHAPE, layers=8), seed=1))
    untied = str(write_tiny_model(root / "untied", replace(SHAPE, layers=4), seed=1, tied=False))
    untied_deep = str(write_tiny_model(root / "untied deep", replace(SHAPE, layers=8), seed=1, tied=False))
    one, adam = cases({"one": Layout()}), Case("actor", optim="adamw", num_steps=2)
    one["one/whole"] = Case("actor", max_tokens=4096, num_steps=2)
    narrowed = cases({"narrowed one": Layout()}, ACTORS, narrowed=True)
    narrowed |= cases({"narrowed split": Layout()}, ACTORS, narrowed=True, max_tokens=14)
    in_steps = narrowed | {"sharded one": adam}
    of_deep = {f"deep {name}": case for name, case in one.items()}
    of_deep |= {f"untied deep {name}": replace(case, folder=untied_deep) for name, case in one.items()}
    tables = [
        Table(1, str(folder), one),
        Table(1, str(folder), in_steps),
        Table(1, deep, of_deep),
        Table(1, untied, {f"untied {name}": case for name, case in (one | in_steps).items()}),
    ]
    for size, layouts in SHALLOW.items():
        own = cases(layouts)
        tables.append(Table(size, str(folder), {name: case for name, case in own.items() if name in FAST}))
        tables.append(Table(size, str(folder), {name: case for name, case in own.items() if name not in FAST}))
    for size, layouts in DEEP.items():
        own = cases(layouts) | cases(UNTIED_DEEP[size], ("actor",), folder=untied_deep)
        tables.append(Table(size, deep, own))
    for size, layouts in SHARDED.items():
        sharded = {f"sharded {name}": replace(adam, layout=layout) for name, layout in layouts.items()}
        own = sharded | cases(NARROWED[size], ACTORS, narrowed=True)
        tables.append(Table(size, str(folder), own))
        own = {f"untied {name}": case for name, case in sharded.items()} | cases(UNTIED[size], ("actor",))
        tables.append(Table(size, untied, own | cases(UNTIED_NARROWED[size], ACTORS, narrowed=True)))
    recomputed = {
        f"{layout}/selective": Case("actor", SHALLOW[2][layout], SELECTIVE) for layout in ("tp2+sp", "pp2 vpp2", "cp2")
    }
    counted = {
        f"{layout}/{count}": Case("actor", how, max_tokens=tokens)
        for layout, how in COUNTED.items()
        for count, tokens in COUNTS_OF_MICROS.items()
    }
    return Found(*tables, Table(2, str(folder), recomputed), Table(2, deep, counted))


def alone(found: Found, name: str) -> list[dict[str, Any]]:
    """The same on one rank: of an actor, in one micro-batch."""
    layout, role = name.split("/")
    kind = "".join(f"{word} " for word in ("untied", "deep", "narrowed") if word in layout.split())
    return found[f"{kind}one/{'whole' if role == 'actor' and 'narrowed' not in kind else role}"]


NAMES = [*every(SHALLOW), *every(DEEP), *every(NARROWED, ACTORS)]
NAMES += [*every(UNTIED, ("actor",)), *every(UNTIED_DEEP, ("actor",)), *every(UNTIED_NARROWED, ACTORS)]
NAMES += [f"{kind}narrowed split/{role}" for kind in ("", "untied ") for role in ACTORS]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.full) for n in NAMES])
def test_columns_loss_gradient_and_steps_do_not_depend_on_the_layout(found: Found, name: str) -> None:
    got, expected = found[name], alone(found, name)
    assert got[0]["num_micros"] > 1
    assert_same_columns(got, expected, make_step(4).lengths)
    assert_same_gradient(got[0]["gradient"], expected[0]["gradient"])
    assert_same_stats(got, expected)
    if "reference" not in name:
        assert min(expected[0]["grad_norms"][:2]) > 1.0, "two steps are clipped"
        assert_same_after(got[0], expected[0])


@pytest.mark.full
@pytest.mark.parametrize("layout", [*SHARDED[2], *SHARDED[4]])
@pytest.mark.parametrize("kind", ["", "untied "], ids=["tied", "untied"])
def test_weights_after_three_steps_of_a_sharded_optimizer_do_not_depend_on_the_layout(
    found: Found, kind: str, layout: str
) -> None:
    assert_same_after(found[f"{kind}sharded {layout}"][0], found[f"{kind}sharded one"][0])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2+sp", "pp2 vpp2", "cp2"])
def test_gradient_does_not_depend_on_attention_that_is_recomputed(found: Found, layout: str) -> None:
    assert_same_gradient(found[f"{layout}/selective"][0]["gradient"], found["one/whole"][0]["gradient"])


@pytest.mark.full
@pytest.mark.parametrize("count", COUNTS_OF_MICROS)
@pytest.mark.parametrize("layout", COUNTED)
def test_interleaved_stages_run_any_number_of_micro_batches(found: Found, layout: str, count: int) -> None:
    got = found[f"{layout}/{count}"]
    assert got[0]["num_micros"] == count
    assert_same_gradient(got[0]["gradient"], found["deep one/whole"][0]["gradient"])
    assert_same_stats(got, found["deep one/whole"])


@torch.no_grad()
def masked_softmax(folder: Path, column: str) -> list[torch.Tensor]:
    """transformers' column of each sequence, from whole logits, of the tokens that could be drawn alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = with_support(make_step(model.config.vocab_size), model.config.vocab_size)
    counts = batch.columns[SUPPORT + COUNTS].long()
    starts, ids = gathered(batch.columns[SUPPORT], counts, batch.row_starts, batch.row_ids)
    columns = []
    for first, tokens in zip(batch.row_starts.tolist(), batch.split(batch.tokens), strict=True):
        logits, own = model(tokens[None]).logits[0, :-1].double() / 0.8, torch.zeros(len(tokens))
        for place in range(1, len(tokens)):
            support = ids[starts[first + place] : starts[first + place] + counts[first + place]]
            left = logits[place - 1][support] if len(support) else logits[place - 1]
            if column == "entropy":
                own[place] = -(left.softmax(-1) * left.log_softmax(-1)).sum()
            else:
                own[place] = logits[place - 1][tokens[place]] - left.logsumexp(-1)
        columns.append(own)
    return columns


@pytest.mark.full
@pytest.mark.parametrize("column", ["log_probs", "entropy"])
def test_columns_of_tokens_that_could_be_drawn_are_those_of_a_masked_softmax(
    found: Found, folder: Path, column: str
) -> None:
    lengths = make_step(4).lengths
    got, whole = (by_row(found[name], column, lengths) for name in ("narrowed one/actor", "one/actor"))
    assert max((got[row] - whole[row]).abs().max() for row in whole) > 0.5, "it matters"
    for row, expected in enumerate(masked_softmax(folder, column)):
        torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-5)
