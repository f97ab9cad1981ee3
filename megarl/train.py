"""The training loop: prompts -> rollout -> columns -> advantages -> gradient -> weight sync -> the next rollout.

It runs in one process, the driver.  The same code drives one CPU rank or thousands of GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.algo.advantages.estimate import estimate
from megarl.algo.correction import correct, leave_out_old
from megarl.config import Config
from megarl.data.batch import make_batch, sample_names
from megarl.data.ledger import TRAINED
from megarl.metrics.computing.timer import Timer
from megarl.metrics.trackers.console import warn
from megarl.plan.predictions import lacks_memory, lost_at_an_end, memory_on_cpu
from megarl.processes import watchdog
from megarl.processes.signals import Signals
from megarl.samples.batch import Batch, Stat, Stats
from megarl.samples.sample import Sample
from megarl.trainer.algorithm import Algorithm
from megarl.trainer.artifacts import finish
from megarl.trainer.evaluation.evaluate import Evaluation
from megarl.trainer.evaluation.in_training import UNSCORED
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.preflight import begin_anew, preflight, prepare
from megarl.trainer.resumable import due, own_folder, report_results, to_the_end
from megarl.trainer.roles import Roles, training_phase
from megarl.trainer.run import Run, open_run
from megarl.trainer.servers.colocation import uses_gpus
from megarl.trainer.telemetry.profile import profiled


def train(config: Config) -> dict[str, Any]:
    """Train to the end; returns the summary, which is also written to a file.

    Failed ranks are restarted from the last checkpoint while the servers keep running; after trainer.max_restarts
    restarts without a new step their error is raised.  A bad number can make them go back, too.  Raises Terminated
    after SIGTERM.
    """
    began = time.monotonic()
    prepare(config)
    with (
        own_folder(config),
        Signals(config.trainer.term_grace_s) as signals,
        watchdog.watch(),
        Infrastructure(config) as infrastructure,
    ):
        if not uses_gpus(config) and (sentence := lacks_memory(memory_on_cpu(config, "train"))):
            warn(sentence)
        plan = preflight(config, began)
        begin_anew(plan)
        opened = partial(open_run, infrastructure=infrastructure, signals=signals)
        return to_the_end(plan, opened, train_loop, signals, infrastructure)


def train_loop(run: Run) -> dict[str, Any]:
    """All steps of a run, with an evaluation every trainer.test_freq steps, and a checkpoint when one is due.

    An evaluation after the step from which a run resumes is made again.  If the last one fails, what was trained is
    written all the same, and then its error is raised.
    """
    num_steps, timer = run.plan.num_steps, run.log.timer
    if sentence := lost_at_an_end(run.plan.config, run.roles.actor.group.device_name, num_steps):
        warn(sentence)
    run.signals.is_patient = True
    run.push(run.plan.first_step)
    timer.start()  # the startup does not count as part of the first step
    for step in range(run.plan.first_step, num_steps):
        run.between_steps(step, partial(run.save, step))
        evaluate_if_due(step, run)
        with profiled(run.plan.config.trainer.profile, run.groups, run.plan.folder, step + 1, timer):
            train_step(step, run)
        run.finished_steps = step + 1
        if run.times.last == step + 1:
            run.describe_save()
    evaluation, failure = Evaluation([]), None
    try:
        evaluation = evaluate_if_due(num_steps, run)
    except UNSCORED as error:
        failure = error
    run.finish_saves()
    summary = finish(run, evaluation)
    if failure is not None:
        raise failure
    return summary


def evaluate_if_due(step: int, run: Run) -> Evaluation:
    """After `step` steps: evaluate if it is due, and end if SIGTERM came, which does not wait for the evaluation.

    With trainer.eval_beside that goes on while the next step is made; the evaluation that is returned is empty then.
    """
    trainer = run.plan.config.trainer
    is_last = step == run.plan.num_steps
    evaluation = Evaluation([])
    is_due = trainer.val_before_train if step == 0 else is_last or due(step, trainer.test_freq)
    if is_due and trainer.eval_beside and run.plan.val_prompts and not is_last:
        run.evaluations.plan(step)
    elif is_due:
        evaluation = run.evaluations.measure(step, run.signals)
    if run.signals.ends:
        run.save_and_end(step)
    return evaluation


def train_step(step: int, run: Run) -> None:
    """One iteration, from prompts to pushed weights."""
    timer, bad_numbers = run.log.timer, run.bad_numbers
    with timer("gen"):
        while not run.prefetcher.ready():
            run.server_manager.check_servers()
            run.saver.poll()
            run.log.trackers.stage("gen", *run.prefetcher.progress)
        rollout = run.prefetcher.take()
    rollout = replace(rollout, reward_s=timer.split("gen", "reward", rollout.reward_s))
    run.evaluations.begin()
    bad_numbers.begin(step + 1, sample_names(rollout.groups), rollout.visits.get(TRAINED, []))
    with training_phase(run.roles, run.server_manager, timer):
        batch: Batch | None = None
        stats: Stats = {}
        with bad_numbers.judged():
            if run.roles.reward_model and rollout.groups:
                with timer("reward"):
                    rollout = replace(rollout, groups=run.roles.scored(rollout.groups))
            batch, stats = learn(step, rollout.groups, run.roles, run.algorithm, timer)
        run.evaluations.finish()
        run.saver.poll()  # the save before counts as soon as the ranks have a moment to say that it is written
        if run.times.due(step + 1):
            with timer("save_checkpoint"):  # before the models leave the GPUs
                run.saver.start(step + 1)
    run.drain()
    with timer("update_weights"):
        report = run.push(step + 1)
    run.algorithm.update_kl(stats)
    if bad_numbers.skipped:
        run.prefetcher.skip(rollout, bad_numbers.skipped)
    more = bad_numbers.metrics | run.server_manager.metrics(report) | {"checkpoint/failed": float(run.saver.failed)}
    run.log.record(step + 1, rollout, batch, stats, report, more)


def learn(
    step: int, groups: Sequence[Sequence[Sample]], roles: Roles, algorithm: Algorithm, timer: Timer
) -> tuple[Batch | None, Stats]:
    """Scored groups -> columns -> advantages -> gradients; no batch if dynamic sampling dropped all groups."""
    if not groups:
        return None, {"actor/skipped_steps": Stat("sum", 1.0)}
    seed = algorithm.seed * 1_000_003 + step  # for shuffles; no two seeds give the same sequence
    with timer("batch"):
        batch, stats = algorithm.shape(make_batch(groups, reward_parts=algorithm.reward_parts), seed)
    share = algorithm.old_log_prob_share(step, len(groups))
    stats["perf/old_log_prob_share"] = Stat("mean", share)
    if share:
        columns = algorithm.columns if share == 1 else ()
        with timer("old_log_prob"):
            batch = roles.actor.with_old_log_probs(batch, columns, seed=seed, reference=algorithm.reference)
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
        if share == 1:
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
            batch, of_actor = roles.actor.update(batch, seed=seed, prepare=prepare)
            stats |= of_actor
    if share < 1:  # now all of them are known
        with timer("adv"):
            batch, of_rollout = correct(batch, algorithm.correction, version=step)
            stats |= of_rollout
    return batch, stats


def main(config: Config) -> int:
    """`megarl train`."""
    train(config)
    return report_results(config)
