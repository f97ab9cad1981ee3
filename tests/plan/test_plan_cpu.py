"""Memory of a run on the CPUs of one machine, counted by hand."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from plan_jobs import HF, job

from megarl.arch.layout import Layout
from megarl.io import free_memory
from megarl.io.free_memory import free_bytes
from megarl.plan.gpu_budget import fullest
from megarl.plan.host import NUM_PROCESSES, PROCESS_BYTES, cpu_budget
from megarl.plan.job import Role
from megarl.weights.count import whole

MEGABYTE = 10**6


def test_all_roles_stay_and_the_largest_activations_count_on_every_rank():
    critic = Role("critic", HF, Layout(), 2, dtype="float32", max_tokens=50, log_prob_tokens=50)
    own = job(num_ranks=2, dtype="float32", critic=critic, num_servers=1, prompts=3, n=2, longest=10)
    actor, other = fullest(replace(own.actor, max_tokens=60)), fullest(critic)  # all tokens of a step
    assert actor.activations > other.activations
    cached = (
        3 * 2 * 10 * 4 * 2 * HF["num_hidden_layers"] * HF["num_key_value_heads"] * 4
    )  # keys and values, of 4 numbers
    expected = {
        "weights": 2 * 4 * (whole(HF) + whole(HF, "critic")),
        "gradients": 2 * 4 * (whole(HF) + whole(HF, "critic")),
        "optimizer": 2 * 8 * (whole(HF) + whole(HF, "critic")),
        "activations": 2 * actor.activations,
        "servers": 4 * whole(HF) + cached,
        "processes": (2 + 1 + NUM_PROCESSES) * PROCESS_BYTES,
    }
    assert cpu_budget(own) == expected | {"total": sum(expected.values())}
    assert cpu_budget(replace(own, max_total_tokens=20))["servers"] == 4 * whole(HF) + cached // 3
    assert "servers" not in cpu_budget(replace(own, num_servers=0))


@pytest.mark.parametrize(
    ("limit", "used", "idle_files", "free"),
    [("max", 0, 0, None), (9 * MEGABYTE, 5 * MEGABYTE, 2 * MEGABYTE, 6 * MEGABYTE), (2**60, 0, 0, None)],
)
def test_a_containers_limit_counts_and_files_that_it_may_drop_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: object, used: int, idle_files: int, free: int | None
) -> None:
    for name, text in {"max": limit, "current": used, "stat": f"anon 3\ninactive_file {idle_files}"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    available = psutil.virtual_memory().available
    found = free_bytes()
    assert found == free if free is not None else abs(found - available) < 2**30
