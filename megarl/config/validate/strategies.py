"""Checks strategies, optimizers and recomputation for invalid combinations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megarl.arch.layout import exchange_misfits
from megarl.arch.megatron_fields import (
    CPU_OFFLOAD,
    MTP_LOSS_SCALE,
    OFFLOAD_FRACTION,
    OPTIMIZER,
    OVERRIDES,
    RECOMPUTED,
    fault,
)
from megarl.config.resolve import layout_of
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate import models
from megarl.config.validate.layouts import LEARNERS, used_roles
from megarl.config.validate.models import model_config


def without_shards(config: Config, command: str) -> list[str]:
    """Change strategy=fsdp to megatron, in place and with a warning, if no two ranks share the role's parameters."""
    said = []
    for role in used_roles(config, command):
        node = config.role(role)
        layout = layout_of(node.megatron)
        if node.strategy == "fsdp" and node.num_ranks // (layout.tp * layout.pp) < 2:
            node.strategy = "megatron"
            said.append(f"{role}.strategy=fsdp")
    return (
        [f"{', '.join(said)}: no two ranks share a parameter that could be sharded; runs as megatron"] if said else []
    )


def with_local_layers(config: Config, command: str) -> list[str]:
    """A line about roles that get other layers on GPUs than `auto` takes for bfloat16."""
    chosen = [role for role in used_roles(config, command) if config.role(role).megatron.transformer_impl == "auto"]
    if not chosen or config.model.dtype != "float32" or config.trainer.device != "cuda":
        return []
    why = "Transformer-Engine rounds float32 to TF32, so layers are Megatron's local ones"
    return [f"model.dtype=float32: {why}, slower; bfloat16 takes Transformer-Engine's ({', '.join(chosen)})"]


def contradictions(config: Config, command: str) -> Iterator[str]:
    """One sentence for each invalid combination."""
    for role in used_roles(config, command):
        yield from _strategy(config, role)
        if role in LEARNERS:
            yield from _optimizer(config, role)
            yield from _recomputing(config, role)


def _strategy(config: Config, role: str) -> Iterator[str]:
    node, is_exact = config.role(role), config.model.dtype == "float32"
    if node.strategy == "none" and node.num_ranks > 1:
        yield f"{role}.strategy=none: expected megatron or fsdp, because there are {node.num_ranks} ranks"
    if node.megatron.transformer_impl == "transformer_engine" and config.trainer.device == "cpu":
        yield f"{role}.megatron.transformer_impl=transformer_engine: it runs on GPUs only; expected auto or local"
    elif node.megatron.transformer_impl == "transformer_engine" and is_exact:
        yield (
            f"{role}.megatron.transformer_impl=transformer_engine: its products round float32 to TF32, and its fused "
            "attention takes no float32; expected model.dtype=bfloat16, or transformer_impl=auto or local"
        )
    if node.megatron.moe_token_dispatcher_type == "flex" and (reason := _without_deepep(config, role)):
        yield f"{role}.megatron.moe_token_dispatcher_type=flex: {reason}; expected auto or alltoall"
    lora = config.actor.lora.rank if role == "actor" else 0
    if lora and node.megatron.transformer_impl == "transformer_engine":
        yield (
            f"{role}.megatron.transformer_impl=transformer_engine: adapters need local layers, and "
            f"actor.lora.rank={lora}; expected auto or local"
        )
    cp, is_local = node.megatron.context_parallel_size, node.megatron.transformer_impl == "local"
    if cp > 1 and config.trainer.device == "cuda" and (lora or is_local or is_exact):
        local = f"{role}.megatron.transformer_impl=local means" if is_local else "model.dtype=float32 means"
        local = f"actor.lora.rank={lora} needs" if lora else local
        yield (
            f"{role}.megatron.context_parallel_size={cp}: on GPUs it needs Transformer Engine's layers, and {local} "
            "local layers; expected 1"
        )
    elif cp > 1 and config.trainer.device == "cuda":
        for misfit in exchange_misfits(models.model_numbers(config, role), layout_of(node.megatron)):
            yield f"{role}.megatron.{misfit.sentence}"
    if role not in LEARNERS:
        return
    for key in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
        if node.strategy == "none" and getattr(node.megatron, key):
            yield f"{role}.megatron.{key}=true: {role}.strategy=none is one rank without a wrapper; expected false"
    if node.strategy == "fsdp" and node.optim.name != "adamw":
        yield f"{role}.strategy=fsdp: it shards adamw only, not {role}.optim.name={node.optim.name}; expected megatron"
    if node.strategy == "fsdp" and role == "actor" and config.actor.lora.rank:
        yield f"actor.strategy=fsdp: actor.lora.rank={config.actor.lora.rank} trains adapters only; expected megatron"


def _without_deepep(config: Config, role: str) -> str:
    """Why DeepEP cannot dispatch the tokens of a role; empty if it can where the package deep_ep is installed."""
    layout, numbers = layout_of(config.role(role).megatron), models.model_numbers(config, role)
    if config.trainer.device == "cpu":
        return "it runs on GPUs only"
    if numbers.num_hidden_layers is not None and not numbers.num_experts:
        return "the model has no experts"
    if layout.ep * layout.expert_tp == 1:
        return "each rank has all experts whole"
    return "" if config.model.dtype == "bfloat16" else f"it sends bfloat16, and model.dtype={config.model.dtype}"


