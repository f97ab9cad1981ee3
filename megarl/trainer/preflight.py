"""What a run checks and reads before any of its processes starts, but for a trial of its rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config import Config
from megarl.config.placement import pushes_over_nccl
from megarl.config.validate.algorithms import idle
from megarl.config.validate.models import contradictions, to_prepare
from megarl.data.prompts import Prompts
from megarl.metrics.trackers.console import note, warn
from megarl.plugins.load import load_plugins, user_function
from megarl.samples.sample import Prompt
from megarl.servers.nccl import check_one_nccl
from megarl.servers.sglang_environment import sglang_python
from megarl.trainer.algorithm import Algorithm, check_vocabularies, make_algorithm
from megarl.trainer.bad_numbers import ROLLBACKS
from megarl.trainer.build import make_mini_model, model_folder, num_iterations
from megarl.trainer.checkpoint.checkpoint import to_resume
from megarl.trainer.checkpoint.resume import check_is_known, generated_with
from megarl.trainer.checks.reward_trial import read_and_try
from megarl.trainer.checks.rewards import check_audited, check_reward_model, check_rewards
from megarl.trainer.collectors import check_agents
from megarl.trainer.evaluation.in_training import BEFORE
from megarl.trainer.resumable import Plan
from megarl.trainer.servers.colocation import check_shared_gpus, uses_gpus
from megarl.trainer.teachers import check_taught, check_teachers


@dataclass(frozen=True)
class TrainPlan(Plan):
    """The plan of `megarl train`."""

    algorithm: Algorithm
    prompts: Prompts
    val_prompts: Sequence[Prompt]
    val_sets: Sequence[str]  # the evaluation set of each of them
    shortened: Mapping[str, int]  # prompts that were left out or cut, for the summary
    saves_waiting: bool  # a checkpoint holds finished groups that wait
    generated_with: Mapping[str, Any]  # the settings on which such a group depends
    began: float  # by time.monotonic(), less the time of the runs that this one continues


def preflight(config: Config, began: float) -> TrainPlan:
    """Check the settings, models, plug-ins, rewards and data of a run, and read its prompts.

    `began`: when the command began, by time.monotonic().  Raises ValueError, one sentence, for the first fault.
    """
    resume, data = to_resume(config.trainer, warn), config.data
    if resume is not None:
        check_is_known(resume)
        began -= resume.state["totals"]["wall_s"]
    policy = model_folder(config.model.path)
    _check_servers(config)
    load_plugins(config.algorithm.plugins)
    check_rewards(config)
    if reason := check_agents(config):
        warn(reason)
    algorithm = make_algorithm(config)
    if algorithm.reference or algorithm.actor.reference:
        check_vocabularies(policy, model_folder(config.ref.model.path), config)
    check_reward_model(config, wants_greedy=algorithm.wants_greedy)
    check_teachers(config)
    for line in idle(config):
        note(line)
    prompts, *rest = read_and_try(config, ["data.train_files"] + ["data.val_files"] * bool(data.val_files), warn, note)
    val = rest[0] if rest else None
    val_prompts = val.all(data.val_max_samples) if val else []
    check_audited(config, len(val_prompts))
    counts = {"prompts_filtered": prompts.num_filtered, "prompts_cut": prompts.num_cut}
    if val is not None:
        counts |= {"val_prompts_filtered": val.left_out(data.val_max_samples), "val_prompts_cut": val.num_cut}
    check_taught(config, prompts.data_sources)
    return TrainPlan(
        config,
        num_iterations(config, len(prompts), algorithm.critic_warmup),
        resume,
        algorithm=algorithm,
        prompts=prompts,
        val_prompts=val_prompts,
        val_sets=val.sets(data.val_max_samples) if val else [],
        shortened=counts,
        saves_waiting=_is_saveable(config, prompts),
        generated_with=generated_with(config, greedy=algorithm.wants_greedy),
        began=began,
    )


def _check_servers(config: Config) -> None:
    """Raises ValueError for an SGLang that is missing or has another NCCL, and for GPUs that cannot be shared."""
    if config.rollout.engine == "sglang" and (not config.rollout.urls or config.rollout.router):
        python = sglang_python(config.rollout.sglang.python)
        if uses_gpus(config) and pushes_over_nccl(config):
            check_one_nccl(python)
    check_shared_gpus(config)


def _is_saveable(config: Config, prompts: Prompts) -> bool:
    """Whether a checkpoint can hold what waits.  Raises ValueError if it cannot, and the run saves of its own."""
    try:
        prompts.check_saveable()
    except ValueError:
        if config.trainer.saves:
            raise
        return False  # a save that a signal asks for leaves it out, and it is generated again
    return True


def prepare(config: Config) -> None:
    """Make the model of a very small preset, and call prepare(config) of trainer.prepare, if a folder is missing."""
    make_mini_model(config)
    place = config.trainer.prepare
    if made := to_prepare(config):
        user_function(f"trainer.prepare={place}", f"{place}:prepare")(config)
        for sentence in (sentence for role in made for sentence in contradictions(config, role)):
            raise ValueError(f"trainer.prepare={place} made another model: {sentence}")


def begin_anew(plan: TrainPlan) -> None:
    """Delete what another run has left in the folder that would count as this one's, unless it resumes."""
    if plan.resume is None:
        for name in (ROLLBACKS, BEFORE):
            (plan.folder / name).unlink(missing_ok=True)
