"""The training loop: prompts -> rollout -> columns -> advantages -> gradient -> weight sync -> the next rollout.

It runs in one process, the driver.  The same code drives one CPU rank or thousands of GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from megarl.algo.advantages.estimate import estimate
from megarl.algo.correction import correct, leave_out_old
from megarl.algo.finite import BadNumber
from megarl.algo.kl import AdaptiveKL, FixedKL
from megarl.batch import Batch, Stat, Stats
from megarl.config import Config
from megarl.config.validate.models import contradictions, to_prepare
from megarl.data.batch import make_batch, sample_names
from megarl.data.ledger import TRAINED
from megarl.group import RankError
from megarl.machines import NodeLost
from megarl.metrics.jsonl import append_lines
from megarl.metrics.report import SAMPLES, VISITS, write_samples
from megarl.metrics.stats import batch_stats, finalise, reward_stats
from megarl.metrics.timer import Timer
from megarl.metrics.trackers.console import warn
from megarl.metrics.trackers.status import end_noted
from megarl.plugins import user_function
from megarl.processes.presence import watched
from megarl.processes.signals import NO_STEP, Signals
from megarl.report.page import reported
from megarl.rollout.collector.collector_client import CollectorError
from megarl.rollout.prefetch import Prefetcher
from megarl.sample import Sample
from megarl.terminal import sentences
from megarl.trainer.algorithm import Algorithm
from megarl.trainer.artifacts import finish, remember
from megarl.trainer.bad_numbers import BadNumbers, forget_rollbacks
from megarl.trainer.build import make_mini_model
from megarl.trainer.checkpoint.manifest import Damaged
from megarl.trainer.checkpoint.save_times import SaveTimes, saved
from megarl.trainer.checkpoint.saver import Saver
from megarl.trainer.evaluation.beside import Beside
from megarl.trainer.evaluation.evaluate import Evaluation, EvaluationLost
from megarl.trainer.evaluation.measure import measure, note
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.observed.profile import profiled
from megarl.trainer.observed.run_log import RunLog, Totals
from megarl.trainer.owner import owned
from megarl.trainer.reward_model import scored
from megarl.trainer.roles import Roles, trainers_turn
from megarl.trainer.run import Run
from megarl.trainer.servers.server_manager import ServerManager, is_verified


def train(config: Config) -> dict[str, Any]:
    """Train to the end; returns the summary, which is also written to a file.

    Failed ranks are restarted from the last checkpoint while the servers keep running; after trainer.max_restarts
    restarts without a new step their error is raised.  A bad number can make them go back, too.  Raises Terminated
    after SIGTERM.
    """
    began = time.monotonic()
    prepare(config)
    with (
        owned(config.trainer.run_dir),
        end_noted(config.trainer.run_dir),
        reported(config.trainer.run_dir),
        Signals(config.trainer.term_grace_s) as signals,
        watched(config.trainer.driver_silence_s),
        Infrastructure(config) as infrastructure,
    ):
        run = Run(config, infrastructure)
        if run.resumed_from:
            began -= run.resumed_from.state["totals"]["wall_s"]
        else:
            forget_rollbacks(run.dir)
        while True:
            try:
                with run:
                    return train_loop(run, began, signals)
            except (RankError, NodeLost) as error:
                if signals.ends:
                    raise
                infrastructure.forgive(error, run.finished_steps)
                run = Run(config, infrastructure, resume=run.last_save)
            except Damaged as error:
                run = Run(config, infrastructure, resume=run.save_before(error))
            except BadNumber as found:
                if signals.ends:
                    raise
                save = run.last_save or run.resumed_from
                run.bad_numbers.roll_back(found, save)
                run = Run(config, infrastructure, resume=save)


def train_loop(run: Run, began: float, signals: Signals) -> dict[str, Any]:
    """All steps of a run, with an evaluation every trainer.test_freq steps, and a checkpoint when one is due.

    An evaluation after the step from which a run resumes is made again.  If the last one fails, what was trained is
    written all the same, and then its error is raised.
    """
    trainer, servers = run.config.trainer, run.server_manager
    assert run.saver is not None, "the run has started"
    saver = run.saver
    totals = Totals(began, run.resumed_from.state["totals"] if run.resumed_from else {})
    files: dict[str, Any] = {"timeline": run.timeline, "tokens": run.token_log}
    about: dict[str, Any] = {"audit": run.audit, "of_step": run.step_metrics}
    log = RunLog(run.timer, run.trackers, totals, run.dir, trainer.num_ranks, **files, **about)
    times = SaveTimes(trainer, signals, first_step=run.first_step, num_steps=run.num_steps)
    signals.is_patient = True
    push(run.first_step, servers, totals)
    log.timer.start()  # the startup does not count as part of the first step
    beside = evaluated_beside(run, log) if trainer.eval_beside else None
    for step in range(run.first_step, run.num_steps):
        look_back(step, run, times, log, signals, beside)
        how: dict[str, Any] = {"bad_numbers": run.bad_numbers, "saves": times.due, "drains": run.drains}
        how["beside"] = beside
        with profiled(trainer.profile, run.groups, run.dir, step + 1, log.timer):
            train_step(step, run.prefetcher, run.roles, run.algorithm, servers, log, saver, **how)
        run.finished_steps = step + 1
        if times.last == step + 1:
            run.describe_save(totals.state_dict())
    found, failure = Evaluation([]), None
    try:
        found = look_back(run.num_steps, run, times, log, signals)
    except (CollectorError, EvaluationLost) as error:  # of a reward, for example, with reward.on_error=stop
        failure = error
    saver.finish()
    summary = finish(run, found, totals)
    if failure is not None:
        raise failure
    return summary


def look_back(
    step: int, run: Run, times: SaveTimes, log: RunLog, signals: Signals, beside: Beside | None = None
) -> Evaluation:
    """After `step` steps: evaluate if it is due, and end if SIGTERM came, which does not wait for the evaluation.

    `beside`: evaluates while the next step goes on; the evaluation that is returned is empty then.
    """
    assert run.saver is not None, "the run has started"
    found = Evaluation([])
    if beside is not None and measures(step, run) and run.val_prompts:
        beside.plan(step)
    elif measures(step, run):
        found = measure(step, run.evaluator, run.server_manager, log, run.saver, signals)
    if signals.ends:
        save_and_end(step, run, times, log, signals)
    if step == 0 and measures(step, run) and beside is None:
        remember(run.dir, found)
    return found


def evaluated_beside(run: Run, log: RunLog) -> Beside:
    """Evaluations while the trainer works on the next step."""

    def done(step: int, found: Evaluation) -> None:
        assert run.saver is not None, "the run has started"
        note(step, found, log, run.saver)
        if step == 0:
            remember(run.dir, found)

    return Beside(run.evaluator, run.server_manager, done, warn)


def measures(step: int, run: Run) -> bool:
    trainer = run.config.trainer
    if step == 0:
        return trainer.val_before_train
    return step == run.num_steps or due(step, trainer.test_freq)


def save_and_end(step: int, run: Run, times: SaveTimes, log: RunLog, signals: Signals) -> NoReturn:
    """Save the state after `step` steps, unless that was done, and end the run."""
    assert run.saver is not None, "the run has started"
    if step == 0:
        signals.end(NO_STEP)
    if times.last < step:  # the signal came after the last moment to save in the step itself
        with trainers_turn(run.roles, run.server_manager, log.timer):
            run.saver.start(step)
        run.describe_save(log.totals.state_dict())
    log.trackers.stage("saving")
    run.saver.finish()
    signals.end(saved(step, run.saver.last or run.resumed_from))


def train_step(
    step: int,
    prefetcher: Prefetcher,
    roles: Roles,
    algorithm: Algorithm,
    servers: ServerManager,
    log: RunLog,
    saver: Saver,
    *,
    bad_numbers: BadNumbers,
    saves: Callable[[int], bool],
    drains: bool = False,
    beside: Beside | None = None,
) -> None:
    """One iteration, from prompts to pushed weights.

    `saves(step + 1)`: a checkpoint is started before the models leave the GPUs.  `drains`: the push waits for what is
    generated.  `beside`: evaluates the weights of the step before while this one goes on.
    """
    timer = log.timer
    with timer("gen"):
        while not prefetcher.ready():
            servers.check_servers()
            saver.poll()
            log.trackers.stage("gen", *prefetcher.progress)
        iteration = prefetcher.take()
    rewards_s = timer.split("gen", "reward", iteration.reward_s)
    if beside is not None:
        beside.begin()
    bad_numbers.begin(step + 1, sample_names(iteration.groups), iteration.visits.get(TRAINED, []))
    with trainers_turn(roles, servers, timer):
        batch: Batch | None = None
        stats: Stats = {}
        with bad_numbers.judged():
            if roles.reward_model and iteration.groups:
                with timer("reward"):
                    iteration = replace(iteration, groups=scored(iteration.groups, roles.reward_model))
            batch, stats = learn(step, iteration.groups, roles, algorithm, timer)
        if beside is not None and beside.has_begun:
            with timer("testing"):
                beside.finish(saver.poll, log.trackers)
        saver.poll()  # the save before counts as soon as the ranks have a moment to say that it is written
        if saves(step + 1):
            with timer("save_checkpoint"):
                saver.start(step + 1)
    if drains:
        with timer("drain"):
            drain(prefetcher, servers)
    with timer("update_weights"):
        report = push(step + 1, servers, log.totals)
    with timer("log"):
        steer_kl(algorithm.kl, stats)
        if bad_numbers.skipped:
            prefetcher.skip(iteration, bad_numbers.skipped)
        write_samples(log.folder / SAMPLES, step + 1, iteration.groups)
        if log.tokens:
            log.tokens.write(step + 1, iteration.groups, batch)
        of_ranks = log.timeline.write(step + 1, timer) if log.timeline else {}
        append_lines(log.folder / VISITS, [{"step": step + 1, **iteration.visits}])
        metrics = finalise(stats) | (batch_stats(batch, version=step) if batch is not None else {}) | iteration.metrics
        metrics |= reward_stats(iteration.groups) | bad_numbers.metrics | of_ranks
        metrics |= {f"timing_s/push/{phase}": seconds for phase, seconds in report["timings"].items()}
        metrics |= servers.metrics(report) | {"checkpoint/failed": float(saver.failed)}
    num_tokens = 0 if batch is None else batch.num_tokens
    metrics |= timer.finish(num_tokens=num_tokens, num_devices=log.num_devices)
    of_phases = sum(report["timings"].values())
    metrics["timing_s/push/other"] = max(0.0, metrics["timing_s/update_weights"] - of_phases)
    metrics |= log.of_step(step + 1, batch, metrics) if log.of_step else {}
    waited = metrics["timing_s/gen"] + rewards_s + metrics.get("timing_s/drain", 0.0)
    metrics["rollout/idle_share"] = waited / metrics["timing_s/step"]
    with timer("log"):
        log.totals.add(metrics)
        log.trackers.log(step + 1, metrics)


def learn(
    step: int, groups: Sequence[Sequence[Sample]], roles: Roles, algorithm: Algorithm, timer: Timer
) -> tuple[Batch | None, Stats]:
    """Scored groups -> columns -> advantages -> gradients; no batch if dynamic sampling dropped all groups."""
    if not groups:
        return None, {"actor/skipped_steps": Stat("sum", 1.0)}
    seed = algorithm.seed * 1_000_003 + step  # for shuffles; no two seeds give the same sequence
    with timer("batch"):
        batch = make_batch(groups, reward_parts=algorithm.reward_parts)
        if algorithm.shuffle_rewards:
            batch = shuffle_rewards(batch, seed)
        batch, stats = algorithm.shape(batch)
    scored, later = algorithm.old_log_prob_share(step, len(groups)), None
    stats["perf/old_log_prob_share"] = Stat("mean", scored)
    if scored == 1:
        with timer("old_log_prob"):
            columns = roles.actor.columns(batch, algorithm.columns, reference=algorithm.reference)
            batch = batch.with_columns(old_log_probs=columns.pop("log_probs"), **columns)
    elif scored:
        with timer("old_log_prob"):
            later = roles.actor.later_old_log_probs(batch, seed=seed)
    if roles.reference and algorithm.reads_reference:
        with timer("ref"):
            batch = batch.with_columns(ref_log_probs=roles.reference.log_probs(batch))
    if roles.teachers:
        with timer("teachers"):
            batch, of_teachers = roles.teachers.read(batch, groups, step)
            stats |= of_teachers
    if roles.critic:
        with timer("values"):
            batch = batch.with_columns(values=roles.critic.values(batch))
    with timer("adv"):
        batch, of_ages = leave_out_old(batch, version=step, max_age=algorithm.max_age)
        if scored == 1:
            batch, of_rollout = correct(batch, algorithm.correction, version=step)
            stats |= of_rollout
        batch, of_advantages = estimate(batch, kl_coef=algorithm.kl.value, **algorithm.advantages)
        stats |= of_advantages | of_ages
    if roles.critic:
        with timer("update_critic"):
            _, of_critic = roles.critic.update(batch, seed=seed)
            stats |= of_critic
    if step >= algorithm.critic_warmup:
        with timer("update_actor"):
            prepare = roles.teachers.read_step if roles.teachers and roles.teachers.reads_steps else None
            batch, of_actor = roles.actor.update(batch, seed=seed, prepare=prepare, later=later)
            stats |= of_actor
    if scored < 1:  # now all of them are known
        with timer("adv"):
            batch, of_rollout = correct(batch, algorithm.correction, version=step)
            stats |= of_rollout
    return batch, stats


def push(version: int, servers: ServerManager, totals: Totals) -> dict[str, Any]:
    """Push the actor's weights to every live server; a server without verified weights does not generate."""
    totals.pushes += 1
    report = servers.push(version)
    totals.pushes_verified += is_verified(report)
    return report


