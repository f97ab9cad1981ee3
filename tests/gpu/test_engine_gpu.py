"""On a real GPU, one process: every engine trains the same model (Megatron-FSDP wants two)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Case, run
from torch import Tensor

from megarl.arch.layout import Layout
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.training.host_memory import HostMemory

pytestmark = pytest.mark.gpu
ENGINES = {
    "none": ExecutionOptions("none"),
    "overlap": ExecutionOptions(overlap_grad_reduce=True),
    "uniform": ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "offloaded": ExecutionOptions(param_offload=True, optimizer_offload=True),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, TinySizes(hidden=128, layers=4, heads=2, kv_heads=2, head_dim=64, ffn=256), seed=1)
    return Case(str(folder))


@pytest.fixture(scope="module")
def plain(world: None, case: Case) -> dict[str, Any]:  # noqa: ARG001
    return run(case, "")


def assert_near(got: dict[str, Tensor], exact: dict[str, Tensor], close: float) -> None:
    for weight, expected in exact.items():
        error = (got[weight] - expected).abs().max() / expected.abs().max()
        assert error < close, f"{weight}: relative error {error:.1e}"


@pytest.mark.parametrize("name", ENGINES)
def test_three_steps_end_where_those_without_it_do(plain: dict[str, Any], case: Case, name: str) -> None:
    """Float32; attention's backward pass sums in no fixed order, and three steps of AdamW carry that on."""
    got = run(replace(case, engine=ENGINES[name]), "")
    assert got["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert_near(got["weights"], plain["weights"], 1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_on_where_the_run_was(world: None, case: Case, tmp_path: Path, dtype: str) -> None:  # noqa: ARG001
    """Two steps, a save, and the third step by a new model and optimizer that were loaded."""
    case = replace(case, dtype=dtype)
    whole, saved = run(case, ""), run(replace(case, saved_under=Layout()), str(tmp_path))
    close = 1e-3 if dtype == "float32" else 2e-2
    assert saved["norms"] == pytest.approx(whole["norms"], rel=close)
    assert_near(saved["weights"], whole["weights"], close)


def test_offloaded_tensors_wait_in_pinned_memory() -> None:
    memory = HostMemory([1000, 3 * 2**20])
    there = torch.arange(1000, device="cuda") % 256
    for part in memory.parts:
        assert part.is_pinned()
        part[:1000].copy_(there.to(torch.uint8), non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory.parts[1][:1000].long(), there.cpu())


def test_muon_trains(plain: dict[str, Any], case: Case) -> None:
    got = run(replace(case, optim="muon"), "")
    assert got["norms"][0] == pytest.approx(plain["norms"][0], rel=1e-4)
    assert all(torch.isfinite(weight).all() for weight in got["weights"].values())
