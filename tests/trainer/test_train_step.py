"""Small parts of a step: the control experiment, an empty iteration, the name of a sample in an error."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algo.finite import NonFiniteError
from megarl.metrics.timer import Timer
from megarl.rollout.prefetch import RolloutBatch
from megarl.sample import Batch, Completion, Prompt, Sample, VersionSpan
from megarl.train import learn, measure, samples_named, shuffle_rewards, train_step
from megarl.trainer.artifacts import finish
from megarl.trainer.evaluate import Evaluation
from megarl.trainer.roles import Roles
from megarl.trainer.run import Run
from megarl.trainer.run_log import RunLog, Totals


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


class Waited:
    """A Prefetcher or an Evaluator that is ready at the third question."""

    prompts = ("a prompt",)

    def __init__(self, found: RolloutBatch | Evaluation) -> None:
        self.found, self.questions = found, 0

    def submit(self) -> None:
        """The servers write."""

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

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.pushed: list[int] = []
        self.waiting: list[Any] = []

    def push(self, version: int) -> dict[str, Any]:
        self.pushed.append(version)
        return {"timings": {}, "num_verified": 3, "compared": [], "unverified": []}

    def check_servers(self) -> None:
        self.waiting.append("checked")

    def metrics(self, report: dict[str, Any]) -> dict[str, float]:
        return {}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append((step, metrics))

    def stage(self, *progress: Any) -> None:
        self.waiting.append(progress)


def test_such_an_iteration_pushes_the_weights_it_has_and_is_logged(tmp_path: Path) -> None:
    """Versions count iterations, so the servers get the next number; nobody computes anything."""
    said: Any = Noted()
    prefetcher: Any = Waited(RolloutBatch([], [], {"position": 4}, {"dropped_share": 1.0, "gen_batches": 1.0}))
    algorithm: Any = SimpleNamespace(kl=None)
    nobody: Any = None
    log = RunLog(Timer(), said, Totals(0.0, {}), tmp_path / "samples.jsonl", 1)
    assert train_step(3, prefetcher, Roles(nobody), algorithm, said, log) == {"position": 4}
    assert said.pushed == [4]
    ((step, metrics),) = said.logged
    assert step == 4
    assert metrics["actor/skipped_steps"] == metrics["rollout/dropped_share"] == 1.0
    assert metrics["perf/total_num_tokens"] == 0
    assert "critic/score/mean" not in metrics
    assert (tmp_path / "samples.jsonl").read_text() == ""
    assert said.waiting == ["checked", ("gen", 1, 4), "checked", ("gen", 2, 4)], "servers, while the batch is awaited"


def test_the_servers_are_looked_after_while_an_evaluation_is_awaited(tmp_path: Path) -> None:
    said: Any = Noted()
    evaluator: Any = Waited(Evaluation([]))
    log = RunLog(Timer(), said, Totals(0.0, {}), tmp_path / "samples.jsonl", 1)
    assert measure(3, evaluator, said, log) is evaluator.found
    assert said.waiting == ["checked", ("evaluate", 1, 4), "checked", ("evaluate", 2, 4)]
    assert said.logged == [(3, {"val/score": 0.0, "val/lost": 0.0})]


def test_a_number_that_is_not_finite_is_told_with_its_sample() -> None:
    completion = Completion([7], [-0.5], "stop", (VersionSpan(0, 0, 1),))
    groups = [[Sample(Prompt(f"0-{row}", [5], ""), completion, 1.0)] * 2 for row in (4, 9)]
    with (
        pytest.raises(NonFiniteError, match=r"^old_log_probs is nan at token 1 of sample 0-9#1, where the policy"),
        samples_named(groups),
    ):
        raise NonFiniteError("old_log_probs", 3, 1, float("nan"))
    with pytest.raises(RuntimeError, match="other"), samples_named(groups):
        raise RuntimeError("other")


def test_a_place_is_counted_on_from_the_sequences_before() -> None:
    found = NonFiniteError("log_probs", 2, 7, float("inf")).moved(10)
    assert (found.sequence, found.token, found.column) == (12, 7, "log_probs")
    assert found.details == {"column": "log_probs", "sequence": 12, "token": 7, "value": float("inf")}


def test_a_save_is_a_turn_of_the_trainer_behind_which_servers_are_pushed_again(tmp_path: Path) -> None:
    story: list[Any] = []
    actor: Any = SimpleNamespace(
        onload=lambda: story.append("onload"),
        offload=lambda: story.append("offload"),
        save=lambda folder: story.append(("save", folder.name)),
    )
    run: Any = Run.__new__(Run)
    run.config = SimpleNamespace(trainer=SimpleNamespace(max_checkpoints_to_keep=1))
    run.dir, run.timer, run.roles = tmp_path, Timer(), Roles(actor, residents=(actor,))
    run.algorithm = SimpleNamespace(kl=SimpleNamespace(state_dict=dict), seed=7)
    run.server_manager = SimpleNamespace(
        shares_gpus=True,
        release_memory=lambda: story.append("servers release"),
        push=lambda v: story.append(("push", v)),
    )
    run.save(3, {"position": 4}, {})
    assert story == ["servers release", "onload", ("save", "actor"), "offload", ("push", 3)]
    assert run.last_save.state == {"prompts": {"position": 4}, "kl": {}, "totals": {}, "seed": 7}
    del story[:]
    run.server_manager.shares_gpus = False
    run.save(4, {"position": 5}, {})
    assert ("push", 4) not in story, "those on GPUs of their own hold what they were pushed"


def test_a_model_is_written_when_the_servers_have_given_their_memory_back(tmp_path: Path) -> None:
    story: list[Any] = []
    actor = SimpleNamespace(lora=SimpleNamespace(rank=0))
    run: Any = SimpleNamespace(
        config=SimpleNamespace(actor=actor, trainer=SimpleNamespace(experiment_name="x")),
        dir=tmp_path,
        trackers=SimpleNamespace(stage=lambda name: None),
        server_manager=SimpleNamespace(
            release_memory=lambda: story.append("servers release"), counts={"servers_died": 0}
        ),
        roles=SimpleNamespace(actor=SimpleNamespace(export=lambda folder, adapter: story.append(folder.name))),
        num_steps=3,
        num_filtered=0,
        val_prompts=[],
    )
    nothing: Any = None
    finish(run, nothing, Totals(0.0, {}))
    assert story == ["servers release", "hf"]
