"""Searches the best layouts of a run by prediction: training and servers separately, then combined.

Memory is predicted first, and time only for layouts that fit.  The best are composed again as `megarl train` does, so
that every proposal passes all checks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from megarl.arch.layout import (
    KEYS,
    Layout,
    ModelNumbers,
    exchange_misfits,
    misfits,
    numbers_of,
    rank_misfits,
    sharing_misfits,
    training_misfits,
)
from megarl.arch.megatron_fields import RECOMPUTED, TRANSFORMER
from megarl.config.validate.layouts import divisors
from megarl.config.validate.servers import FAMILIES_WITH_ADP, server_misfits
from megarl.plan import serving
from megarl.plan.gpu_budget import fullest, gpu_budgets_of_trainer
from megarl.plan.job import Job, Role
from megarl.plan.predict import Prediction, predict, stage_times, step_time
from megarl.plan.training import training

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


def search(job: Job, composed: Composed, typed: Collection[str] = ()) -> list[Proposal]:
    """The best layouts that fit, fastest first; only layouts faster than the current run, if that fits.

    None that needs another value of a `typed` key, or of a part of one.
    """
    current = predict(job)
    proposals: dict[tuple[int, ...], Proposal] = {}
    for other in _ranked(job, typed):
        layout, words = other.actor.layout, words_of(job, other)
        kind = (layout.tp, layout.pp, layout.cp, layout.ep, other.server_gpus, other.attention_dp)
        if not words or kind in proposals or not _is_better(predict(other), current):
            continue
        real = composed(words)  # the slowest call here
        prediction = predict(real) if real else None
        if real and prediction and _is_better(prediction, current):
            proposals[kind] = Proposal(real, prediction, words, reason(job, current, real, prediction))
        if len(proposals) == NUM_PROPOSED:
            break
    return sorted(proposals.values(), key=lambda one: one.prediction.step_s)


def _is_better(new: Prediction, current: Prediction) -> bool:
    return new.fits and (not current.fits or new.step_s * WORTH <= current.step_s)


def words_of(job: Job, other: Job) -> list[str]:
    """The words to type for another run on the same GPUs."""
    words = [
        f"actor.megatron.{key}={_shown(getattr(other.actor.layout, field))}"
        for field, key in KEYS.items()
        if getattr(other.actor.layout, field) != getattr(job.actor.layout, field)
    ]
    if other.actor.recompute != job.actor.recompute:
        values = ("full", "uniform", "1") if other.actor.recompute == "full" else ("null", "null", "null")
        keys = ("recompute_granularity", "recompute_method", "recompute_num_layers")
        words += [f"actor.megatron.{key}={value}" for key, value in zip(keys, values, strict=True)]
        if job.actor.recompute_modules:
            words.append(f"actor.megatron.{TRANSFORMER}.{RECOMPUTED}=[]")
    for key, new, old in (
        ("actor.ppo_max_token_len_per_gpu", other.actor.max_tokens, job.actor.max_tokens),
        ("rollout.tensor_model_parallel_size", other.server_gpus, job.server_gpus),
        ("rollout.expert_parallel_size", other.server_ep, job.server_ep),
        ("rollout.attention_dp", other.attention_dp, job.attention_dp),
        ("rollout.num_servers", other.num_servers, job.num_servers),
    ):
        if new != old:
            words.append(f"{key}={new}")
    return words


def reason(job: Job, current: Prediction, other: Job, new: Prediction) -> str:
    """One sentence: which stages get faster, and why."""
    if not current.fits:
        return f"it fits, and the run as it is does not: {current.why[0]}"
    saved = {name: seconds - new.stages.get(name, 0.0) for name, seconds in current.stages.items()}
    most = sorted((name for name in saved if saved[name] > 0.01 * current.step_s), key=lambda name: -saved[name])
    stages = " and ".join(
        f"{name} {seconds_text(current.stages[name])} -> {seconds_text(new.stages[name])} s" for name in most[:2]
    )
    causes = [cause for stages_of, cause in _causes(job, other) if stages_of & set(most[:2])]
    return f"{stages or 'the whole step'}: {'; '.join(causes) or 'less of everything that is waited for'}"


def seconds_text(seconds: float) -> str:
    """Seconds as text, with a decimal below 10."""
    return f"{seconds:.1f}" if seconds < 9.95 else f"{seconds:.0f}"


def _causes(job: Job, other: Job) -> Iterator[tuple[set[str], str]]:
    """Possible reasons, each with the stages that it makes faster."""
    old, new = training(job), training(other)
    if job.actor.recompute == "full" and other.actor.recompute != "full":
        layouts = job.actor.layout, other.actor.layout
        sizes = {axis: [getattr(layout, axis) for layout in layouts] for axis in ("tp", "cp", "pp")}
        ways = " and ".join(f"{axis} {after}" for axis, (before, after) in sizes.items() if after > before)
        because = f"with {ways} activations fit" if ways else "activations fit"
        yield UPDATES, f"{because}, and layers are not run again in the backward pass"
    before, after = (each.exposed_s / each.seconds for each in (old, new))
    if after < before - 0.02:
        yield UPDATES | SCORES, f"communication that nothing hides is {after:.0%} of the training, not {before:.0%}"
    if new.bubble < old.bubble - 0.02:
        yield UPDATES, f"the pipeline idles {new.bubble:.0%}, not {old.bubble:.0%}"
    if other.actor.max_tokens > job.actor.max_tokens:
        yield UPDATES | SCORES, "micro-batches are larger"
    after_gen, before_gen = serving.rollout(other), serving.rollout(job)
    servers = [(run.server_gpus, run.attention_dp) for run in (other, job)]
    if servers[0] != servers[1] and after_gen.seconds < before_gen.seconds:
        held = [each.concurrency * run.num_servers for each, run in ((after_gen, other), (before_gen, job))]
        each = "GPUs" if other.server_gpus > 1 else "GPU"
        groups = f" in {other.attention_dp} attention groups" if other.attention_dp > 1 else ""
        yield (
            {"gen"},
            f"servers of {other.server_gpus} {each}{groups} generate {held[0]:.0f} completions at a time, "
            f"{after_gen.step_s * 1e3:.0f} ms a token, not {held[1]:.0f} at {before_gen.step_s * 1e3:.0f} ms",
        )


def _ranked(job: Job, typed: Collection[str]) -> list[Job]:
    """The best pairs of training layout and servers, fastest first."""
    trainers = sorted(_trainers(job, typed), key=lambda pair: pair[0])[:NUM_TRAINERS]
    servers = (run for run in servers_of(job) if not _types_again(job, run, typed))
    timed = [(serving.rollout(run).seconds, index, run) for index, run in enumerate(servers)]
    pairs = []
    for (_, trainer), (_, _, run) in product(trainers, sorted(timed)[:NUM_SERVERS]):
        of_servers = ("server_gpus", "server_ep", "attention_dp", "num_servers")
        pairs.append(replace(trainer, **{name: getattr(run, name) for name in of_servers}))
    return sorted(pairs, key=lambda other: step_time(other) * (1 + WORD * len(words_of(job, other))))


def _types_again(job: Job, other: Job, typed: Collection[str]) -> bool:
    keys = [f"{word.partition('=')[0]}." for word in words_of(job, other)]
    return any(key.startswith(f"{each}.") for key in keys for each in typed)


def _trainers(job: Job, typed: Collection[str]) -> Iterator[tuple[float, Job]]:
    """For each layout the fastest variant that fits, with the seconds of the step without generation."""
    for layout in layouts(job):
        best = min(_variants(job, layout, typed), key=lambda pair: pair[0], default=None)
        if best is not None:
            yield best


def _variants(job: Job, layout: Layout, typed: Collection[str]) -> Iterator[tuple[float, Job]]:
    for way in variants(replace(job.actor, layout=layout), job.longest):
        if fullest(way).total > job.gpu.memory_bytes:
            continue
        other = _with(job, way)
        if _types_again(job, other, typed):
            continue
        if any(budget["total"] > job.gpu.memory_bytes for budget in gpu_budgets_of_trainer(other).values()):
            continue
        stages = stage_times(other, training(other), serving.NOTHING)
        yield sum(stages.values()), other
        if way.recompute == "none":
            return


def _with(job: Job, actor: Role) -> Job:
    """The run with another actor; critic and reference follow it if they had the same layout.

    In what they compute again they follow it if that was the same, too.
    """
    follow: dict[str, Any] = {}
    for name, role in (("critic", job.critic), ("reference", job.reference)):
        if role is not None and role.layout == job.actor.layout:
            follows = (role.recompute, role.recompute_modules) == (job.actor.recompute, job.actor.recompute_modules)
            follow[name] = replace(
                role, layout=actor.layout, recompute=actor.recompute if follows else role.recompute,
                max_tokens=actor.max_tokens, log_prob_tokens=actor.log_prob_tokens,
            )  # fmt: skip
    return replace(job, actor=actor, **follow)


def _shown(value: int | bool | None) -> str:
    return "null" if value is None else str(value).lower()


MOST_PP, MOST_VPP, MOST_CP, MOST_EP = 16, 4, 8, 64
TOKENS = (8192, 16384, 32768, 65536)  # of a micro-batch
MANY_TOKENS = 4096  # context parallelism is tried only for sequences of at least this length


def layouts(job: Job) -> Iterator[Layout]:
    """Layouts of the actor.  Tensor parallelism stays inside a machine, and fsdp has no pipeline."""
    numbers, ranks = numbers_of(job.actor.hf), job.actor.num_ranks
    sizes = divisors(ranks)
    tps = [size for size in divisors(job.gpus_per_node) if size in sizes]
    pps = [1] if job.actor.fsdp else [size for size in sizes if size <= min(MOST_PP, job.actor.hf["num_hidden_layers"])]
    cps = [size for size in sizes if size <= (MOST_CP if job.longest >= MANY_TOKENS else 1)]
    cuts = [(pp, *cut) for pp in pps for cut in _cuts(numbers, pp)]
    for tp, (pp, vpp, first, last), cp, (ep, etp) in product(tps, cuts, cps, _experts(numbers, sizes)):
        layout = Layout(
            tp=tp, pp=pp, cp=cp, sequence_parallel=tp > 1, use_distributed_optimizer=True, ep=ep,
            etp=None if tp == 1 or ep == 1 else etp, vpp=vpp, first_stage_layers=first, last_stage_layers=last,
        )  # fmt: skip
        if _can_be(job, numbers, layout):
            yield layout


def variants(role: Role, longest: int) -> Iterator[Role]:
    """A role with other micro-batches, the largest first: without recomputation, which is the fastest, with the
    modules that the run chose, if it did, and with whole layers.
    """
    limits = {limit for limit in (*TOKENS, role.max_tokens) if limit >= longest}
    for limit in sorted(limits, reverse=True):
        for recompute in ("none", "selective", "full") if role.recompute_modules else ("none", "full"):
            yield replace(role, max_tokens=limit, log_prob_tokens=limit, recompute=recompute)


def servers_of(job: Job) -> Iterator[Job]:
    """The same run with other servers on the same number of GPUs.

    Expert parallelism of servers does not change the predicted time, so each server size is tried once, with the run's
    own choice: over all GPUs of a server or over none; the other choice if this one is invalid.  Attention data
    parallelism is tried for models with experts or latent attention.
    """
    is_dealt = job.server_ep == job.server_gpus > 1
    total, numbers = job.num_servers * job.server_gpus, numbers_of(job.actor.hf)
    each = job.gpus_per_node
    for size in divisors(total):
        if max(size, each) % min(size, each) or (not job.shared and size > each):
            continue
        ways_of_size = [ep for ep in (1, size) if next(server_misfits(numbers, size, ep), None) is None]
        if ways_of_size:
            ep = ways_of_size[-1] if is_dealt else ways_of_size[0]
            other = replace(job, server_gpus=size, server_ep=ep, num_servers=total // size)
            yield from (replace(other, attention_dp=groups) for groups in _groups(job, numbers, size, ep))


def _groups(job: Job, numbers: ModelNumbers, size: int, ep: int) -> Iterator[int]:
    """Numbers of attention groups of a server."""
    yield 1
    if job.actor.hf.get("model_type") in FAMILIES_WITH_ADP and (numbers.num_experts or numbers.kv_latent_size):
        several = (groups for groups in divisors(size) if groups > 1)
        yield from (groups for groups in several if not any(server_misfits(numbers, size, ep, groups)))


def _experts(numbers: ModelNumbers, sizes: list[int]) -> list[tuple[int, int | None]]:
    if not numbers.num_experts:
        return [(1, None)]
    return [(size, 1) for size in sizes if size <= MOST_EP and numbers.num_experts % size == 0]


def _cuts(numbers: ModelNumbers, pp: int) -> Iterator[tuple[int, int | None, int | None]]:
    """vpp, and the layers of the first and the last stage if they differ from the other stages."""
    layers, sharing = numbers.num_hidden_layers or pp, numbers.layers_that_share

    def can_be(vpp: int = 1, first: int | None = None, last: int | None = None) -> bool:
        cut = Layout(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
        return not any(sharing_misfits(cut, layers, sharing))

    vpps = divisors(layers // pp) if layers % pp == 0 else []
    if evenly := [vpp for vpp in vpps if vpp <= MOST_VPP and (pp > 1 or vpp == 1) and can_be(vpp)]:
        yield from ((vpp, None, None) for vpp in evenly)
    elif pp > 1:
        ends = product(range(1, 2 * (layers // pp) + 2), repeat=2)
        fitting = [(middle, *pair) for pair in ends if (middle := _middle(layers, pp, *pair)) is not None]
        fitting = [cut for cut in fitting if can_be(1, *cut[1:])]
        if fitting:  # the last stage also has the head, so among equally even splits take the smallest last stage
            _, first, last = min(fitting, key=lambda sizes: (max(sizes), max(sizes) - min(sizes), sizes[2]))
            yield 1, first, last


def _middle(layers: int, pp: int, first: int, last: int) -> int | None:
    """Layers of each middle stage, or of the first if there is none; None if they cannot be distributed evenly."""
    left = layers - first - last
    if min(first, last) < 1 or (pp == 2 and left) or (pp > 2 and (left < pp - 2 or left % (pp - 2))):
        return None
    return left // (pp - 2) if pp > 2 else first


def _can_be(job: Job, numbers: ModelNumbers, layout: Layout) -> bool:
    ranks = job.actor.num_ranks
    wrong = chain(misfits(numbers, layout), exchange_misfits(numbers, layout), rank_misfits(layout, ranks))
    if next(wrong, None):
        return False
    copies = ranks // layout.model_size
    return job.mini_batch * job.n >= copies and next(training_misfits(numbers, layout), None) is None
