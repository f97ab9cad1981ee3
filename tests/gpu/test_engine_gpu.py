"""On a real GPU, one process: every engine trains the same model (Megatron-FSDP wants two)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_cases import Case, run

from megarl.data.tiny import write_tiny_model
from megarl.mcore.training.execution import ExecutionOptions

pytestmark = pytest.mark.gpu
ENGINES = {
    "none": ExecutionOptions("none"),
    "overlap": ExecutionOptions(overlap_grad_reduce=True),
    "uniform": ExecutionOptions(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "offloaded": ExecutionOptions(param_offload=True, optimizer_offload=True),
}


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, seed=1, hidden=128, layers=4, heads=2, kv_heads=2, head_dim=64, ffn=256)
    return Case(str(folder))


@pytest.fixture(scope="module")
def plain(world: None, case: Case) -> dict[str, Any]:  # noqa: ARG001
    torch.backends.cuda.matmul.allow_tf32 = False
    return run(case, "")


@pytest.mark.parametrize("name", ENGINES)
def test_three_steps_end_where_those_without_it_do(plain: dict[str, Any], case: Case, name: str) -> None:
    """Float32; attention's backward pass sums in no fixed order, and three steps of AdamW carry that on."""
    got = run(replace(case, engine=ENGINES[name]), "")
    assert got["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    for weight, expected in plain["weights"].items():
        error = (got["weights"][weight] - expected).abs().max() / expected.abs().max()
        assert error < 1e-3, f"{weight}: relative error {error:.1e}"


def test_muon_trains(plain: dict[str, Any], case: Case) -> None:
    got = run(replace(case, optim="muon"), "")
    assert got["norms"][0] == pytest.approx(plain["norms"][0], rel=1e-4)
    assert all(torch.isfinite(weight).all() for weight in got["weights"].values())
