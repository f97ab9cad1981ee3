"""Checks the fields of Megatron's configuration classes that a run gives by their own names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate.models import model_config
from megarl.megatron_fields import CPU_OFFLOAD, OFFLOAD_FRACTION, OPTIMIZER, OVERRIDES, RECOMPUTED, fault


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
    return fault(group, field, value, role) or (_not_recomputed(config, role, value) if field == RECOMPUTED else "")


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
