"""A run that is struck at any moment and started again gives what one gives that nothing happened to, to the last bit.

Struck are a rank, a server, a collector, the driver, or all at once, as by a power failure; by SIGKILL, the driver also
by SIGTERM.  A run goes on without a collector or a server until it has another one, and starts its ranks again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from ring_cases import CHAT, PPO, lines, make_parts, settings, steps
from strikes import Strike, start, weights

pytestmark = pytest.mark.dist

EXIT = {"SIGTERM": 143, "driver": -9, "all": -9}  # the others do not end the run
STAGES = ("gen", "old_log_prob", "values", "update_critic", "update_actor")
STAGES += ("save_checkpoint", "update_weights", "testing")
VICTIMS = ("rank", "server", "collector", "driver", "all", "SIGTERM")
FILTER = ["algorithm.filter_groups.enable=true", "rollout.n=2"]  # two answers are alike often enough
STEPS = ["trainer.total_training_steps=5", "trainer.max_restarts=3"]
KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"]
SAVES = ["trainer.save_freq=2", "trainer.max_checkpoints_to_keep=9", "trainer.test_freq=2"]
# What depends neither on times nor on restarts.  The server's own log-probs, in rollout_corr/, do: their last bits
# depend on which requests it computed together.
NUMBERS = (
    "actor/",
    "critic/",
    "val/",
    "val-core/",
    "val-aux/",
    "reward/",
    "response_length/",
    "prompt_length/",
    "off_policy/",
)


def words_of(parts: Path, runs: Path, name: str, *more: str) -> list[str]:
    return settings(parts, runs, name, *PPO, *KL, *FILTER, *SAVES, *STEPS, *more)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_parts(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def whole(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(parts, tmp_path_factory.mktemp("whole"))


def undisturbed(parts: Path, runs: Path, *more: str) -> Path:
    """The folder of a run that nothing happens to."""
    log = runs / "whole.log"
    assert start("train", words_of(parts, runs, "whole", *more), [], runs / "strikes.json", log) == 0, log.read_text()
    return runs / "whole"


def numbers(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key == "step" or key.startswith(NUMBERS)}
        for row in lines(run / "metrics.jsonl")
    ]


def strike_and_go_on(plan: list[Strike], parts: Path, runs: Path, *more: str, ends: list[int] | None = None) -> Path:
    """Start a run as often as `plan` ends it, the strikes in the order in which they fall; returns its folder.

    `ends`: the exit codes, if they are not those of all strikes that end a run.
    """
    file, log = runs / "strikes.json", runs / "struck.log"
    words = words_of(parts, runs, "struck", *more)
    ends = ends or [EXIT[victim] for _, _, victim in plan if victim in EXIT]
    codes = [start("train", words, plan, file, log)]
    while codes[-1] != 0 and len(codes) <= len(ends):
        codes.append(start("train", words, None, file, log))
    assert codes == [*ends, 0], log.read_text()
    assert json.loads(file.read_text()) == [], "all strikes fell"
    return runs / "struck"


def strike_and_compare(
    plan: list[Strike], parts: Path, whole: Path, runs: Path, *more: str, ends: list[int] | None = None
) -> None:
    run = strike_and_go_on(plan, parts, runs, *more, ends=ends)
    assert numbers(run) == numbers(whole)
    assert weights(run) == weights(whole)
    for name in ("samples.jsonl", "visits.jsonl"):
        assert lines(run / name) == lines(whole / name), name


@pytest.mark.slow
def test_a_run_that_is_struck_everywhere_is_the_same_to_the_bit(parts: Path, whole: Path, tmp_path: Path) -> None:
    """Each victim, each stage and the start; the fourth start begins in the middle of an evaluation's step."""
    plan = [
        (1, "starting servers", "driver"),
        (1, "gen", "collector"),
        (1, "update_actor", "SIGUSR1"),
        (2, "values", "collector"),
        (2, "update_weights", "server"),
        (3, "testing", "driver"),
        (3, "update_critic", "SIGTERM"),
        (4, "save_checkpoint", "all"),
        (5, "old_log_prob", "rank"),
    ]
    strike_and_compare(plan, parts, whole, tmp_path)
    assert max(steps(whole, "rollout/gen_batches").values()) > 1, "dynamic sampling dropped groups"
    saved = [int(folder.name.removeprefix("step_")) for folder in (tmp_path / "struck" / "checkpoints").glob("step_*")]
    assert sorted(saved) == [1, 2, 3, 4, 5], "by SIGUSR1 after step 1, by SIGTERM after 3"


