"""Checks the fields of Megatron's configuration classes that a run gives by their own names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate.models import model_config
from megarl.megatron_fields import CPU_OFFLOAD, OFFLOAD_FRACTION, OPTIMIZER, OVERRIDES, RECOMPUTED, fault


def invalid_overrides(config: Config, role: str) -> Iterator[str]:
    """One sentence for each field of Megatron's that a role cannot set, or not so; none for those of the actor's."""
    for group in OVERRIDES:
        given = getattr(config.role(role).megatron, group)
        if role != "actor" and given == getattr(config.actor.megatron, group):
            continue
        for field, value in given.items():
            if (
                (why := fault(group, field, value, role))
                or field == RECOMPUTED
                and (why := _not_recomputed(config, role, value))
            ):
                yield f"{role}.megatron.{group}.{field}={show(value)}: {why}"
    if role in ("actor", "critic"):
        yield from _of_optimizer(config, role)


def _not_recomputed(config: Config, role: str, modules: Sequence[str]) -> str:
    """Why a role's layers cannot compute these again, as far as it is known before a start; "" if they can."""
    megatron = config.role(role).megatron
    if megatron.recompute_granularity != "selective":
        return f"expected {role}.megatron.recompute_granularity=selective with it"
    if "mla_up_proj" in modules and "kv_lora_rank" not in model_config(config, role):
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
