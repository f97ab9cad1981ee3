"""The benchmark of asynchrony: its trace, its servers, its rules, what it reads, and whole small runs."""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import async_learning
import async_simulation
import async_trace
import bench_async
import numpy as np
import pytest
from async_learning import ASYNC, SYNC, dots, ratios, read_run, train_words, write_long_tail
from async_policies import FINISHED, PROMPTS, Rule, ks_distance, simulate
from async_reward import score
from async_servers import Sleeper, prompt_of, visit_of
from page import EXIT_USAGE, run
from virtual_rollout import Trace, VirtualCollectors, VirtualPrompts, lognormal_trace

from megarl.config import load_config
from megarl.data.ledger import Ledger
from megarl.rollout.prefetch import Prefetcher
from megarl.rollout.protocol import SamplingParams

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_new_tokens=1000)


# ---- the trace and its servers


def test_the_trace_is_what_its_law_draws() -> None:
    said = json.loads(async_simulation.TRACE.read_text())
    law = async_simulation.read_trace()
    assert (law == lognormal_trace(*law.shape, **said["arguments"])).all()
    assert law.max() > 5 * law.mean() > 25 * law.min(), "a long tail"


def test_a_prompt_names_its_visit() -> None:
    for number in (0, 1, 63, 64, 65, 4097, 64**4 - 1):
        assert visit_of([*prompt_of(number).token_ids, 9, 9]) == number
    assert prompt_of(65).token_ids == [7, 7, 6, 6]


def test_versions_change_between_tokens_of_a_sleeping_server() -> None:
    sleeper = Sleeper(np.array([[10]]), token_s=1.0, max_running=1)
    now = time.monotonic()
    sleeper._times += [now + 3.5, now + 6.0, now + 50.0]
    sleeper._versions += [1, 2, 3]
    found = [(span["version"], span["start"], span["end"]) for span in sleeper._spans(now, 10)]
    assert found == [("0", 0, 3), ("1", 3, 6), ("2", 6, 10)]
    assert [span["version"] for span in sleeper._spans(now + 60.0, 4)] == ["3"]


def test_a_sleeping_server_writes_a_completion_in_pieces_of_any_size() -> None:
    """Row 2 of the trace, column 1: 7 tokens, in pieces of three."""
    sleeper = Sleeper(np.array([[1, 1], [1, 1], [4, 7]]), token_s=1e-4, max_running=4)

    class Request:
        def __init__(self, written: int) -> None:
            self.written = written

        async def json(self) -> dict[str, Any]:
            ids = [*prompt_of(2).token_ids, *range(6, 6 + self.written)]
            return {"input_ids": ids, "sampling_params": {"sampling_seed": 5, "max_new_tokens": 3}}

    async def piece(written: int) -> tuple[int, str]:
        reply = json.loads((await sleeper.generate(Request(written))).body)  # type: ignore[arg-type]
        return len(reply["output_ids"]), reply["meta_info"]["finish_reason"]["type"]

    assert [asyncio.run(piece(written)) for written in (0, 3, 6)] == [(3, "length"), (3, "length"), (1, "stop")]


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
                more = {"order": order, "first_step": 0, "num_steps": 10**6, "clock": lambda: 0.0}
                policy = Prefetcher(made, Ledger("trace"), VirtualPrompts(), **how, **more)
            found = simulate(policy, made, train_s=train_s, steps=15)
            visits.append(found.visits)
            times.append(made.now)
        assert visits[0] == visits[1] and times[0] == pytest.approx(times[1])


def test_a_distance_of_distributions_by_hand() -> None:
    assert ks_distance(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 4])) == 0
    assert ks_distance(np.array([1, 1, 1, 4]), np.array([1, 2, 3, 4])) == pytest.approx(0.5)


def test_only_rules_that_throw_away_lose_and_bias() -> None:
    found = {row["rule"]: row for row in async_simulation.rows((async_simulation.Size(4, 48, steps=60),))}
    assert list(found) == [*async_simulation.RULES, async_simulation.DYING]
    for rule in (PROMPTS, FINISHED, async_simulation.DYING):
        row = found[rule]
        assert row["prompts lost"] == row["doubled"] == 0 and row["KS distance"] < 0.06
    assert found["drop"]["KS distance"] > 0.1 and found["drop"]["prompts lost"] > 0.05
    assert found["first of 1.5 B"]["mean length"] < 0.7
    assert found["requeue"]["tokens wasted"] > 0.2 > found[async_simulation.DYING]["tokens wasted"] > 0
    assert found[FINISHED]["step"] < 0.6 * found[PROMPTS]["step"]
    assert found[FINISHED]["tokens wasted"] == 0


# ---- learning


