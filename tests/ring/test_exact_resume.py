"""A run that is struck at any moment and started again gives what one gives that nothing happened to, to the last bit.

Struck are a rank, a server, a collector, the driver, or all at once, as by a power failure; by SIGKILL, and all at once
also by SIGTERM, as by a scheduler.  A run goes on without a collector or a server until it has another one, and starts
its ranks again.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from ring_cases import CHAT, PPO, lines, settings, steps
from strikes import Strike, lives, weights

from megarl.trainer.checkpoint.checkpoint import ROLLOUTS, all_checkpoints

pytestmark = pytest.mark.dist

STAGES = ("gen", "old_log_prob", "values", "update_critic", "update_actor")
STAGES += ("save_checkpoint", "update_weights", "testing")
VICTIMS = ("rank", "server", "collector", "driver", "all", "SIGTERM")
FILTER = ["algorithm.filter_groups.enable=true", "rollout.n=2"]  # two answers are alike often enough
STEPS = ["trainer.total_training_steps=5", "trainer.max_restarts=3"]
KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=100"]
SAVES = ["trainer.save_freq=2", "trainer.max_checkpoints_to_keep=9", "trainer.test_freq=2"]
# What depends neither on times nor on restarts.  The server's own log-probs, in rollout_corr/, do: their last bits
# depend on which requests it computed together.
NUMBERS = ("actor/", "critic/", "val", "reward/", "response_length/", "prompt_length/", "off_policy/")


def words_of(parts: Path, runs: Path, name: str, *more: str) -> list[str]:
    return settings(parts, runs, name, *PPO, *KL, *FILTER, *SAVES, *STEPS, *more)


@pytest.fixture(scope="module")
def whole(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    struck("whole", [], parts, folder)
    return folder / "whole"


def struck(name: str, plan: list[Strike], parts: Path, runs: Path, *more: str) -> list[int]:
    return lives("train", words_of(parts, runs, name, *more), plan, runs / "strikes.json", runs / f"{name}.log")


def numbers(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key == "step" or key.startswith(NUMBERS)}
        for row in lines(run / "metrics.jsonl")
    ]


def assert_same(run: Path, whole: Path) -> None:
    assert numbers(run) == numbers(whole)
    assert weights(run) == weights(whole)
    for name in ("samples.jsonl", "visits.jsonl"):
        assert lines(run / name) == lines(whole / name), name


@pytest.mark.full
def test_a_run_that_is_struck_everywhere_is_the_same_to_the_bit(parts: Path, whole: Path, tmp_path: Path) -> None:
    """Each victim, each stage and the start.

    The third start begins in the middle of an evaluation's step, and is killed while it saves after SIGTERM.
    """
    plan = [
        (1, "starting servers", "driver"),
        (1, "gen", "collector"),
        (1, "update_actor", "SIGUSR1"),
        (2, "values", "collector"),
        (3, "testing", "driver"),
        (3, "update_critic", "SIGTERM"),
        (4, "saving", "all"),
        (3, "update_critic", "SIGTERM"),
        (4, "save_checkpoint", "all"),
        (4, "update_weights", "server"),
        (5, "old_log_prob", "rank"),
    ]
    assert struck("struck", plan, parts, tmp_path) == [-9, -9, -9, 143, -9, 0]
    assert_same(tmp_path / "struck", whole)
    assert max(steps(whole, "rollout/gen_batches").values()) > 1, "dynamic sampling dropped groups"
    saved = [int(folder.name.removeprefix("step_")) for folder in (tmp_path / "struck" / "checkpoints").glob("step_*")]
    assert sorted(saved) == [1, 2, 3, 4, 5], "by SIGUSR1 after step 1, by SIGTERM after 3"


LEAD = {
    "in_place": [(2, "gen", "SIGTERM"), (3, "update_weights", "server"), (4, "update_actor", "all")],
    "drain": [(2, "drain", "SIGTERM"), (3, "drain", "server"), (4, "drain", "all")],
}


@pytest.mark.parametrize(
    "update", [pytest.param("in_place", marks=pytest.mark.full), pytest.param("drain", marks=pytest.mark.long)]
)
def test_with_a_lead_no_visit_is_lost_or_settled_twice(parts: Path, tmp_path: Path, update: str) -> None:
    """The prefetcher is ahead by two iterations, so groups run, wait and are trained when a strike falls."""
    filters = update == "in_place"
    ahead = ["rollout.ahead=2", f"rollout.update={update}", f"algorithm.filter_groups.enable={str(filters).lower()}"]
    assert struck("ahead", LEAD[update], parts, tmp_path, *ahead) == [143, -9, 0]
    rows = lines(tmp_path / "ahead" / "visits.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    trained, filtered = ([visit for row in rows for visit in row[outcome]] for outcome in ("trained", "filtered"))
    assert len(trained) == 5 * 4 and bool(filtered) == filters
    assert not any(row["lost"] for row in rows)
    settled = sorted(trained + filtered)
    assert settled == sorted(set(settled)), "none twice"
    assert filters or settled == list(range(5 * 4))
    last = all_checkpoints(tmp_path / "ahead" / "checkpoints")[-1]
    ledger = json.loads((last.folder / "manifest.json").read_text())["state"]["ledger"]
    assert ledger["trained"] == 5 * 4 and (filters or ledger["open"] == [])
    assert (last.folder / ROLLOUTS).is_dir()
    assert set(steps(tmp_path / "ahead", "rollout/collector_restarts").values()) == {0}, "SIGTERM passes them by"


@pytest.mark.long
def test_with_agents_a_run_that_is_struck_is_the_same_to_the_bit(parts: Path, tmp_path: Path) -> None:
    """Episodes of two turns: those that a strike cuts are played again from their first turn."""
    (parts / "chat.py").write_text(CHAT)
    agents = [f"agent.fn={parts}/chat.py:episode", "agent.max_tokens=80", "algorithm.filter_groups.enable=false"]
    agents += ["trainer.total_training_steps=3", "trainer.test_freq=-1"]
    plan = [(1, "gen", "server"), (2, "gen", "collector"), (2, "update_actor", "rank"), (3, "gen", "all")]
    plan.append((3, "gen", "SIGTERM"))
    assert struck("whole", [], parts, tmp_path, *agents) == [0]
    assert struck("struck", plan, parts, tmp_path, *agents) == [-9, 143, 0]
    assert_same(tmp_path / "struck", tmp_path / "whole")


def products() -> Iterator[Any]:
    for stage, victim in product(STAGES, VICTIMS):
        step = {"save_checkpoint": 4, "testing": 5}.get(stage, 3)
        yield pytest.param(step, stage, victim, id=f"{victim} in {stage}")


@pytest.mark.long
@pytest.mark.parametrize(("step", "stage", "victim"), list(products()))
def test_a_run_that_is_struck_once_is_the_same_to_the_bit(
    parts: Path, whole: Path, tmp_path: Path, step: int, stage: str, victim: str
) -> None:
    exits = {"SIGTERM": [143], "driver": [-9], "all": [-9]}  # the others do not end the run
    assert struck("struck", [(step, stage, victim)], parts, tmp_path) == [*exits.get(victim, []), 0]
    assert_same(tmp_path / "struck", whole)


EVALUATED = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=4"]
EVALUATED += ["trainer.test_freq=1", "reward.audit=exact", "trainer.save_freq=2", "rollout.num_servers=2"]
EVALUATED += ["rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0", "actor.optim.lr=3e-2"]


@pytest.mark.full
def test_evaluations_beside_the_training_are_those_in_its_way_whatever_dies(parts: Path, tmp_path: Path) -> None:
    """The last strike falls when the evaluation of the save from which the run resumes has been written down."""
    strikes = [(2, "update_actor", "driver"), (3, "testing", "server"), (3, "testing", "driver"), (4, "testing", "all")]
    found = {}
    for name, plan, beside in (("in_its_way", [], "false"), ("beside", strikes, "true")):
        words = settings(parts, tmp_path, name, *EVALUATED, f"trainer.eval_beside={beside}")
        codes = lives("train", words, plan, tmp_path / "strikes.json", tmp_path / "log")
        assert codes == ([-9, -9, -9, 0] if plan else [0])
        found[name] = lines(tmp_path / name / "evaluations.jsonl")
        assert [(line["step"], line["version"]) for line in found[name]] == [(step, step) for step in range(5)]
        logged = steps(tmp_path / name, "val-core/arithmetic/acc/mean@2")
        assert sorted(logged) == [*range(5)] and "val-aux/arithmetic/acc/mean@2/stderr" in found[name][0]
        assert all(len(prompt["audit"]) == len(prompt["reward"]) == 2 for prompt in found[name][0]["prompts"])
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["evaluated_version"] == 4 and summary["score_before"] == logged[0]
        assert "reward/audit" in lines(tmp_path / name / "metrics.jsonl")[-2], "the training's answers are audited, too"
    assert found["in_its_way"] == found["beside"]
    assert weights(tmp_path / "in_its_way") == weights(tmp_path / "beside")
    assert found["beside"][0]["prompts"] != found["beside"][2]["prompts"], "the answers of two policies"
    first = next(line for line in lines(tmp_path / "beside/metrics.jsonl") if "timing_s/step" in line)
    assert "timing_s/testing" in first, "the evaluation of the start was beside a step"
    assert sorted(steps(tmp_path / "in_its_way", "timing_s/testing")) == [*range(5)]
