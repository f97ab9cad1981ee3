"""Defaults of verl where ours differ, for a command line that starts a run as verl's scripts do.

They are laid under everything else, so that a pasted script trains what it trains in verl.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from megarl.config.verl.models import ADAPTERS, has_adapters
from megarl.config.verl.taken import Command

_SIZES = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "actor.ppo_mini_batch_size": 256,
    "rollout.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
}
_LOCAL = "megatron.tensor_model_parallel_size"


def defaults(command: Command, known: Collection[str]) -> dict[str, Any]:
    """Our key -> verl's default, without those that are `known`, set by the command; {} for a command of our own."""
    if not command.is_whole:
        return {}
    found = {key: value for key, value in (*_SIZES.items(), *_computation(command)) if key not in known}
    batch = command.get("data.train_batch_size")
    if "actor.ppo_mini_batch_size" in found and isinstance(batch, int) and batch > 0:
        found["actor.ppo_mini_batch_size"] = min(batch, found["actor.ppo_mini_batch_size"])
    if found.get("rollout.placement") == "shared" and "rollout.num_servers" not in known:
        found["rollout.num_servers"] = _servers_on_all(command)
    return found


def differing(command: Command, known: Collection[str]) -> Iterator[str]:
    """A line for a default of verl that cannot be ours."""
    found = dict(_computation(command)) if command.is_whole else {}
    if found and "actor.strategy" not in (*found, *known):
        yield f"actor.strategy=megatron, where verl's default is fsdp: {ADAPTERS}"


def _servers_on_all(command: Command) -> int:
    """As many servers as the GPUs of the run have room for."""
    nodes, gpus, size = (
        command.get(key, _SIZES.get(key, 1))
        for key in ("trainer.nnodes", "trainer.n_gpus_per_node", "rollout.tensor_model_parallel_size")
    )
    whole = all(isinstance(number, int) and number > 0 for number in (nodes, gpus, size))
    return max(1, nodes * gpus // size) if whole else 1


def _computation(command: Command) -> Iterator[tuple[str, Any]]:
    """How models are computed: by FSDP unless the command lays them out for Megatron; in bfloat16, in turns."""
    by_megatron = command.get("model_engine") == "megatron" or any(".megatron." in key for key in command.words)
    if by_megatron or not has_adapters(command):  # else megatron, our own default: see `differing`
        yield "actor.strategy", "megatron" if by_megatron else "fsdp"
    yield "model.dtype", "bfloat16"
    yield "rollout.memory_fraction", 0.5
    yield "rollout.placement", "separate" if command.get("hybrid_engine") is False else "shared"
    if by_megatron:
        yield "actor.megatron.use_distributed_optimizer", True
        for role in ("actor", "critic", "ref"):
            size = command.get(f"{role}.{_LOCAL}", command.get(f"actor.{_LOCAL}", 1))
            yield f"{role}.megatron.sequence_parallel", size != 1
    else:
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield from ((f"actor.megatron.{key}", value) for key, value in full.items())