def test_answers_of_the_cold_start_have_a_long_tail(tmp_path: Path) -> None:
    drawn = [dots(random.Random(seed)) for seed in range(4000)]
    assert fmean(drawn) == pytest.approx(async_learning.MEAN_DOTS, rel=0.1)
    assert min(drawn) <= 1 and max(drawn) == async_learning.MOST_DOTS
    write_long_tail(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    lengths = [len(row["response"]) + 1 for row in rows]  # a token a character, and the end
    assert min(lengths) <= 4 and 60 < max(lengths) <= async_learning.MOST_TOKENS
    assert rows[0]["response"].rstrip(".").isdigit()


def test_dots_behind_the_number_do_not_count() -> None:
    assert [score("", text, "46") for text in ("46", "46....", "46.5", "4 6", "...46")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("side", [SYNC, ASYNC])
def test_a_run_is_a_configuration_that_is_accepted(side: tuple[str, ...], tmp_path: Path) -> None:
    write_long_tail(tmp_path / "data")
    words = train_words(Path("runs/quickstart_sft/hf"), tmp_path, "run", async_learning.USUAL, 3)
    config, _ = load_config([*words[1:], *side, "rollout.urls=[http://127.0.0.1:1,http://127.0.0.1:2]"])
    assert (config.trainer.total_training_steps, config.trainer.seed) == (60, 3)
    assert config.rollout.ahead == (0 if side is SYNC else 2)


def write_run(folder: Path, accuracy: float, step_s: float, visits: list[list[int]]) -> None:
    folder.mkdir(parents=True)
    rows = [{"step": 0, "val/score": 0.4}]
    for step in range(4):
        more = {"response_length/mean": 10.0, "response_length/max": 50 + step, "rollout/lost": 0.0}
        rows.append({"step": step + 1, "timing_s/step": step_s, "time": 100 + step_s * step, **more})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"accuracy_before": 0.4, "accuracy_after": accuracy}))
    lines = [json.dumps({"step": step + 1, "trained": each}) + "\n" for step, each in enumerate(visits)]
    (folder / "visits.jsonl").write_text("".join(lines))


def test_a_finished_run_says_its_time_accuracy_and_visits(tmp_path: Path) -> None:
    setting = async_learning.Setting(steps=4, warmup=1)
    write_run(tmp_path / "run", 0.9, 2.0, [[0, 1], [2, 3], [4, 5], [5, 6]])
    found = read_run(tmp_path / "run", setting)
    assert (found["seconds"], found["step"], found["accuracy after"]) == (6.0, 2.0, 0.9)
    assert (found["longest"], found["lost"], found["doubled"]) == (53, 0, 1)
    with pytest.raises(ValueError, match="4 steps, expected 60"):
        read_run(tmp_path / "run", async_learning.USUAL)


def test_ratios_compare_the_sides_of_a_round() -> None:
    def row(side: tuple[str, ...], number: int, seconds: float, accuracy: float) -> dict[str, Any]:
        return {"rule": " ".join(side), "round": number, "seconds": seconds, "accuracy after": accuracy}

    found = ratios(
        [
            row(SYNC, 1, 10.0, 0.90), row(ASYNC, 1, 5.0, 0.91), row(ASYNC, 2, 4.0, 0.92), row(SYNC, 2, 10.0, 0.92),
            row(SYNC, 3, 20.0, 0.94), row(ASYNC, 3, 14.0, 0.93),
        ]
    )  # fmt: skip
    assert found == {"wall_ratio": 0.5, "accuracy_difference": pytest.approx(0.0)}


# ---- the script


def settings(*words: str) -> Any:
    return bench_async.settings(bench_async.parser().parse_args(words))


def test_sizes_follow_the_options() -> None:
    assert settings() == (async_learning.USUAL, async_trace.USUAL, async_simulation.SIZES)
    learning, trace, sizes = settings("--quick", "--steps", "9", "--servers", "7")
    assert (learning.steps, trace, sizes[0].servers) == (9, async_trace.QUICK, 7)
    assert settings("--engine", "sglang", "--decode-sleep-ms", "7")[0].sleep_ms == 7.0
    with pytest.raises(ValueError, match="--steps 3: expected more than the 3 that do not count"):
        settings("--steps", "3")


def test_sglang_without_its_environment_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGARL_SGLANG_PYTHON", str(tmp_path / "nowhere"))
    words = ["--device", "cpu", "--parts", "learning", "--engine", "sglang", "--out", str(tmp_path)]
    assert run(bench_async.work, bench_async.parser(), words) == EXIT_USAGE
    assert "--engine sglang: sglang: not measured, there is no environment" in capsys.readouterr().err


def test_the_simulation_alone_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--parts", "simulation", "--quick", "--json", "--out", str(tmp_path)]
    assert run(bench_async.work, bench_async.parser(), words) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["rule"] for row in said["rows"]] == [*async_simulation.RULES, async_simulation.DYING]
    assert "trace_ratio" not in said and "lost" not in said, "nothing of these was measured"
    (page,) = tmp_path.glob("async_quick*.md")
    assert "KS distance" in page.read_text()


def whole(words: list[str], out: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks/bench_async.py"), "--device", "cpu", "--quick", "--json", *words]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.long
def test_collectors_and_sleeping_servers_over_loopback(tmp_path: Path) -> None:
    said = whole(["--parts", "trace"], tmp_path)
    strict, finished = said["rows"]
    assert said["lost"] == said["doubled"] == 0 and math.isfinite(said["trace_ratio"])
    sizes = async_trace.QUICK
    assert strict["completions"] == finished["completions"] == sizes.steps * sizes.prompts * sizes.n
    assert strict["token age mean"] > 0 and finished["token age mean"] > 0, "pushes come while completions run"


@pytest.mark.long
@pytest.mark.dist
def test_learning_in_small(tmp_path: Path) -> None:
    said = whole(["--parts", "learning"], tmp_path)
    assert said["lost"] == said["doubled"] == 0 and said["wall_ratio"] > 0
    assert -1 <= said["accuracy_difference"] <= 1
    assert {row["kind"] for row in said["rows"]} == {"learning, hf"}
