"""The ring: prompts -> rollout -> columns -> advantages -> gradient -> weights -> the next rollout.

An ordinary program of one process.  What it calls may run on one CPU rank or on thousands of GPUs; nothing here knows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megarl.algo.advantages.estimate import estimate
from megarl.algo.correction import correct
from megarl.algo.finite import NonFiniteError
from megarl.config import Config
from megarl.data.batch import make_batch, sample_names
from megarl.group import RankError
from megarl.machines import NodeLost
from megarl.metrics.report import write_samples
from megarl.metrics.stats import batch_stats, finalise
from megarl.sample import Batch, Sample, Stat, Stats
from megarl.trainer.artifacts import finish, remember
from megarl.trainer.evaluate import Evaluation, submit_evaluation, take_evaluation
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.run import Run
from megarl.trainer.server_manager import is_verified


def train(config: Config) -> dict[str, Any]:
    """Run to the end; returns the summary that it also writes.  Ranks that fail may start again, beside the servers."""
    began = time.monotonic()
    prepare(config)
    with Infrastructure(config) as infrastructure:
        run = Run(config, infrastructure)
        while True:
            try:
                with run:
                    return train_loop(run, began)
            except (RankError, NodeLost) as error:
                infrastructure.forgive(error)
                run = Run(config, infrastructure, resume=run.last_save)


def train_loop(run: Run, began: float) -> dict[str, Any]:
    """Step after step, with an evaluation and a checkpoint every so many."""
    trainer = run.config.trainer
    totals = Totals(began, run.resumed_from.state["totals"] if run.resumed_from else {})
    push(run, run.first_step, totals)
    if run.first_step == 0 and trainer.val_before_train:
        remember(run.dir, measure(run, 0))
    run.timer.start()  # starting everything is no part of the first step
    for step in range(run.first_step, run.num_steps):
        position = train_step(run, step, totals)
        if due(step + 1, trainer.test_freq) and step + 1 < run.num_steps:
            measure(run, step + 1)
        if due(step + 1, trainer.save_freq) or (step + 1 == run.num_steps and trainer.save_freq > 0):
            with run.timer("save_checkpoint"):  # counted with the next step, as all that comes after a step
                run.save(step + 1, position, totals.state_dict())
    return finish(run, measure(run, run.num_steps), totals)


def train_step(run: Run, step: int, totals: Totals) -> dict[str, Any]:
    """One iteration, from prompts to pushed weights; returns the position of the prompts behind it."""
    timer = run.timer
    with timer("gen"):
        while not run.prefetcher.ready():
            run.server_manager.check_servers()
            run.trackers.stage("gen", *run.prefetcher.progress)
        iteration = run.prefetcher.take()
    with samples_named(iteration.groups), run.trainers_turn():
        batch, stats = learn(run, iteration.groups, step)
    with timer("update_weights"):
        report = push(run, step + 1, totals)
    with timer("log"):
        steer_kl(run, stats)
        write_samples(run.dir / "samples.jsonl", step + 1, iteration.groups)
        metrics = finalise(stats) | (batch_stats(batch, version=step) if batch is not None else {}) | iteration.metrics
        metrics |= {f"timing_s/push/{phase}": seconds for phase, seconds in report["timings"].items()}
        metrics |= run.server_manager.metrics(report)
    num_tokens = 0 if batch is None else batch.num_tokens
    metrics |= timer.finish(num_tokens=num_tokens, num_devices=run.config.trainer.num_ranks)
    with timer("log"):
        totals.add(metrics)
        run.trackers.log(step + 1, metrics)
    return iteration.position


def learn(run: Run, groups: Sequence[Sequence[Sample]], step: int) -> tuple[Batch | None, Stats]:
    """Scored groups -> columns -> advantages -> gradients; dynamic sampling may have left no group to learn from."""
    if not groups:
        return None, {"actor/skipped_steps": Stat("sum", 1.0)}
    algorithm, timer = run.algorithm, run.timer
    seed = run.config.trainer.seed * 1_000_003 + step  # of this step's shuffles: no two seeds share a sequence of them
    with timer("batch"):
        batch = make_batch(groups, reward_parts=algorithm.reward_parts)
        if run.config.reward.shuffle:
            batch = shuffle_rewards(batch, seed)
        batch, stats = algorithm.shape(batch)
    with timer("old_log_prob"):
        columns = run.actor.columns(batch, algorithm.columns, reference=algorithm.reference)
        batch = batch.with_columns(old_log_probs=columns.pop("log_probs"), **columns)
    if run.reference and algorithm.reads_reference:
        with timer("ref"):
            batch = batch.with_columns(ref_log_probs=run.reference.log_probs(batch))
    if run.critic:
        with timer("values"):
            batch = batch.with_columns(values=run.critic.values(batch))
    with timer("adv"):
        batch, of_advantages = estimate(batch, kl_coef=run.kl.value, **algorithm.advantages)
        batch, of_rollout = correct(batch, algorithm.correction)
        stats |= of_advantages | of_rollout
    if run.critic:
        with timer("update_critic"):
            stats |= run.critic.update(batch, seed=seed)
    if step >= run.warmup:
        with timer("update_actor"):
            stats |= run.actor.update(batch, seed=seed)
    return batch, stats


@contextmanager
def samples_named(groups: Sequence[Sequence[Sample]]) -> Iterator[None]:
    """A number that is not finite is told with the name of the sample in which it was found."""
    try:
        yield
    except NonFiniteError as error:
        raise error.named(f"sample {sample_names(groups)[error.sequence]}") from error


def push(run: Run, version: int, totals: Totals) -> dict[str, Any]:
    """The actor's weights into every server that lives; who does not hold them, verified, writes nothing."""
    totals.pushes += 1
    report = run.server_manager.push(version)
    totals.pushes_verified += is_verified(report)
    return report


