"""Each benchmark in its smallest form, as its user starts it: the figures it prints last, its rows and its files."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.async_training import loopback
from benchmarks.peer.bench_peer import WAYS, run_side
from benchmarks.peer.task import Work
from benchmarks.push.plan_cost import plan_cost
from benchmarks.ring import bench_ring

ROOT = Path(__file__).parents[2]
QUICK = ["--device", "cpu", "--quick", "--json"]
Check = Callable[[dict[str, Any]], None]


def check_trace(said: dict[str, Any]) -> None:
    sizes = loopback.QUICK
    assert said["lost"] == said["doubled"] == 0 and math.isfinite(said["trace_ratio"])
    for row in said["rows"]:
        assert row["completions"] == sizes.steps * sizes.prompts * sizes.n
        assert row["token age mean"] > 0, "pushes come while completions run"


def check_learning(said: dict[str, Any]) -> None:
    assert said["lost"] == said["doubled"] == 0 and said["wall_ratio"] > 0
    assert -1 <= said["accuracy_difference"] <= 1
    assert {row["kind"] for row in said["rows"]} == {"learning, hf"}


def check_logprobs(said: dict[str, Any]) -> None:
    assert {row["num_tokens"] for row in said["rows"]} == {64, 256}
    assert not any(row["note"] for row in said["rows"]), "nothing was left out"


def check_push(said: dict[str, Any]) -> None:
    assert [row["transport"] for row in said["rows"]] == ["gathered", "shared", "sharded"]
    assert all(row["push_s"] > 0 and not row["note"] for row in said["rows"])


def check_ring(said: dict[str, Any]) -> None:
    stages = {row["stage"]: row["share"] for row in said["rows"]}
    assert {"gen", "ref", "values", "update_critic", "update_actor", "update_weights", "log"} <= set(stages)
    assert sum(share for stage, share in stages.items() if stage != "step") == pytest.approx(1, abs=1e-6)
    is_too_much = said["unaccounted"] > bench_ring.MOST_LOST  # on a loaded machine it may be
    assert any("in no stage" in note for note in said["notes"]) == is_too_much


def check_rollout(said: dict[str, Any]) -> None:
    found = [(row["engine"], row["client"]) for row in said["rows"]]
    assert found == [(engine, client) for engine in ("hf", "instant") for client in ("ring", "bare")]
    assert len({row["tokens"] for row in said["rows"]}) == 1


def check_scale(said: dict[str, Any]) -> None:
    kinds = {(row["kind"], row["what"]) for row in said["rows"]}
    assert kinds >= {("ranks", "training step"), ("hollow", "empty call"), ("model", "calls of a step")}


# script: its words, the beginning of its last figure's name, and what its numbers must say
FULL = {"logprobs": ("", "memory_plain_over_", check_logprobs)}
LONG = {
    "async trace": ("--parts trace", "doubled", check_trace),
    "async learning": ("--parts learning", "doubled", check_learning),
    "push": ("--engines hf", "hf_sharded_of_copy", check_push),
    "ring": ("data.train_batch_size=8 rollout.n=2", "mfu_step", check_ring),
    "rollout": ("--engines hf instant", "ring_over_bare", check_rollout),
    "scale": ("", "model_off_error", check_scale),
}
RUNS = [pytest.param(name, *run, marks=pytest.mark.full, id=name) for name, run in FULL.items()]
RUNS += [pytest.param(name, *run, marks=pytest.mark.long, id=name) for name, run in LONG.items()]


@pytest.mark.dist
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("name", "words", "last", "check"), RUNS)
def test_a_script_prints_its_figures_last_and_writes_its_page(
    name: str, words: str, last: str, check: Check, tmp_path: Path
) -> None:
    (script,), out = (ROOT / "benchmarks").glob(f"*/bench_{name.split()[0]}.py"), tmp_path / "out"
    command = [sys.executable, str(script), *QUICK, "--out", str(out), *words.split()]
    variables = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    figure = list(said)[-1]
    assert figure.startswith(last) and math.isfinite(said[figure])
    check(said)
    assert {file.suffix for file in out.iterdir()} >= {".json", ".md"}


@pytest.mark.long
def test_a_rank_plans_a_trillion_parameters_in_little_memory() -> None:
    cost = plan_cost(1)
    assert cost.parameters > 10**12 and cost.messages > 100
    assert cost.extra_bytes < 256 << 20


@pytest.mark.long
@pytest.mark.dist
def test_our_side_of_the_comparison_with_trl_writes_answers_of_one_length(tmp_path: Path) -> None:
    work = Work(str(tmp_path), new_tokens=4, iterations=3, warmup=1, threads=2, prompts=4, n=2)
    work.write()
    found = run_side(work, WAYS[0], Path("unused"), "run")  # raises if an answer had another length
    assert found["tokens/s"] > 0 and found["gen"] > 0
