"""Small parts of a step: the control experiment, an empty iteration, the order of saves and pushes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_helpers import load

from megarl.algo.finite import NonFiniteError
from megarl.batch import Batch
from megarl.data.ledger import Ledger
from megarl.metrics.jsonl import read_lines
from megarl.metrics.timer import Timer
from megarl.processes.signals import Signals
from megarl.rollout.prefetch import RolloutBatch
from megarl.sample import Completion, Prompt, Sample, VersionSpan
from megarl.train import learn, shuffle_rewards, train_step
from megarl.trainer.algorithm import make_algorithm
from megarl.trainer.artifacts import finish
from megarl.trainer.bad_numbers import BadNumbers
from megarl.trainer.evaluation.evaluate import Evaluation, EvaluationLost
from megarl.trainer.evaluation.measure import measure
from megarl.trainer.observed.run_log import RunLog, Totals
from megarl.trainer.roles import Roles, trainers_turn
from megarl.trainer.run import Run


def test_rewards_that_are_shuffled_stay_together() -> None:
    rows = {"score": torch.arange(8.0), "reward_parts": torch.stack([torch.arange(8.0), -torch.arange(8.0)], 1)}
    batch = Batch(torch.arange(8), torch.ones(8, dtype=torch.int64), {}, {**rows, "group": torch.arange(8)})
    shuffled = shuffle_rewards(batch, 3)
    assert sorted(shuffled.per_sequence["score"].tolist()) == list(range(8))
    assert not torch.equal(shuffled.per_sequence["score"], batch.per_sequence["score"])
    assert torch.equal(shuffled.per_sequence["reward_parts"][:, 0], shuffled.per_sequence["score"])
    assert torch.equal(shuffled.per_sequence["reward_parts"][:, 1], -shuffled.per_sequence["score"])
    assert torch.equal(shuffled.per_sequence["group"], batch.per_sequence["group"])
    alone = shuffle_rewards(Batch(batch.tokens, batch.lengths, {}, {"score": rows["score"]}), 3)
    assert torch.equal(alone.per_sequence["score"], shuffled.per_sequence["score"])


def test_an_iteration_without_a_group_is_a_skipped_step() -> None:
    nothing: Any = None
    batch, stats = learn(5, [], nothing, nothing, Timer())
    assert batch is None
    assert {name: stat.result() for name, stat in stats.items()} == {"actor/skipped_steps": 1.0}


class Made:
    """An actor that notes what it is asked for; the log-probs of a pass of their own are -2, of an update -3."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def columns(self, batch: Batch, names: Any, *, reference: Any) -> dict[str, torch.Tensor]:
        self.asked.append("columns")
        return {"log_probs": torch.full((batch.num_tokens,), -2.0)}

    def later_old_log_probs(self, batch: Batch, *, seed: int) -> torch.Tensor:
        self.asked.append("later")
        return torch.full((batch.num_tokens,), -4.0)

    def update(self, batch: Batch, *, seed: int, prepare: Any, later: Any) -> tuple[Batch, Any]:
        self.asked.append("update")
        assert "keep" in batch.columns, "the ages are known before"
        if "old_log_probs" not in batch.columns:
            old = torch.full((batch.num_tokens,), -3.0)
            batch = batch.with_columns(old_log_probs=old if later is None else later)
        return batch, {}


@pytest.mark.parametrize(
    ("step", "num_groups", "asked", "gap"),
    [
        (0, 1, ["columns", "update"], 1.0),  # a check is due
        (1, 1, ["update"], 2.0),
        (1, 2, ["later", "update"], 3.0),
    ],
)
def test_old_log_probs_come_from_the_first_step_and_their_gap_is_measured_either_way(
    step: int, num_groups: int, asked: list[str], gap: float
) -> None:
    completion = Completion([5, 6], [-1.0, -1.0], "stop", (VersionSpan(step, 0, 2),))
    group = [Sample.of(Prompt("0-0", [4], ""), completion, reward) for reward in (0.0, 1.0)]
    actor: Any = Made()
    more = ("data.train_batch_size=2", "actor.ppo_mini_batch_size=1", "rollout.ahead=1", "rollout.max_age=3")
    algorithm = make_algorithm(load("rollout.n=2", "algorithm.adv_estimator=grpo", *more))
    batch, stats = learn(step, [group] * num_groups, Roles(actor), algorithm, Timer())
    assert batch is not None
    assert actor.asked == asked
    assert {"rollout_corr/share_too_old", "rollout_corr/kl"} <= stats.keys()
    assert stats["rollout_corr/log_prob_gap_mean"].result() == gap


