"""Machines and GPUs of a run's servers and actor, computed from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megarl.config.schema import Config


def placements(config: Config, *, trains: bool) -> list[tuple[range, int]]:
    """Machines and first GPU of each server; `trains`: a trainer runs on the same machines.

    Servers are distributed evenly over the machines, in order, on consecutive GPUs.  With placement=separate they use
    the GPUs after the trainer's, each server on one machine; otherwise a server with more GPUs than a machine has gets
    whole machines.
    """
    rollout, trainer = config.rollout, config.trainer
    size, each, count = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node, rollout.num_servers
    apart = trains and rollout.placement == "separate"
    if trainer.nnodes > 1 and size > each and not apart:
        width = -(-size // each)
        return [(range(index * width, (index + 1) * width), rollout.first_gpu or 0) for index in range(count)]
    first = rollout.first_gpu if rollout.first_gpu is not None else each if apart else 0
    nodes = [index * trainer.nnodes // count for index in range(count)]
    return [(range(node, node + 1), first + (index - nodes.index(node)) * size) for index, node in enumerate(nodes)]


def gpu_seats(config: Config, urls: Sequence[str]) -> dict[str, Any] | None:
    """GPUs of the actor's ranks and of the servers, in the form of weights.push.gpu_handles.Gpus; None: unknown."""
    if config.rollout.urls:
        return None
    each = config.trainer.n_gpus_per_node
    actor = config.actor
    servers = {}
    assert actor.num_ranks is not None, "settled when the configuration was read"
    trainer = [f"{gpu // each}/{gpu % each}" for gpu in range(actor.first_rank, actor.first_rank + actor.num_ranks)]
    for url, (machines, gpu) in zip(urls, placements(config, trains=True), strict=True):
        on_each = range(config.rollout.tensor_model_parallel_size // len(machines))
        servers[url] = [f"{machine}/{gpu + rank}" for machine in machines for rank in on_each]
    return {"trainer": trainer, "servers": servers}


def serves_beside_actor(config: Config) -> bool:
    """Whether servers work on GPUs of the actor at the same time as the actor: placement=separate on the same GPUs."""
    return config.rollout.placement != "shared" and _serves_on_actors_gpus(config)


def servers_map_memory(config: Config) -> bool:
    """Whether servers map memory of the actor's ranks: those on its GPUs, in turns or at the same time.

    Adapters that travel alone do so in host memory or in requests.
    """
    return not config.adapters_kept and _serves_on_actors_gpus(config)


def _serves_on_actors_gpus(config: Config) -> bool:
    actor, servers = _gpus(config)
    return any(gpus & actor for gpus in servers)


def _gpus(config: Config) -> tuple[set[str], list[set[str]]]:
    """GPUs of the actor, and of each server that the run starts."""
    seats = gpu_seats(config, [str(index) for index in range(config.rollout.num_servers)])
    return (set(seats["trainer"]), [set(gpus) for gpus in seats["servers"].values()]) if seats else (set(), [])


def pushes_over_nccl(config: Config) -> bool:
    """Whether a run on GPUs sends weights over NCCL: to servers that it starts and that use other GPUs than the actor.

    Servers on the actor's GPUs map its memory, and adapters travel in requests.
    """
    actor, servers = _gpus(config)
    return not config.adapters_kept and any(not gpus <= actor for gpus in servers)


def joins_servers(config: Config) -> bool:
    """Whether the actor's ranks may join groups with servers, also with those that this run does not start."""
    elsewhere = bool(config.rollout.urls) or config.rollout.join is not None
    return not config.adapters_kept and (elsewhere or pushes_over_nccl(config))


def check_shared_seats(config: Config) -> None:
    """With placement=shared, a server on GPUs of the actor gets its weights through memory that both processes map.

    Raises: ValueError for another transport, and for a server that uses GPUs of the actor and also other GPUs.
    """
    rollout = config.rollout
    if rollout.placement != "shared":
        return
    assert not rollout.urls, "servers that run elsewhere share no GPU"
    actor, servers = _gpus(config)
    for index, gpus in enumerate(servers):
        common = gpus & actor
        if common and rollout.push not in ("auto", "shared"):
            raise ValueError(
                f"rollout.push={rollout.push}: NCCL joins no two processes of one GPU, and with "
                "rollout.placement=shared ranks of the actor and of servers are such; expected auto or shared"
            )
        if common and common != gpus:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={len(gpus)}: server {index} stands on {len(common)} GPUs of the "
                f"actor's and {len(gpus) - len(common)} others, and no push reaches such a server; expected servers "
                "that stand wholly on the actor's GPUs (actor.first_rank, actor.num_ranks) or wholly beside them"
            )