@pytest.mark.long
def test_evaluations_beside_a_step_are_made_once_by_their_own_weights_whatever_dies(
    parts: Path, tmp_path: Path
) -> None:
    """The last strike falls when the evaluation of the save from which the run resumes has been written down."""
    more = ["trainer.eval_beside=true", "trainer.test_freq=1", "rollout.num_servers=2"]
    more += ["trainer.total_training_steps=4"]
    plan = [
        (2, "update_actor", "driver"),
        (3, "testing", "server"),
        (3, "testing", "driver"),
        (4, "testing", "all"),
    ]
    whole = undisturbed(parts, tmp_path, *more)
    strike_and_compare(plan, parts, whole, tmp_path, *more)
    found = lines(tmp_path / "struck/evaluations.jsonl")
    assert [(line["step"], line["version"]) for line in found] == [(step, step) for step in range(5)]
    assert found == lines(whole / "evaluations.jsonl")
    assert sum("val/score" in row for row in lines(tmp_path / "struck/metrics.jsonl")) == 5


LEAD = {
    "in_place": [(2, "gen", "SIGTERM"), (3, "update_weights", "server"), (4, "update_actor", "all")],
    "drain": [(2, "drain", "SIGTERM"), (3, "drain", "server"), (4, "drain", "all")],
}


@pytest.mark.long
@pytest.mark.parametrize("update", LEAD)
def test_with_a_lead_no_visit_is_lost_or_trained_twice(parts: Path, tmp_path: Path, update: str) -> None:
    """The prefetcher is ahead by two iterations, so groups run, wait and are trained when a strike falls."""
    ahead = ["rollout.ahead=2", f"rollout.update={update}", "algorithm.filter_groups.enable=false"]
    run = strike_and_go_on(LEAD[update], parts, tmp_path, *ahead)
    rows = lines(run / "visits.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sorted(visit for row in rows for visit in row["trained"]) == list(range(5 * 4))
    assert not any(row["lost"] or row["filtered"] for row in rows)
    assert set(steps(run, "rollout/collector_restarts").values()) == {0}, "SIGTERM passes them by"


@pytest.mark.long
def test_with_agents_a_run_that_is_struck_is_the_same_to_the_bit(parts: Path, tmp_path: Path) -> None:
    """Episodes of two turns: those that a strike cuts are played again from their first turn."""
    (parts / "chat.py").write_text(CHAT)
    agents = [f"agent.fn={parts}/chat.py:episode", "agent.max_tokens=80", "algorithm.filter_groups.enable=false"]
    plan = [
        (1, "gen", "driver"),
        (2, "gen", "server"),
        (3, "gen", "collector"),
        (3, "update_actor", "rank"),
        (4, "gen", "SIGTERM"),
        (5, "update_weights", "all"),
    ]
    strike_and_compare(plan, parts, undisturbed(parts, tmp_path, *agents), tmp_path, *agents)


@pytest.mark.long
def test_a_run_that_dies_while_it_saves_after_sigterm_is_the_same_to_the_bit(
    parts: Path, whole: Path, tmp_path: Path
) -> None:
    plan = [(3, "update_critic", "SIGTERM"), (4, "saving", "all")]
    strike_and_compare(plan, parts, whole, tmp_path, ends=[EXIT["all"]])


def products() -> Iterator[Any]:
    for stage, victim in product(STAGES, VICTIMS):
        step = {"save_checkpoint": 4, "testing": 5}.get(stage, 3)
        yield pytest.param(step, stage, victim, id=f"{victim} in {stage}")


@pytest.mark.long
@pytest.mark.parametrize(("step", "stage", "victim"), list(products()))
def test_a_run_that_is_struck_once_is_the_same_to_the_bit(
    parts: Path, whole: Path, tmp_path: Path, step: int, stage: str, victim: str
) -> None:
    strike_and_compare([(step, stage, victim)], parts, whole, tmp_path)
