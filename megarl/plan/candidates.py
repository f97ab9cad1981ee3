"""The layouts that a search tries: all that pass megarl's checks, except those that cannot be the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product

from megarl.config.suggest import divisors
from megarl.config.validate.servers import FAMILIES_WITH_ADP, server_misfits
from megarl.layout import Layout, ModelNumbers, exchange_misfits, misfits, numbers_of, rank_misfits, training_misfits
from megarl.plan.job import Job, Role

MOST_PP, MOST_VPP, MOST_CP, MOST_EP = 16, 4, 8, 64
TOKENS = (8192, 16384, 32768, 65536)  # of a micro-batch
MANY_TOKENS = 4096  # context parallelism is tried only for sequences of at least this length


def layouts(job: Job) -> Iterator[Layout]:
    """Layouts of the actor.  Tensor parallelism stays inside a machine, and fsdp has no pipeline."""
    numbers, ranks = numbers_of(job.hf), job.num_ranks
    sizes = divisors(ranks)
    tps = [size for size in divisors(job.gpus_per_node) if size in sizes]
    pps = [1] if job.fsdp else [size for size in sizes if size <= min(MOST_PP, job.hf["num_hidden_layers"])]
    cps = [size for size in sizes if size <= (MOST_CP if job.longest >= MANY_TOKENS else 1)]
    for tp, pp, cp, (ep, etp) in product(tps, pps, cps, _experts(numbers, sizes)):
        for vpp, first, last in _cuts(numbers, pp):
            layout = Layout(
                tp=tp, pp=pp, cp=cp, sequence_parallel=tp > 1, use_distributed_optimizer=True, ep=ep,
                etp=None if tp == 1 or ep == 1 else etp, vpp=vpp, first_stage_layers=first, last_stage_layers=last,
            )  # fmt: skip
            if _can_be(job, numbers, layout):
                yield layout


def ways(role: Role, longest: int) -> Iterator[Role]:
    """A role with other micro-batches, the largest first: without recomputation, which is the fastest, with the
    modules that the run chose, if it did, and with whole layers.
    """
    limits = {limit for limit in (*TOKENS, role.max_tokens) if limit >= longest}
    for limit in sorted(limits, reverse=True):
        for recompute in ("none", "selective", "full") if role.recompute_modules else ("none", "full"):
            yield replace(role, max_tokens=limit, log_prob_tokens=limit, recompute=recompute)


def servers(job: Job) -> Iterator[Job]:
    """The same run with other servers on the same number of GPUs.

    Expert parallelism of servers does not change the predicted time, so each server size is tried once, with the run's
    own choice: over all GPUs of a server or over none; the other choice if this one is invalid.  Attention data
    parallelism is tried for models with experts or latent attention.
    """
    is_dealt = job.server_ep == job.server_gpus > 1
    total, numbers = job.num_servers * job.server_gpus, numbers_of(job.hf)
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
    if job.hf.get("model_type") in FAMILIES_WITH_ADP and (numbers.num_experts or numbers.kv_latent_size):
        several = (groups for groups in divisors(size) if groups > 1)
        yield from (groups for groups in several if not any(server_misfits(numbers, size, ep, groups)))


def _experts(numbers: ModelNumbers, sizes: list[int]) -> list[tuple[int, int | None]]:
    if not numbers.num_experts:
        return [(1, None)]
    return [(size, 1) for size in sizes if size <= MOST_EP and numbers.num_experts % size == 0]


def _cuts(numbers: ModelNumbers, pp: int) -> Iterator[tuple[int, int | None, int | None]]:
    """vpp, and the layers of the first and the last stage if they differ from the other stages."""
    layers = numbers.num_hidden_layers or pp
    if layers % pp == 0:
        yield from ((vpp, None, None) for vpp in divisors(layers // pp) if vpp <= MOST_VPP and (pp > 1 or vpp == 1))
    elif pp > 1:
        even = layers // pp
        ends = product((even - 1, even, even + 1), repeat=2)
        fitting = [(middle, *pair) for pair in ends if (middle := _middle(layers, pp, *pair)) is not None]
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
    wrong = chain(misfits(numbers, layout), exchange_misfits(numbers, layout), rank_misfits(layout, job.num_ranks))
    if next(wrong, None):
        return False
    copies = job.num_ranks // layout.model_size
    return job.mini_batch * job.n >= copies and next(training_misfits(numbers, layout), None) is None
