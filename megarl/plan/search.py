"""Searches the best layouts of a run by prediction: training and servers separately, then combined.

Memory is predicted first, and time only for layouts that fit.  The best are composed again as `megarl train` does, so
that every proposal passes all checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megarl.layout import KEYS, Layout
from megarl.megatron_fields import RECOMPUTED, TRANSFORMER
from megarl.plan import candidates
from megarl.plan.job import Job, Role
from megarl.plan.memory.gpu_budget import fullest, gpu_budgets_of_trainer
from megarl.plan.predict import Prediction, predict, stage_times, step_time
from megarl.plan.time import serving
from megarl.plan.time.constants import CONSTANTS, Constants
from megarl.plan.time.training import training

NUM_TRAINERS, NUM_SERVERS = 12, 4  # the best of each, which are combined
NUM_PROPOSED = 3
WORTH = 1.01  # a proposal must be this many times faster than the current run
WORD = 0.002  # share of the step time that each additional word must save
UPDATES, SCORES = {"update_actor", "update_critic"}, {"old_log_prob", "ref", "teachers", "values"}

Composed = Callable[[list[str]], Job | None]  # words -> the run, None if it is invalid


@dataclass(frozen=True)
class Proposal:
    """Another layout of the run on the same GPUs."""

    job: Job
    prediction: Prediction
    words: list[str]  # to type
    why: str


def search(
    job: Job, composed: Composed, typed: Collection[str] = (), constants: Constants = CONSTANTS
) -> list[Proposal]:
    """The best layouts that fit, fastest first; only layouts faster than the current run, if that fits.

    None that needs another value of a `typed` key, or of a part of one.
    """
    own = predict(job, constants)
    found: dict[tuple[int, ...], Proposal] = {}
    for other in _ranked(job, typed, constants):
        layout, words = other.layout, words_of(job, other)
        kind = (layout.tp, layout.pp, layout.cp, layout.ep, other.server_gpus, other.attention_dp)
        if not words or kind in found or not _is_better(predict(other, constants), own):
            continue
        real = composed(words)  # the slowest call here
        prediction = predict(real, constants) if real else None
        if real and prediction and _is_better(prediction, own):
            found[kind] = Proposal(real, prediction, words, reason(job, own, real, prediction, constants))
        if len(found) == NUM_PROPOSED:
            break
    return sorted(found.values(), key=lambda one: one.prediction.step_s)


def _is_better(new: Prediction, own: Prediction) -> bool:
    return new.fits and (not own.fits or new.step_s * WORTH <= own.step_s)


def words_of(job: Job, other: Job) -> list[str]:
    """The words to type for another run on the same GPUs."""
    words = [
        f"actor.megatron.{key}={_shown(getattr(other.layout, field))}"
        for field, key in KEYS.items()
        if getattr(other.layout, field) != getattr(job.layout, field)
    ]
    if other.recompute != job.recompute:
        how = ("full", "uniform", "1") if other.recompute == "full" else ("null", "null", "null")
        keys = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        words += [f"actor.megatron.{key}={value}" for key, value in zip(keys, how, strict=True)]
        if job.recompute_modules:
            words.append(f"actor.megatron.{TRANSFORMER}.{RECOMPUTED}=[]")
    for key, new, old in (
        ("actor.ppo_max_token_len_per_gpu", other.max_tokens, job.max_tokens),
        ("rollout.tensor_model_parallel_size", other.server_gpus, job.server_gpus),
        ("rollout.expert_parallel_size", other.server_ep, job.server_ep),
        ("rollout.attention_dp", other.attention_dp, job.attention_dp),
        ("rollout.num_servers", other.num_servers, job.num_servers),
    ):
        if new != old:
            words.append(f"{key}={new}")
    return words


def reason(job: Job, own: Prediction, other: Job, new: Prediction, constants: Constants = CONSTANTS) -> str:
    """One sentence: which stages get faster, and why."""
    if not own.fits:
        return f"it fits, and the run as it is does not: {own.why[0]}"
    saved = {name: seconds - new.stages.get(name, 0.0) for name, seconds in own.stages.items()}
    most = sorted((name for name in saved if saved[name] > 0.01 * own.step_s), key=lambda name: -saved[name])
    stages = " and ".join(
        f"{name} {seconds_text(own.stages[name])} -> {seconds_text(new.stages[name])} s" for name in most[:2]
    )
    causes = [cause for stages_of, cause in _causes(job, other, constants) if stages_of & set(most[:2])]
    return f"{stages or 'the whole step'}: {'; '.join(causes) or 'less of everything that is waited for'}"


def seconds_text(seconds: float) -> str:
    """Seconds as text, with a decimal below 10."""
    return f"{seconds:.1f}" if seconds < 9.95 else f"{seconds:.0f}"


def _causes(job: Job, other: Job, constants: Constants) -> Iterator[tuple[set[str], str]]:
    """Possible reasons, each with the stages that it makes faster."""
    old, new = training(job, None, constants), training(other, None, constants)
    if job.recompute == "full" and other.recompute != "full":
        axes = [axis for axis in ("tp", "cp", "pp") if getattr(other.layout, axis) > getattr(job.layout, axis)]
        ways = " and ".join(f"{axis} {getattr(other.layout, axis)}" for axis in axes)
        because = f"with {ways} activations fit" if ways else "activations fit"
        yield UPDATES, f"{because}, and layers are not run again in the backward pass"
    before, after = (each.parts["exposed"] / each.seconds for each in (old, new))
    if after < before - 0.02:
        yield UPDATES | SCORES, f"communication that nothing hides is {after:.0%} of the training, not {before:.0%}"
    if new.bubble < old.bubble - 0.02:
        yield UPDATES, f"the pipeline idles {new.bubble:.0%}, not {old.bubble:.0%}"
    if other.max_tokens > job.max_tokens:
        yield UPDATES | SCORES, "micro-batches are larger"
    writes, wrote = serving.rollout(other, constants), serving.rollout(job, constants)
    servers = [(run.server_gpus, run.attention_dp) for run in (other, job)]
    if servers[0] != servers[1] and writes.seconds < wrote.seconds:
        held = [each.concurrency * run.num_servers for each, run in ((writes, other), (wrote, job))]
        each = "GPUs" if other.server_gpus > 1 else "GPU"
        groups = f" in {other.attention_dp} attention groups" if other.attention_dp > 1 else ""
        yield (
            {"gen"},
            f"servers of {other.server_gpus} {each}{groups} write {held[0]:.0f} completions at a time, "
            f"{writes.step_s * 1e3:.0f} ms a token, not {held[1]:.0f} at {wrote.step_s * 1e3:.0f} ms",
        )


def _ranked(job: Job, typed: Collection[str], constants: Constants) -> list[Job]:
    """The best pairs of training layout and servers, fastest first."""
    trainers = sorted(_trainers(job, typed, constants), key=lambda pair: pair[0])[:NUM_TRAINERS]
    servers = (run for run in candidates.servers(job) if not _types_again(job, run, typed))
    timed = [(serving.rollout(run, constants).seconds, index, run) for index, run in enumerate(servers)]
    pairs = []
    for (_, trainer), (_, _, run) in product(trainers, sorted(timed)[:NUM_SERVERS]):
        of_servers = ("server_gpus", "server_ep", "attention_dp", "num_servers")
        pairs.append(replace(trainer, **{name: getattr(run, name) for name in of_servers}))
    return sorted(pairs, key=lambda other: step_time(other, constants) * (1 + WORD * len(words_of(job, other))))


def _types_again(job: Job, other: Job, typed: Collection[str]) -> bool:
    keys = [f"{word.partition('=')[0]}." for word in words_of(job, other)]
    return any(key.startswith(f"{each}.") for key in keys for each in typed)


def _trainers(job: Job, typed: Collection[str], constants: Constants) -> Iterator[tuple[float, Job]]:
    """For each layout the fastest variant that fits, with the seconds of the step without generation."""
    for layout in candidates.layouts(job):
        best = min(_ways(job, layout, typed, constants), key=lambda pair: pair[0], default=None)
        if best is not None:
            yield best


def _ways(job: Job, layout: Layout, typed: Collection[str], constants: Constants) -> Iterator[tuple[float, Job]]:
    for way in candidates.ways(replace(job.actor, layout=layout), job.longest):
        if fullest(way).total > job.gpu.memory_bytes:
            continue
        other = _with(job, way)
        if _types_again(job, other, typed):
            continue
        if any(budget["total"] > job.gpu.memory_bytes for budget in gpu_budgets_of_trainer(other).values()):
            continue
        stages = stage_times(other, training(other, None, constants), serving.NOTHING, constants)
        yield sum(stages.values()), other
        if way.recompute == "none":
            return


def _with(job: Job, actor: Role) -> Job:
    """The run with another actor; critic and reference follow it if they had the same layout.

    In what they compute again they follow it if that was the same, too.
    """
    follow: dict[str, Any] = {}
    for name, role in (("critic", job.critic), ("reference", job.reference)):
        if role is not None and role.layout == job.layout:
            follows = (role.recompute, role.recompute_modules) == (job.recompute, job.recompute_modules)
            follow[name] = replace(
                role, layout=actor.layout, recompute=actor.recompute if follows else role.recompute,
                max_tokens=actor.max_tokens, log_prob_tokens=actor.log_prob_tokens,
            )  # fmt: skip
    return replace(
        job, layout=actor.layout, recompute=actor.recompute, max_tokens=actor.max_tokens,
        log_prob_tokens=actor.log_prob_tokens, **follow,
    )  # fmt: skip


def _shown(value: int | bool | None) -> str:
    return "null" if value is None else str(value).lower()
