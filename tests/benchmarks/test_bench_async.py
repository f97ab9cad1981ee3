"""The benchmark of asynchrony: its trace, its servers, its rules, and what it reads."""

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.async_training import bench_async, learning, simulation
from benchmarks.async_training.learning import ASYNC, SYNC, train_words
from benchmarks.async_training.lengths import Trace, lognormal_trace
from benchmarks.async_training.policies import FINISHED, PROMPTS, Rule, simulate
from benchmarks.async_training.sleeping_servers import Sleeper
from benchmarks.async_training.virtual_rollout import VirtualCollectors, VirtualPrompts
from benchmarks.common.page import run
from megarl.config import load_config
from megarl.data.ledger import Ledger
from megarl.rollout.prefetch import Prefetcher, PrefetchSettings
from megarl.rollout.protocol import SamplingParams

PARAMS = SamplingParams(max_new_tokens=1000)


# ---- the trace and its servers


def test_the_trace_is_what_its_law_draws() -> None:
    said = json.loads(simulation.TRACE.read_text())
    law = simulation.read_trace()
    assert (law == lognormal_trace(*law.shape, **said["arguments"])).all()
    assert law.max() > 5 * law.mean() > 25 * law.min(), "a long tail"


def test_versions_change_between_tokens_of_a_sleeping_server() -> None:
    sleeper = Sleeper(np.array([[10]]), token_s=1.0, max_running=1)
    now = time.monotonic()
    sleeper._times += [now + 3.5, now + 6.0, now + 50.0]
    sleeper._versions += [1, 2, 3]
    found = [(span["version"], span["start"], span["end"]) for span in sleeper._spans(now, 10)]
    assert found == [("0", 0, 3), ("1", 3, 6), ("2", 6, 10)]
    assert [span["version"] for span in sleeper._spans(now + 60.0, 4)] == ["3"]


# ---- rules in virtual time


@pytest.mark.parametrize("order", [PROMPTS, FINISHED])
def test_the_prefetcher_takes_what_the_short_rule_takes(order: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        law = lognormal_trace(60, 2, mean=10, longest=80, seed=seed)
        how: dict[str, Any] = {"num_prompts": rng.randint(1, 4), "n": 2, "params": PARAMS, "ahead": rng.randint(0, 3)}
        servers = {"servers": 2, "max_running": rng.randint(2, 6), "piece_tokens": 8, "whole": False}
        train_s, visits, times = rng.choice([0.5, 8.0]), [], []
        for takes_short in (True, False):
            made = VirtualCollectors(Trace(law), **servers)
            if takes_short:
                policy: Any = Rule(order, made, VirtualPrompts(), **how)
            else:
                settings = PrefetchSettings(**how, order=order, num_steps=10**6)
                policy = Prefetcher(made, Ledger("trace"), VirtualPrompts(), settings, clock=lambda: 0.0)
            found = simulate(policy, made, train_s=train_s, steps=15)
            visits.append(found.visits)
            times.append(made.now)
        assert visits[0] == visits[1] and times[0] == pytest.approx(times[1])


def test_only_rules_that_throw_away_lose_and_bias() -> None:
    found = {row["rule"]: row for row in simulation.rows((simulation.Size(4, 48, steps=60),))}
    assert list(found) == [*simulation.RULES, simulation.DYING]
    for rule in (PROMPTS, FINISHED, simulation.DYING):
        row = found[rule]
        assert row["prompts lost"] == row["doubled"] == 0 and row["KS distance"] < 0.06
    assert found["drop"]["KS distance"] > 0.1 and found["drop"]["prompts lost"] > 0.05
    assert found["first of 1.5 B"]["mean length"] < 0.7
    assert found["requeue"]["tokens wasted"] > 0.2 > found[simulation.DYING]["tokens wasted"] > 0
    assert found[FINISHED]["step"] < 0.6 * found[PROMPTS]["step"]
    assert found[FINISHED]["tokens wasted"] == 0


# ---- learning


@pytest.mark.parametrize("side", [SYNC, ASYNC])
def test_a_run_is_a_configuration_that_is_accepted(side: tuple[str, ...], tmp_path: Path) -> None:
    words = train_words(Path("runs/quickstart_sft/hf"), tmp_path, "run", learning.USUAL, 3)
    config, _ = load_config([*words[1:], *side, "rollout.urls=[http://127.0.0.1:1,http://127.0.0.1:2]"])
    assert (config.trainer.total_training_steps, config.trainer.seed) == (60, 3)
    assert config.rollout.ahead == (0 if side is SYNC else 2)


def test_the_simulation_alone_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--parts", "simulation", "--quick", "--json", "--out", str(tmp_path)]
    assert run(bench_async.work, bench_async.parser(), words) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["rule"] for row in said["rows"]] == [*simulation.RULES, simulation.DYING]
    assert "trace_ratio" not in said and "lost" not in said, "nothing of these was measured"
    (page,) = tmp_path.glob("async_quick*.md")
    assert "KS distance" in page.read_text()