class Waited:
    """A Prefetcher or an Evaluator that is ready at the third question."""

    prompts = ("a prompt",)

    def __init__(self, found: RolloutBatch | Evaluation) -> None:
        self.found, self.questions = found, 0

    def submit(self, version: int) -> None:
        """The servers write, with weights of this version."""
        assert version == 3

    def ready(self) -> bool:
        self.questions += 1
        return self.questions > 2

    @property
    def progress(self) -> tuple[int, int]:
        return self.questions, 4

    def take(self) -> RolloutBatch | Evaluation:
        return self.found


class Noted:
    """A server manager and trackers that write down what they are told; pushes succeed."""

    shares_gpus = False
    version = 3
    failed = 0  # of a saver

    def __init__(self) -> None:
        self.scores: list[tuple[int, float]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.pushed: list[int] = []
        self.waiting: list[Any] = []

    def push(self, version: int) -> dict[str, Any]:
        self.pushed.append(version)
        return {"timings": {}, "num_verified": 3, "compared": [], "unverified": []}

    def check_servers(self) -> None:
        self.waiting.append("checked")

    def poll(self) -> None:
        """Of a saver."""
        self.waiting.append("polled")

    def note_score(self, step: int, score: float) -> None:
        self.scores.append((step, score))

    def metrics(self, report: dict[str, Any]) -> dict[str, float]:
        return {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append((step, metrics))

    def stage(self, *progress: Any) -> None:
        self.waiting.append(progress)


def test_such_an_iteration_pushes_the_weights_it_has_and_is_logged(tmp_path: Path) -> None:
    """Versions count iterations, so the servers get the next number; nobody computes anything."""
    said: Any = Noted()
    prefetcher: Any = Waited(
        RolloutBatch([], [], {"filtered": [7]}, {"rollout/lost": 0.0, "rollout/dropped_share": 1.0}, 1e9)
    )
    algorithm: Any = SimpleNamespace(kl=None)
    nobody: Any = None
    log = RunLog(Timer(), said, Totals(0.0, {}), tmp_path, 1)
    how: Any = {"bad_numbers": BadNumbers("stop", tmp_path), "saves": lambda step: False}
    train_step(3, prefetcher, Roles(nobody), algorithm, said, log, said, **how)
    assert said.pushed == [4]
    ((step, metrics),) = said.logged
    assert step == 4
    assert metrics["actor/skipped_steps"] == metrics["rollout/dropped_share"] == 1.0
    assert metrics["perf/total_num_tokens"] == 0
    assert metrics["timing_s/gen"] == 0 < metrics["timing_s/reward"], "only rewards were waited for, all the time"
    assert metrics["rollout/idle_share"] == metrics["timing_s/reward"] / metrics["timing_s/step"]
    assert "critic/score/mean" not in metrics
    assert (tmp_path / "samples.jsonl").read_text() == ""
    assert (tmp_path / "visits.jsonl").read_text() == '{"step": 4, "filtered": [7]}\n'
    assert said.waiting == ["checked", "polled", ("gen", 1, 4), "checked", "polled", ("gen", 2, 4), "polled"]


@pytest.mark.parametrize(("step", "by_rewards", "ends"), [(0, True, True), (3, True, False), (3, False, True)])
def test_an_evaluation_that_no_reward_could_score_ends_no_run_that_has_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, by_rewards: bool, ends: bool
) -> None:
    def take() -> Evaluation:
        raise EvaluationLost("every prompt was lost", by_rewards=by_rewards)

    said: Any = Noted()
    evaluator: Any = Waited(Evaluation([]))
    evaluator.take = take
    log = RunLog(Timer(), said, Totals(0.0, {}), tmp_path, 1)
    with pytest.raises(EvaluationLost) if ends else nullcontext():
        assert measure(step, evaluator, said, log, said, Signals(1.0)).groups == []
        assert capsys.readouterr().err == "warning: every prompt was lost\n"


def test_servers_and_checkpoints_are_looked_after_while_an_evaluation_is_awaited(tmp_path: Path) -> None:
    said: Any = Noted()
    evaluator: Any = Waited(Evaluation([]))
    log = RunLog(Timer(), said, Totals(0.0, {}), tmp_path, 1)
    assert measure(3, evaluator, said, log, said, Signals(1.0)) is evaluator.found
    assert said.waiting == [
        ("testing",),
        "checked",
        "polled",
        ("testing", 1, 4),
        "checked",
        "polled",
        ("testing", 2, 4),
    ]
    ((step, logged),) = said.logged
    assert logged.pop("timing_s/testing") > 0
    assert (step, logged) == (3, {"val/score": 0.0, "val/unscored": 0.0, "val/lost": 0.0})
    assert said.scores == [(3, 0.0)], "by which the best saves are kept"
    (line,) = read_lines(tmp_path / "evaluations.jsonl")
    assert (line["step"], line["val/score"], line["prompts"]) == (3, 0.0, [])


def test_a_place_is_counted_on_from_the_sequences_before() -> None:
    found = NonFiniteError("log_probs", 2, 7, float("inf")).moved(10)
    assert (found.sequence, found.token, found.column) == (12, 7, "log_probs")
    assert found.details == {"column": "log_probs", "sequence": 12, "token": 7, "value": float("inf")}


def test_a_save_begins_while_the_models_have_the_gpus(tmp_path: Path) -> None:
    """So it takes no turn and no push of its own."""
    story: list[Any] = []
    said: Any = Noted()
    said.shares_gpus = True
    said.release_memory = lambda: story.append("servers release")
    said.push = lambda v: story.append(("push", v)) or Noted.push(said, v)
    resident: Any = SimpleNamespace(
        onload=lambda **how: story.append(("onload", how)), offload=lambda: story.append("offload")
    )
    saver: Any = SimpleNamespace(start=lambda step: story.append(("save", step)), poll=lambda: True, failed=0)
    prefetcher: Any = Waited(RolloutBatch([], [], {}, {"rollout/lost": 0.0}))
    algorithm: Any = SimpleNamespace(kl=None)
    log = RunLog(Timer(), said, Totals(0.0, {}), tmp_path, 1)
    roles = Roles(resident, residents=(resident,))
    how: Any = {"bad_numbers": BadNumbers("stop", tmp_path), "saves": lambda step: True}
    train_step(2, prefetcher, roles, algorithm, said, log, saver, **how)
    come = [("onload", {"by_default": True, "moments": moments}) for moments in (False, True)]
    assert story == ["servers release", *come, ("save", 3), "offload", ("push", 3)]


def test_all_weights_come_to_the_gpus_before_any_moments() -> None:
    """Copies share a link: beside moments, which nobody needs yet, weights would be waited for longer."""
    story: list[Any] = []

    def resident(name: str) -> Any:
        return SimpleNamespace(onload=lambda *, by_default, moments: story.append((name, moments)), offload=lambda: 0)

    said: Any = Noted()
    said.shares_gpus, said.release_memory = True, lambda: None
    both = (resident("actor"), resident("ref"))
    with trainers_turn(Roles(both[0], residents=both), said, Timer()):
        assert story == [("actor", False), ("ref", False), ("actor", True), ("ref", True)]


def test_an_evaluation_beside_a_step_begins_after_its_rollout_and_ends_before_its_save_and_its_push(
    tmp_path: Path,
) -> None:
    """So a save is never newer than an evaluation that is still to be made, and a push never meets one."""
    story: list[Any] = []
    said: Any = Noted()
    said.push = lambda v: story.append(("push", v)) or Noted.push(said, v)
    prefetcher: Any = Waited(RolloutBatch([], [], {}, {"rollout/lost": 0.0}))
    prefetcher.take = lambda: story.append("take") or prefetcher.found
    saver: Any = SimpleNamespace(start=lambda step: story.append(("save", step)), poll=lambda: True, failed=0)
    beside: Any = SimpleNamespace(
        has_begun=True, begin=lambda: story.append("begin"), finish=lambda *_: story.append("finish")
    )
    algorithm: Any = SimpleNamespace(kl=None)
    nobody: Any = None
    log = RunLog(Timer(), said, Totals(0.0, {}), tmp_path, 1)
    how: Any = {"bad_numbers": BadNumbers("stop", tmp_path), "saves": lambda step: True, "beside": beside}
    train_step(3, prefetcher, Roles(nobody), algorithm, said, log, saver, **how)
    assert story == ["take", "begin", "finish", ("save", 4), ("push", 4)]


def test_a_checkpoint_holds_the_state_of_the_driver() -> None:
    described: list[Any] = []
    run: Any = Run.__new__(Run)
    run.saves_waiting = True
    run.generated_with = {"rollout.n": 2}
    run.algorithm = SimpleNamespace(kl=SimpleNamespace(state_dict=dict), seed=7)
    watched = SimpleNamespace(spikes=SimpleNamespace(state_dict=lambda: {"loss": [0.5]}))
    run.roles = SimpleNamespace(trainable={"actor": watched, "critic": SimpleNamespace(spikes=None)})
    run.saver = SimpleNamespace(describe=lambda *said: described.append(said))
    run.prefetcher, run.ledger = SimpleNamespace(waiting={3: []}), Ledger("data")
    run.describe_save({"pushes": 2})
    state = {
        "ledger": Ledger("data").state_dict(),
        "kl": {},
        "spikes": {"actor": {"loss": [0.5]}},
        "generated_with": {"rollout.n": 2},
        "totals": {"pushes": 2},
        "seed": 7,
    }
    assert described == [(state, {3: []})]


@pytest.mark.parametrize("ends", ["idle", "no server"])
def test_a_push_may_wait_for_what_is_generated_as_long_as_a_server_can_go_on(tmp_path: Path, ends: str) -> None:
    story: list[str] = []
    said: Any = Noted()
    said.push = lambda v: story.append("push") or Noted.push(said, v)
    said.watch = lambda: story.append("watch") or ends == "idle" or story.count("watch") < 3
    prefetcher: Any = Waited(RolloutBatch([], [], {}, {"rollout/lost": 0.0}))
    type(prefetcher).is_idle = property(lambda _: ends == "idle" and story.count("wait") == 2)
    prefetcher.wait = lambda: story.append("wait")
    nobody: Any = None
    log = RunLog(Timer(), said, Totals(0.0, {}), tmp_path, 1)
    how: Any = {"bad_numbers": BadNumbers("stop", tmp_path), "saves": lambda step: False, "drains": True}
    algorithm: Any = SimpleNamespace(kl=None)
    train_step(2, prefetcher, Roles(nobody), algorithm, said, log, said, **how)
    assert story == ["watch", "wait"] * 2 + (["push"] if ends == "idle" else ["watch", "push"])


def test_a_model_is_written_when_the_servers_have_given_their_memory_back(tmp_path: Path) -> None:
    story: list[Any] = []
    actor = SimpleNamespace(lora=SimpleNamespace(rank=0))
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            actor=actor, trainer=SimpleNamespace(experiment_name="x"), reward=SimpleNamespace(audit=None)
        ),
        dir=tmp_path,
        trackers=SimpleNamespace(stage=lambda name: None),
        server_manager=SimpleNamespace(
            release_memory=lambda: story.append("servers release"), counts={"servers_died": 0}
        ),
        roles=SimpleNamespace(actor=SimpleNamespace(export=lambda folder, adapter: story.append(folder.name))),
        num_steps=3,
        num_filtered=0,
        num_cut=0,
        val_prompts=[],
    )
    nothing: Any = None
    finish(run, nothing, Totals(0.0, {}))
    assert story == ["servers release", "hf"]