def drain(prefetcher: Prefetcher, servers: ServerManager) -> None:
    """Wait until nothing is generated, so that no completion sees two versions; ends early if no server can go on."""
    while not prefetcher.is_idle and servers.watch():
        prefetcher.wait()


def steer_kl(kl: FixedKL | AdaptiveKL, stats: Stats) -> None:
    """Update the controller of the KL coefficient with the KL penalty of this step."""
    current: Stat | None = stats.get("actor/reward_kl_penalty")
    if current is not None:
        kl.update(current.result(), int(current.weight))


def shuffle_rewards(batch: Batch, seed: int) -> Batch:
    """The control experiment: the same rewards, assigned to random samples; those of turns only in their sum."""
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed))
    batch = replace(batch, columns={name: c for name, c in batch.columns.items() if name != "turn_rewards"})
    return batch.with_per_sequence(
        **{name: batch.per_sequence[name][order] for name in ("score", "reward_parts") if name in batch.per_sequence}
    )


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def prepare(config: Config) -> None:
    """Make the model of a very small preset, and call prepare(config) of trainer.prepare, if a folder is missing."""
    make_mini_model(config)
    place = config.trainer.prepare
    if made := to_prepare(config):
        user_function(f"trainer.prepare={place}", f"{place}:prepare")(config)
        for sentence in (sentence for role in made for sentence in contradictions(config, role)):
            raise ValueError(f"trainer.prepare={place} made another model: {sentence}")


def main(config: Config) -> int:
    """`megarl train`."""
    train(config)
    sentences().print(f"results: {config.trainer.run_dir.resolve()}")
    return 0
