"""Parts of a step: an empty iteration, the order of saves and pushes, and the control experiment in numbers."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from config_helpers import load
from run_logs import run_log
from torch import Tensor

from megarl.algo.advantages.estimate import estimate
from megarl.algo.finite import NonFiniteError
from megarl.data.ledger import Ledger
from megarl.metrics.computing.timer import Timer
from megarl.metrics.reading.jsonl import read_lines
from megarl.processes.signals import Signals
from megarl.roles.handles import LATER
from megarl.rollout.prefetch import RolloutBatch
from megarl.samples.batch import Batch, Stats
from megarl.samples.sample import Completion, Prompt, Sample, VersionSpan
from megarl.train import learn, train_step
from megarl.trainer.algorithm import make_algorithm, shuffle_rewards
from megarl.trainer.bad_numbers import BadNumbers
from megarl.trainer.evaluation.evaluate import Evaluation, EvaluationLost
from megarl.trainer.evaluation.in_training import Evaluations
from megarl.trainer.roles import Roles
from megarl.trainer.run import Run
from megarl.trainer.telemetry.run_log import Totals
from megarl.weights.push.report import PushReport


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


def filled(batch: Batch, value: float) -> torch.Tensor:
    return torch.full((batch.num_tokens,), value)


def made() -> Any:
    """An actor that notes what it is asked for; the log-probs of a pass of their own are -2, of an update -3."""
    actor = MagicMock()

    def with_old_log_probs(batch: Batch, columns: Any, **_: Any) -> Batch:
        name, value = ("old_log_probs", -2.0) if columns else (LATER, -4.0)
        return batch.with_columns(**{name: filled(batch, value)})

    def update(batch: Batch, *, seed: int, prepare: Any) -> tuple[Batch, Any]:
        assert "keep" in batch.columns, "the ages are known before"
        old = batch.columns.get(LATER, filled(batch, -3.0))
        return (batch if "old_log_probs" in batch.columns else batch.with_columns(old_log_probs=old)), {}

    actor.with_old_log_probs.side_effect = with_old_log_probs
    actor.update.side_effect = update
    return actor


def learnt(step: int, num_groups: int, *words: str) -> tuple[list[str], Batch, Stats]:
    """What the actor is asked for, and the batch and the statistics of groups of two answers."""
    completion = Completion([5, 6], [-1.0, -1.0], "stop", (VersionSpan(step, 0, 2),))
    group = [Sample.of(Prompt("0-0", [4], ""), completion, reward) for reward in (0.0, 1.0)]
    actor = made()
    more = ("data.train_batch_size=2", "actor.ppo_mini_batch_size=1", "rollout.ahead=1", "rollout.max_age=3")
    algorithm = make_algorithm(load("rollout.n=2", "algorithm.adv_estimator=grpo", *more, *words))
    batch, stats = learn(step, [group] * num_groups, Roles(actor), algorithm, Timer())
    assert batch is not None
    return [name for name, _, _ in actor.method_calls], batch, stats


@pytest.mark.parametrize(
    ("step", "num_groups", "asked", "gap"),
    [
        (0, 1, ["with_old_log_probs", "update"], 1.0),  # a check is due
        (1, 1, ["update"], 2.0),
        (1, 2, ["with_old_log_probs", "update"], 3.0),
    ],
)
def test_old_log_probs_come_from_the_first_step_and_their_gap_is_measured_either_way(
    step: int, num_groups: int, asked: list[str], gap: float
) -> None:
    found, _, stats = learnt(step, num_groups)
    assert found == asked
    assert {"rollout_corr/share_too_old", "rollout_corr/kl"} <= stats.keys()
    assert stats["rollout_corr/log_prob_gap_mean"].result() == gap


def test_what_is_rejected_is_known_before_the_answers_of_a_prompt_are_compared() -> None:
    """Scores 0, 1 and 5; the server's log-probs of the last are far from the trainer's."""
    rollout = {0.0: -1.0, 1.0: -1.0, 5.0: -9.0}
    group = [
        Sample.of(Prompt("0-0", [4], ""), Completion([5], [log_prob], "stop", (VersionSpan(0, 0, 1),)), reward)
        for reward, log_prob in rollout.items()
    ]
    correction = "algorithm.rollout_correction"
    words = (f"{correction}.reject_by=k2", f"{correction}.reject_level=sequence", f"{correction}.reject_high=1")
    how = ("rollout.n=3", "algorithm.adv_estimator=grpo", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1")
    batch, stats = learn(0, [group], Roles(made()), make_algorithm(load(*how, *words)), Timer())
    assert batch is not None and stats["rollout_corr/share_rejected"].result() == pytest.approx(1 / 3)
    advantages = batch.columns["advantages"][batch.columns["response_mask"] != 0]
    assert advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0], abs=1e-5)


def test_the_control_experiment_learns_from_shuffled_rewards() -> None:
    """Four groups whose rewards are 0 and 1; how little that teaches is shown below."""
    right, shuffled = (
        learnt(0, 4, *words)[1].per_sequence["score"].tolist() for words in ((), ("reward.shuffle=true",))
    )
    assert right == [0.0, 1.0] * 4 != shuffled
    assert sorted(shuffled) == sorted(right)


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


def noted() -> Any:
    """A server manager, trackers and a saver that note what they are told; pushes succeed."""
    said = MagicMock(shares_gpus=False, version=3, failed=0)
    said.push.return_value = PushReport(0, 0, 0, 3, {}, {}, {}, [], {})
    said.metrics.return_value = {}
    return said


def story_of(said: Any, *methods: str) -> list[tuple[Any, ...]]:
    return [(name, *given) for name, given, _ in said.mock_calls if name in methods]


def step_of(
    folder: Path,
    step: int,
    said: Any,
    prefetcher: Any,
    roles: Any = None,
    saver: Any = None,
    evaluations: Any = None,
    drains: bool = False,
) -> None:
    """`train_step` of an algorithm that does nothing; each step saves if there is a saver."""
    nobody: Any = None
    log = run_log(folder, said)
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(config=load(*["rollout.ahead=1", "rollout.update=drain"] * drains)),
        prefetcher=prefetcher,
        roles=roles or Roles(nobody),
        algorithm=SimpleNamespace(update_kl=lambda stats: None),
        server_manager=said,
        saver=saver or said,
        times=SimpleNamespace(due=lambda step: saver is not None),
        bad_numbers=BadNumbers("stop", folder),
        log=log,
        evaluations=evaluations or Evaluations(nobody, said, log, said),
    )
    run.push, run.drain = partial(Run.push, run), partial(Run.drain, run)
    train_step(step, run)


def noting_pushes(story: list[Any]) -> Any:
    said = noted()
    report = said.push.return_value
    said.push.side_effect = lambda version: story.append(("push", version)) or report
    return said


def empty() -> Any:
    return Waited(RolloutBatch([], [], {}, {"rollout/lost": 0.0}))


def test_such_an_iteration_pushes_the_weights_it_has_and_is_logged(tmp_path: Path) -> None:
    """Versions count iterations, so the servers get the next number; nobody computes anything."""
    said = noted()
    prefetcher: Any = Waited(
        RolloutBatch([], [], {"filtered": [7]}, {"rollout/lost": 0.0, "rollout/dropped_share": 1.0}, 1e9)
    )
    step_of(tmp_path, 3, said, prefetcher)
    said.push.assert_called_once_with(4)
    ((step, metrics),) = (call.args for call in said.log.call_args_list)
    assert step == 4
    assert metrics["actor/skipped_steps"] == metrics["rollout/dropped_share"] == 1.0
    assert metrics["perf/total_num_tokens"] == 0
    assert metrics["timing_s/gen"] == 0 < metrics["timing_s/reward"], "only rewards were waited for, all the time"
    assert metrics["rollout/idle_share"] == metrics["timing_s/reward"] / metrics["timing_s/step"]
    assert "critic/score/mean" not in metrics
    assert (tmp_path / "samples.jsonl").read_text() == ""
    assert (tmp_path / "visits.jsonl").read_text() == '{"step": 4, "filtered": [7]}\n'
    looks = [("check_servers",), ("poll",)]
    waits = story_of(said, "check_servers", "poll", "stage")
    assert waits == [*looks, ("stage", "gen", 1, 4), *looks, ("stage", "gen", 2, 4), ("poll",)]


@pytest.mark.parametrize(("step", "by_rewards", "ends"), [(0, True, True), (3, True, False), (3, False, True)])
def test_an_evaluation_that_no_reward_could_score_ends_no_run_that_has_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, by_rewards: bool, ends: bool
) -> None:
    def take() -> Evaluation:
        raise EvaluationLost("every prompt was lost", by_rewards=by_rewards)

    said = noted()
    evaluator: Any = Waited(Evaluation([]))
    evaluator.take = take
    log = run_log(tmp_path, said)
    with pytest.raises(EvaluationLost) if ends else nullcontext():
        assert Evaluations(evaluator, said, log, said).measure(step, Signals(1.0)).groups == []
        assert capsys.readouterr().err == "warning: every prompt was lost\n"


def test_answers_without_a_score_are_counted_over_a_run_and_its_continuation() -> None:
    totals = Totals(0.0, {})
    for unscored in (15.0, 16.0):
        totals.add({"rollout/lost": 0.0, "reward/unscored": unscored})
    again = Totals(0.0, totals.state_dict())
    again.add({"rollout/lost": 1.0})
    assert (again.state_dict()["unscored_answers"], again.state_dict()["lost_rollouts"]) == (31, 1)


def test_servers_and_checkpoints_are_looked_after_while_an_evaluation_is_awaited(tmp_path: Path) -> None:
    said = noted()
    evaluator: Any = Waited(Evaluation([]))
    log = run_log(tmp_path, said)
    assert Evaluations(evaluator, said, log, said).measure(3, Signals(1.0)) is evaluator.found
    looks, waits = [("check_servers",), ("poll",)], story_of(said, "check_servers", "poll", "stage")
    assert waits == [("stage", "testing"), *looks, ("stage", "testing", 1, 4), *looks, ("stage", "testing", 2, 4)]
    ((step, logged),) = (call.args for call in said.log.call_args_list)
    assert logged.pop("timing_s/testing") > 0
    assert (step, logged) == (3, {"val/score": 0.0, "val/unscored": 0.0, "val/lost": 0.0})
    said.note_score.assert_called_once_with(3, 0.0)  # by which the best saves are kept
    (line,) = read_lines(tmp_path / "evaluations.jsonl")
    assert (line["step"], line["val/score"], line["prompts"]) == (3, 0.0, [])


def test_a_place_is_counted_on_from_the_sequences_before() -> None:
    found = NonFiniteError("log_probs", 2, 7, float("inf")).moved(10)
    assert found.details == {"column": "log_probs", "sequence": 12, "token": 7, "value": float("inf")}


def test_saves_and_an_evaluation_beside_a_step_have_their_place_in_it(tmp_path: Path) -> None:
    """A save begins while the models have the GPUs, so it takes no turn and no push of its own.

    The evaluation begins after the rollout and ends before the save, which is never newer than one that is still to be
    made, and before the push.  All weights come before any moments, which nobody needs yet: copies share a link.
    """
    story: list[Any] = []

    def resident(name: str) -> Any:
        onload = lambda *, by_default, moments: story.append((name, moments))  # noqa: E731, ARG005
        return SimpleNamespace(onload=onload, offload=lambda: story.append(f"{name} goes"))

    said, prefetcher = noting_pushes(story), empty()
    said.shares_gpus, said.release_memory = True, lambda: story.append("servers release")
    prefetcher.take = lambda: story.append("take") or prefetcher.found
    saver = SimpleNamespace(start=lambda step: story.append(("save", step)), poll=lambda: True, failed=0)
    beside: Any = SimpleNamespace(
        has_begun=True, begin=lambda: story.append("begin"), finish=lambda *_: story.append("finish")
    )
    both = (resident("actor"), resident("ref"))
    step_of(tmp_path, 2, said, prefetcher, Roles(both[0], residents=both), saver, evaluations=beside)
    assert [each for each in story if each not in ("begin", "finish")] == [
        "take",
        "servers release",
        *[(name, moments) for moments in (False, True) for name in ("actor", "ref")],
        ("save", 3),
        "actor goes",
        "ref goes",
        ("push", 3),
    ]
    assert [each for each in story if each in ("take", "begin", "finish", ("save", 3), ("push", 3))] == [
        "take",
        "begin",
        "finish",
        ("save", 3),
        ("push", 3),
    ]


def test_a_checkpoint_holds_the_state_of_the_driver() -> None:
    described: list[Any] = []
    run: Any = Run.__new__(Run)
    run.plan = SimpleNamespace(saves_waiting=True, generated_with={"rollout.n": 2})
    run.log = SimpleNamespace(totals=SimpleNamespace(state_dict=lambda: {"pushes": 2}))
    run.algorithm = SimpleNamespace(kl=SimpleNamespace(state_dict=dict), seed=7)
    watched = SimpleNamespace(spikes=SimpleNamespace(state_dict=lambda: {"loss": [0.5]}))
    run.roles = SimpleNamespace(trainable={"actor": watched, "critic": SimpleNamespace(spikes=None)})
    run.saver = SimpleNamespace(describe=lambda *said: described.append(said))
    run.prefetcher, run.ledger = SimpleNamespace(waiting={3: []}), Ledger("data")
    run.describe_save()
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
def test_a_push_may_wait_for_what_is_generated_as_long_as_a_server_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    story: list[Any] = []
    said, prefetcher = noting_pushes(story), empty()
    said.watch = lambda: story.append("watch") or ends == "idle" or story.count("watch") < 3
    is_idle = property(lambda _: ends == "idle" and story.count("wait") == 2)
    monkeypatch.setattr(Waited, "is_idle", is_idle, raising=False)
    prefetcher.wait = lambda: story.append("wait")
    step_of(tmp_path, 2, said, prefetcher, drains=True)
    assert story == ["watch", "wait"] * 2 + ([("push", 3)] if ends == "idle" else ["watch", ("push", 3)])


PROMPTS, N, LENGTH, WORDS = 64, 8, 3, 5
SHUFFLES = 100
SURE = 4.5  # standard errors: a mean of 0 is farther away in 7 of a million samples


def written() -> Batch:
    """Completions of a policy that chooses each word with the same probability; right are those that begin with 3."""
    tokens = torch.randint(WORDS, (PROMPTS * N, LENGTH), generator=torch.Generator().manual_seed(0))
    values = torch.full((PROMPTS * N * LENGTH,), 0.2)
    return Batch(
        tokens.flatten(),
        torch.full((PROMPTS * N,), LENGTH),
        {"response_mask": torch.ones(PROMPTS * N * LENGTH), "values": values},
        {"score": (tokens[:, 0] == 3).float(), "group": torch.arange(PROMPTS).repeat_interleave(N)},
    )


def gradient(batch: Batch, estimator: str) -> Tensor:
    """[LENGTH, WORDS] of sum A log p by the policy's logits, at the policy that wrote the batch."""
    columns = estimate(batch, adv_estimator=estimator)[0].columns
    chosen = torch.nn.functional.one_hot(batch.tokens, WORDS) - 1 / WORDS  # of log softmax
    return (columns["advantages"][:, None] * chosen).view(-1, LENGTH, WORDS).sum(0)


def taught(estimator: str) -> list[float]:
    """Of many shuffles, how much of the gradient of the right rewards is in theirs: 1 for the right ones."""
    batch = written()
    right = gradient(batch, estimator)
    return [
        float((gradient(shuffle_rewards(batch, seed), estimator) * right).sum() / right.square().sum())
        for seed in range(SHUFFLES)
    ]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_shuffled_rewards_teach_nothing_on_average(estimator: str) -> None:
    """In a random order each sample has the mean reward, so each advantage has the mean 0, and so has the gradient.

    (An advantage depends on the rewards of its group, or batch, in the same way for each sample, and they add up to 0.)
    Seeds are independent: the mean of their shares is within 4.5 of its standard errors, sd / sqrt(SHUFFLES).  One
    shuffle of B samples correlates with the right rewards by 1 / sqrt(B - 1) = 0.044, which bounds the error by 0.024:
    rewards of which one in thirty were right would be seen.
    """
    shares = taught(estimator)
    bound = SURE * stdev(shares) / SHUFFLES**0.5
    assert bound < 1.2 * SURE / (PROMPTS * N - 1) ** 0.5 / SHUFFLES**0.5
    assert abs(mean(shares)) < bound
