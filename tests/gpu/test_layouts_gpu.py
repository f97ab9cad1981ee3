"""On several GPUs: Transformer-Engine's layers in bfloat16, as recipes run them, under the layouts of recipes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import Case, Found, Table
from step_cases import ALL_EXPERTS, SHAPE, gradient_error

from megarl.data.examples.tiny import write_tiny_model
from megarl.layout import Layout
from megarl.mcore.training.execution import has_transformer_engine

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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root, tables = tmp_path_factory.mktemp("models"), []
    for family, sizes in LAYOUTS.items():
        settings: dict[str, Any] = {**SHAPE, "layers": 4, **(ALL_EXPERTS if family == "qwen3_moe" else {})}
        folder = str(write_tiny_model(Path(root / family), family=family, tied=False, seed=1, **settings))
        how: dict[str, Any] = {"optim": "adamw", "num_steps": 2, "max_tokens": 4096}
        alone = {"exact": Case("actor", **how), "one": Case("actor", dtype="bfloat16", **how)}
        tables.append(Table(1, folder, {f"{family}/{name}": case for name, case in alone.items()}))
        for size, layouts in sizes.items():
            cases = {name: Case("actor", layout, dtype="bfloat16", **how) for name, layout in layouts.items()}
            tables.append(Table(size, folder, {f"{family}/{name}": case for name, case in cases.items()}))
    return Found(*tables)


@pytest.mark.parametrize(("family", "size", "name"), NAMES)
def test_gradients_norms_and_clipped_steps_are_as_near_to_float32_as_those_of_one_gpu(
    found: Found, family: str, size: int, name: str
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    exact, one, got = (found[f"{family}/{case}"][0] for case in ("exact", "one", name))
    assert got["grad_norms"] == pytest.approx(exact["grad_norms"], rel=0.02)
    for is_of_expert in (False, True) if got["gradient"] and family == "qwen3_moe" else ():  # these are far smaller
        parts = [
            {"gradient": {n: g.cpu() for n, g in of["gradient"].items() if (".experts." in n) is is_of_expert}}
            for of in (got, one, exact)
        ]
        assert gradient_error(parts[0], parts[2]) < 1.5 * gradient_error(parts[1], parts[2])
    if got["gradient"]:
        assert gradient_error(got, exact) < 1.5 * gradient_error(one, exact)
    for weight, expected in exact["after"].items():
        rounding = (one["after"][weight].float() - expected).abs().max()
        assert (got["after"][weight].float() - expected).abs().max() < 2 * rounding + 2**-9 * expected.abs().max()
