"""What launch/one_gpu.sh measures first, in small on the CPU: nothing is run for the first time on a GPU."""

import math
from argparse import Namespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.step.bench_gpu_parts import PARTS_OF_A_STEP


def measured(part: str, job: str = "dense") -> list[dict[str, Any]]:
    return PARTS_OF_A_STEP[part](Namespace(quick=True, device="cpu", job=job)).rows


@pytest.mark.parametrize("part", [part for part in PARTS_OF_A_STEP if part != "large_job"])
def test_every_part_measures_what_is_here_and_says_why_the_rest_is_not(part: str) -> None:
    for row in measured(part):
        values = [value for value in row.values() if isinstance(value, float)]
        assert all(math.isfinite(value) for value in values)
        assert bool(row.get("not here")) != bool(values), row
    assert not dist.is_initialized()


def test_of_ways_the_products_own_is_always_there_and_right() -> None:
    added = {row["way"]: row for row in measured("add")}
    assert added["as a run does it"]["largest error"] <= 32 * 2**-8, "a sum of 32 products, rounded once to bfloat16"
    attended = {row["way"]: row for row in measured("attention")}
    assert attended["padded buckets"]["apart from the first"] == 0


@pytest.mark.full
@pytest.mark.parametrize("job", ["dense", "experts"])
def test_a_rank_of_a_large_job_builds_steps_and_is_offloaded_without_the_others(job: str) -> None:
    rows = {row["phase"]: row for row in measured("large_job", job)}
    planned = {name: rows[f"planner: {name}"]["GB"] for name in ("weights", "gradients", "optimizer")}
    assert rows["wrap"]["GB"] == pytest.approx(planned["weights"] + planned["gradients"], rel=0.02)
    moments = rows["first step: optimizer"]["GB"] - rows["first step: forward and backward"]["GB"]
    assert moments == pytest.approx(planned["optimizer"], rel=0.1)
    assert list(rows).index("offload") < list(rows).index("onload")
    assert not dist.is_initialized()