def measure(run: Run, step: int) -> Evaluation:
    """The score on the held-out prompts."""
    ticket = submit_evaluation(run.collector, run.val_prompts, run.config)
    while not run.collector.ready(ticket):
        run.server_manager.check_servers()
        run.trackers.stage("evaluate", *run.collector.progress(ticket))
    found = take_evaluation(run.collector, ticket)
    if run.val_prompts:
        run.trackers.log(step, found.metrics())
    run.timer.start()
    return found


def steer_kl(run: Run, stats: Stats) -> None:
    """The controller of the KL in the reward looks at what it caused."""
    current: Stat | None = stats.get("actor/reward_kl_penalty")
    if current is not None:
        run.kl.update(current.result(), int(current.weight))


def shuffle_rewards(batch: Batch, seed: int) -> Batch:
    """The control experiment: the same rewards, given to the wrong samples."""
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed))
    return batch.with_per_sequence(
        **{name: batch.per_sequence[name][order] for name in ("score", "reward_parts") if name in batch.per_sequence}
    )


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def prepare(config: Config) -> None:
    """Let the recipe make its model folder, where it names a module for that and the folder is missing."""
    if config.trainer.prepare and not (Path(config.model.path) / "config.json").exists():
        import_module(config.trainer.prepare).prepare(config)


class Totals:
    """Numbers over the whole run, resumed with it."""

    def __init__(self, began: float, saved: dict[str, Any]) -> None:
        self.began = began - saved.get("wall_s", 0.0)
        self.pushes = saved.get("pushes", 0)
        self.pushes_verified = saved.get("pushes_verified", 0)
        self.log_prob_gap_max = saved.get("log_prob_gap_max", 0.0)
        self.first_ppo_kl_max = saved.get("first_ppo_kl_max", 0.0)
        self.lost_rollouts = saved.get("lost_rollouts", 0)
        self.last_score: float | None = saved.get("last_score")

    def add(self, metrics: dict[str, float]) -> None:
        self.log_prob_gap_max = max(self.log_prob_gap_max, metrics.get("rollout_corr/log_prob_gap_max", 0.0))
        self.first_ppo_kl_max = max(self.first_ppo_kl_max, abs(metrics.get("actor/first_ppo_kl", 0.0)))
        self.lost_rollouts += int(metrics["rollout/lost"])
        self.last_score = metrics.get("critic/score/mean", self.last_score)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "began"} | {
            "wall_s": round(self.wall_s, 1)
        }

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began


def main(config: Config) -> int:
    """`megarl train`."""
    train(config)
    Console().print(f"results: {config.trainer.run_dir.resolve()}", highlight=False)
    return 0