def _optimizer(config: Config, role: str) -> Iterator[str]:
    node = config.role(role)
    megatron, name = node.megatron, node.optim.name
    if megatron.use_distributed_optimizer and name != "adamw":
        key = f"{role}.megatron.use_distributed_optimizer=true"
        yield f"{key}: Megatron shards adamw only; expected false with {name}"
    if megatron.overlap_param_gather and not megatron.use_distributed_optimizer:
        gathered = "only the distributed optimizer gathers parameters"
        yield (
            f"{role}.megatron.overlap_param_gather=true: {gathered}; expected use_distributed_optimizer=true, or false"
        )
    if role == "actor" and (rank := config.actor.lora.rank):
        if megatron.overlap_param_gather:
            past = f"actor.lora.rank={rank} reads parameters past Megatron's hooks"
            yield f"actor.megatron.overlap_param_gather=true: {past}; expected false"
        if name == "muon":
            yield f"actor.optim.name=muon: actor.lora.rank={rank} trains thin matrices only; expected adamw or sgd"


def _recomputing(config: Config, role: str) -> Iterator[str]:
    megatron = config.role(role).megatron
    group, how = f"{role}.megatron", megatron.recompute_granularity
    if how == "full" and (megatron.recompute_method is None or megatron.recompute_num_layers is None):
        wanted = "expected recompute_method=uniform or block, and recompute_num_layers=NUMBER"
        yield f"{group}.recompute_granularity=full: {wanted}"
    for key in ("recompute_method", "recompute_num_layers"):
        value = getattr(megatron, key)
        if how != "full" and value is not None:
            yield f"{group}.{key}={value}: belongs to recompute_granularity=full; expected null, or full"


def invalid_overrides(config: Config, role: str) -> Iterator[str]:
    """One sentence for each field of Megatron's that a role cannot set, or not so.

    None for a value that is the actor's and wrong there, too.
    """
    for group in OVERRIDES:
        of_actor = getattr(config.actor.megatron, group)
        for field, value in getattr(config.role(role).megatron, group).items():
            is_told = role != "actor" and of_actor.get(field) == value and _wrong(config, "actor", group, field, value)
            if not is_told and (why := _wrong(config, role, group, field, value)):
                yield f"{role}.megatron.{group}.{field}={show(value)}: {why}"
    if role in ("actor", "critic"):
        yield from _of_optimizer(config, role)


def _wrong(config: Config, role: str, group: str, field: str, value: Any) -> str:
    """Why a role cannot have this value of a field; "" if it can."""
    why = fault(group, field, value, role)
    if not why and field == MTP_LOSS_SCALE:
        return _not_weighed(config, value)
    return why or (_not_recomputed(config, role, value) if field == RECOMPUTED else "")


def _not_weighed(config: Config, value: float) -> str:
    """Why the loss of MTP layers cannot have this weight, which other roles may have from the actor; "" if it can."""
    if not 0 < value < math.inf:
        return "expected a number above 0"
    is_used = config.actor.mtp != "off" and value == config.actor.mtp_coef
    return "" if is_used else "belongs to the actor, with actor.mtp=detached or joint"


def _not_recomputed(config: Config, role: str, modules: Sequence[str]) -> str:
    """Why a role's layers cannot compute these again, as far as it is known before a start; "" if they can.

    No modules undo a choice of an earlier word or file, and are for other granularities.
    """
    megatron = config.role(role).megatron
    if bool(modules) != (megatron.recompute_granularity == "selective"):
        wanted = "selective" if modules else "null, or full,"
        return f"expected {role}.megatron.recompute_granularity={wanted} with it"
    hf = model_config(config, role)  # empty: not known yet
    if "mla_up_proj" in modules and hf and "kv_lora_rank" not in hf:
        return "mla_up_proj is of latent attention, which the model has not"
    adapts = role == "actor" and config.actor.lora.rank > 0
    if {"layernorm", "moe_act"} & {*modules} and (
        megatron.transformer_impl == "local" or config.model.dtype == "float32" or adapts
    ):
        return "only Transformer Engine's layers compute layernorm and moe_act again, and these are local"
    return ""


def _of_optimizer(config: Config, role: str) -> Iterator[str]:
    node = config.role(role)
    given, place = node.optim.override_optimizer_config, f"{role}.optim.{OPTIMIZER}"
    wrong = [(name, value, why) for name, value in given.items() if (why := fault(OPTIMIZER, name, value, role))]
    yield from (f"{place}.{name}={show(value)}: {why}" for name, value, why in wrong)
    if wrong or not node.optim.on_host:
        return
    key = f"{place}.{CPU_OFFLOAD}=true"
    if config.trainer.device == "cpu":
        yield f"{key}: Megatron's HybridDeviceOptimizer needs a GPU's streams, and trainer.device=cpu has none"
    if node.optim.name != "adamw":
        yield f"{key}: expected {role}.optim.name=adamw, it is {node.optim.name}"
    if node.strategy != "megatron":
        yield f"{key}: expected {role}.strategy=megatron, it is {node.strategy}"
    if config.model.dtype == "float32" and node.megatron.use_distributed_optimizer:
        # Megatron's shards of float32 parameters are views, which torch's optimizers refuse (distrib_optimizer.py:421).
        yield f"{key}: expected model.dtype=bfloat16 or {role}.megatron.use_distributed_optimizer=false"
    if given.get(OFFLOAD_FRACTION) != 1:
        share = show(given.get(OFFLOAD_FRACTION, 0.0))
        whole = f"the whole state is on the host, or with {CPU_OFFLOAD}=false none"
        yield f"{place}.{OFFLOAD_FRACTION}={share}: expected 1.0: {whole}"
