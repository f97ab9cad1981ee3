"""On several GPUs: Transformer-Engine's layers in bfloat16, as recipes run them, under the layouts of recipes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import Case, Found, Table
from step_cases import ALL_EXPERTS, SHAPE, gradient_error

from megarl.arch.layout import Layout
from megarl.data.examples.tiny import write_tiny_model
from megarl.mcore.models.execution import has_transformer_engine

SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[int, dict[str, Layout]]] = {
    "qwen3": {
        2: {"tp2+sp": Layout(**SP), "pp2": Layout(pp=2), "cp2": Layout(cp=2), "dp2": Layout()},
        4: {"tp2+sp cp2": Layout(**SP, cp=2), "pp2 vpp2 dp2": Layout(pp=2, vpp=2, use_distributed_optimizer=True)},
        8: {"tp2+sp pp2 dp2": Layout(**SP, pp=2, use_distributed_optimizer=True)},
    },
    "qwen3_moe": {
        2: {"ep2": Layout(ep=2), "tp2+sp": Layout(**SP), "tp2+sp ep2 etp1": Layout(**SP, ep=2, etp=1)},
        8: {"tp2+sp pp2 ep2 etp1 dp2": Layout(**SP, pp=2, ep=2, etp=1, use_distributed_optimizer=True)},
    },
}
NAMES = [
    (family, size, name) for family, sizes in LAYOUTS.items() for size, layouts in sizes.items() for name in layouts
]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_transformer_engine(), reason="Transformer-Engine is not installed"),
]


# Experts have a fifth of the squared norm: without those of one of two ranks it would be 5 % smaller.
SIZES = replace(SHAPE, layers=4)
WIDE_EXPERTS: dict[str, Any] = {**ALL_EXPERTS, "moe_intermediate_size": 512}


def write_family(folder: Path, family: str) -> str:
    experts = WIDE_EXPERTS if family == "qwen3_moe" else {}
    return str(write_tiny_model(folder, SIZES, family=family, tied=False, seed=1, initializer_range=0.1, **experts))


def cases_of(family: str) -> dict[str, Case]:
    """One GPU in float32 and in bfloat16, and every layout in bfloat16."""
    how: dict[str, Any] = {"optim": "adamw", "num_steps": 2, "max_tokens": 4096}
    layouts = {name: layout for of_size in LAYOUTS[family].values() for name, layout in of_size.items()}
    cases = {name: Case("actor", layout, dtype="bfloat16", **how) for name, layout in layouts.items()}
    return {"exact": Case("actor", **how), "one": Case("actor", dtype="bfloat16", **how)} | cases


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root, tables = tmp_path_factory.mktemp("models"), []
    for family, sizes in LAYOUTS.items():
        folder, cases = write_family(root / family, family), cases_of(family)
        for size, names in {1: ("exact", "one"), **sizes}.items():
            tables.append(Table(size, folder, {f"{family}/{name}": cases[name] for name in names}))
    return Found(*tables)


def assert_as_near_to_float32(got: dict[str, Any], one: dict[str, Any], exact: dict[str, Any]) -> None:
    """As `one`, which is computed in bfloat16 on one GPU.  A sharded optimizer leaves no gradient to be looked at."""
    assert got["grad_norms"][0] == pytest.approx(exact["grad_norms"][0], rel=0.02)
    assert got["grad_norms"] == pytest.approx(one["grad_norms"], rel=0.02), "the second is of weights that are rounded"
    for is_of_expert in (False, True) if got["gradient"] else ():
        parts = [
            {"gradient": {n: g.cpu() for n, g in of["gradient"].items() if (".experts." in n) is is_of_expert}}
            for of in (got, one, exact)
        ]
        if parts[2]["gradient"]:
            # Ranks round what they have of a sum before it is added up: 1.8 times as large on CPUs.
            assert gradient_error(parts[0], parts[2]) < 3 * gradient_error(parts[1], parts[2])
    for weight, expected in exact["after"].items():
        rounding = (one["after"][weight].float() - expected).abs().max()
        assert (got["after"][weight].float() - expected).abs().max() < 2 * rounding + 2**-9 * expected.abs().max()


@pytest.mark.parametrize(("family", "size", "name"), NAMES)
def test_gradients_norms_and_clipped_steps_are_as_near_to_float32_as_those_of_one_gpu(
    found: Found, family: str, size: int, name: str
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    exact, one, got = (found[f"{family}/{case}"][0] for case in ("exact", "one", name))
    assert_as_near_to_float32(got, one, exact)
