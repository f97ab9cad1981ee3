"""Predicts from a `Job` the time of each stage of a step, the memory of each kind of rank, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megarl.plan import serving, transfers
from megarl.plan.gpu_budget import GpuBudget, fullest, gpu_budgets, local_totals
from megarl.plan.host import host_budget
from megarl.plan.job import Job, Role
from megarl.plan.serving import Rollout, Server
from megarl.plan.training import Training, computed, scoring, training

STAGES = (
    *("gen", "old_log_prob", "ref", "teachers", "values"),
    *("update_critic", "update_actor", "update_weights", "other"),
)

WAITS = 0.1  # share of a step that the trainer waits, above which it is said
HOST = "host"  # the row of a machine's host memory


@dataclass(frozen=True)
class Prediction:
    """Seconds, bytes, shares."""

    fits: bool
    memory: dict[str, GpuBudget]  # kind of rank -> part -> bytes
    local_totals: dict[str, int]  # kind of rank -> bytes with local layers, where they differ from `memory`
    fits_local: bool  # whether it fits with local layers, too
    stages: dict[str, float]  # the STAGES that the run has
    step_s: float
    tokens_per_s_per_gpu: float  # all tokens of the step, prompts included
    mfu: float  # of the actor's training
    mfu_step: float  # the same operations over the whole step, on all GPUs
    bubble: float  # idle time of the pipeline over its working time
    push_s: float
    computed_tokens: dict[str, float]  # of the STAGES that the trainer's models run
    micro_batches: int  # of each replica in an optimizer step
    concurrency: float  # concurrent completions of a server
    why: list[str] = field(default_factory=list)  # reasons: memory that does not fit, slow stages


def predict(job: Job) -> Prediction:
    """Predict a step.  Times are for a step in the middle of a run, without evaluation and checkpoint."""
    memory = gpu_budgets(job) | {HOST: host_budget(job)}
    trained = training(job)
    generation = serving.rollout(job)
    stages = stage_times(job, trained, generation)
    step_s = _step(job, stages, generation)
    too_small, local = list(_misfits(job, memory)), local_totals(job)
    too_small_local = list(_local_misfits(job, local))
    share = trained.mfu * trained.seconds * job.actor.num_ranks / (step_s * job.num_gpus)
    return Prediction(
        fits=not too_small,
        memory=memory,
        local_totals=local,
        fits_local=not too_small and not too_small_local,
        stages=stages,
        step_s=step_s,
        tokens_per_s_per_gpu=job.tokens / step_s / job.num_gpus,
        mfu=trained.mfu,
        mfu_step=share,
        bubble=trained.bubble,
        push_s=stages["update_weights"],
        computed_tokens=computed_tokens(job),
        micro_batches=trained.micro_batches,
        concurrency=generation.concurrency,
        why=[*too_small, *too_small_local, *_slow(job, stages, trained, generation, step_s)],
    )


def step_time(job: Job) -> float:
    """Seconds of a whole step, without a check of memory."""
    generation = serving.rollout(job)
    return _step(job, stage_times(job, training(job), generation), generation)


def stage_times(job: Job, trained: Training, generation: Rollout) -> dict[str, float]:
    """Seconds of each stage that the run has."""
    roles = {role.name: (role, fullest(role)) for role in job.roles}

    def pass_s(role: Role, share: float) -> float:
        return share * scoring(job, role) + transfers.onload_of_pass(job, role, roles[role.name][1])

    updates = {"actor": trained} | ({"critic": training(job, job.critic)} if job.critic else {})
    passes = {name: updates[name].passes_s if name in updates else 0.0 for name in roles}

    def update_s(name: str) -> float:
        return updates[name].seconds + transfers.offload_of_update(job, *roles[name], passes[name])

    stages = {"gen": generation.seconds}
    for name, (scorers, share) in scoring_stages(job).items():
        stages[name] = sum(pass_s(role, share) for role in scorers) / len(scorers)
    if job.critic:
        stages["update_critic"] = update_s("critic")
    stages["update_actor"] = update_s("actor")
    onloaded = transfers.onload_of_push(job, roles["actor"][1])
    stages["update_weights"] = transfers.push(job) + onloaded
    turn = sum(transfers.offload_of_turn(job, *roles[name], passes[name]) for name in roles)
    servers = transfers.offload_of_servers(job)
    stages["other"] = job.constants.step_s + job.constants.sequence_s * job.sequences + turn + servers
    return stages


def scoring_stages(job: Job) -> dict[str, tuple[Sequence[Role], float]]:
    """Stages of forward passes alone: the roles, which share the samples equally, and the share of the samples."""
    stages: dict[str, tuple[Sequence[Role], float]] = {}
    if job.old_share:
        stages["old_log_prob"] = [job.actor], job.old_share
    if job.reference:
        stages["ref"] = [job.reference], 1.0
    if job.teachers:
        stages["teachers"] = job.teachers, 1.0
    if job.critic:
        stages["values"] = [job.critic], 1.0
    return stages


def computed_tokens(job: Job) -> dict[str, float]:
    """Tokens that each stage of the trainer computes in a step, over all replicas; fewer where prompts are shared."""
    tokens = {
        name: share * sum(computed(job, role, learns=False) for role in roles) / len(roles)
        for name, (roles, share) in scoring_stages(job).items()
    }
    if job.critic:
        tokens["update_critic"] = computed(job, job.critic, learns=True)
    return tokens | {"update_actor": computed(job, job.actor, learns=True)}


def _step(job: Job, stages: dict[str, float], generation: Rollout) -> float:
    """The sum of the stages; ahead of the training servers generate beside all of them but the push."""
    if not job.runs_ahead:
        return sum(stages.values())
    pauses = stages["update_weights"]
    return serving.step_ahead(job, generation, _working(stages)) + pauses


def _working(stages: dict[str, float]) -> float:
    """Seconds of the trainer alone."""
    return sum(stages.values()) - stages["gen"] - stages["update_weights"]


def _misfits(job: Job, memory: dict[str, GpuBudget]) -> Iterator[str]:
    for kind, parts in memory.items():
        budget, of = (job.gpu.host_bytes, "machine") if kind == HOST else (job.gpu.memory_bytes, "GPU")
        if budget is not None and parts["total"] > budget:
            largest = max((name for name in parts if name != "total"), key=lambda name: parts[name])
            yield (
                f"{kind}: {parts['total'] / 1e9:.0f} GB of the {budget / 1e9:.0f} of a {of}, most of it {largest} "
                f"({parts[largest] / 1e9:.0f} GB)"
            )
    if not job.num_servers:
        return
    server = Server(job)
    longest = max(job.longest, job.longest_served)
    if server.cache_bytes < longest * server.token_bytes:
        yield (
            f"server: {server.weight_bytes / 1e9:.0f} GB of weights leave a cache of {server.cache_bytes / 1e9:.1f} GB "
            f"in memory_fraction={job.memory_fraction:g} of a GPU, too little for one sequence of {longest} tokens"
        )


def _local_misfits(job: Job, totals: dict[str, int]) -> Iterator[str]:
    if totals and (most := max(totals.values())) > job.gpu.memory_bytes:
        kind = max(totals, key=lambda name: totals[name])
        yield (
            f"without Transformer-Engine (local layers) it does not fit: {kind} takes {most / 1e9:.0f} GB of the "
            f"{job.gpu.memory_bytes / 1e9:.0f} of a GPU"
        )


def _slow(job: Job, stages: dict[str, float], trained: Training, generation: Rollout, step_s: float) -> Iterator[str]:
    """What takes the time, the slowest stage first."""
    total = sum(stages.values())
    slowest = max(stages, key=lambda name: stages[name])
    yield f"{slowest} takes {stages[slowest] / total:.0%} of the stages' time"
    if trained.bubble > 0.15:
        count = trained.micro_batches
        yield f"the pipeline idles {trained.bubble:.0%} of its working time, with {count} micro-batches a replica"
    if trained.exposed_s > 0.2 * trained.work_s:
        share = trained.exposed_s / trained.work_s
        yield f"{share:.0%} of a micro-batch's time is communication that nothing hides"
    if trained.gradients_s > 0.1 * trained.seconds:
        yield f"reducing gradients adds {trained.gradients_s / trained.seconds:.0%} to the training"
    if generation.bound == "cache":
        yield f"completions of a server that its KV cache holds at a time: {generation.concurrency:.0f}"
    waits = 1 - (_working(stages) + stages["update_weights"]) / step_s
    if job.runs_ahead and waits > WAITS:
        what = "update=drain" if job.drains else f"order={job.order}"
        yield f"with ahead={job.ahead} and {what} the trainer waits {waits:.0%} of a step for completions"
    if generation.tail > 0.4 * generation.seconds:
        yield f"in {generation.tail / generation.seconds:.0%} of gen no completion waits any more, and servers empty"
