"""Converts a `Config` and a GPU type to a `Job`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megarl.config import Config, layout_of, model_config
from megarl.config.old_log_probs import pass_share
from megarl.config.resolve import micro_batch_keys
from megarl.config.validate.models import group_of, model_of
from megarl.layout import can_share_prefixes, shares_prefixes
from megarl.megatron_fields import RECOMPUTED
from megarl.plan import server_args
from megarl.plan.gpus import Gpu
from megarl.plan.job import Job, Role
from megarl.plan.memory.count import check, whole
from megarl.plan.memory.memory import bucket_bytes_of

MEMORY_FRACTION = 0.85  # approximately SGLang's default
# Assumed mean lengths of prompts and completions, as shares of their limits, if the user gives none.
PROMPT_SHARE, RESPONSE_SHARE = 0.25, 0.5


def job_of(
    config: Config,
    gpu: Gpu,
    *,
    command: str = "train",
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> Job:
    """The run of a command (train or sft) on such GPUs.  Lengths are means.

    Raises: ValueError if a model's numbers are not known, or for a value in rollout.sglang.args.
    """
    data, rollout, actor = config.data, config.rollout, config.actor
    own, is_sft = role_of(config, "actor"), command == "sft"
    job = Job(
        hf=own.hf,
        gpu=gpu,
        layout=own.layout,
        num_ranks=own.num_ranks,
        first_rank=own.first_rank,
        gpus_per_node=config.trainer.n_gpus_per_node,
        prompts=data.train_batch_size,
        n=rollout.n,
        prompt_tokens=_mean("prompt", prompt_tokens, data.max_prompt_length, PROMPT_SHARE),
        response_tokens=_mean("response", response_tokens, data.max_response_length, RESPONSE_SHARE),
        longest=config.longest[1],
        longest_served=config.longest_served[1],
        most_response=data.max_response_length,
        mini_batch=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        max_tokens=own.max_tokens,
        log_prob_tokens=own.log_prob_tokens,
        max_sequences=own.max_sequences,
        recompute=own.recompute,
        recompute_modules=own.recompute_modules,
        optimizer=actor.optim.name,
        dtype=own.dtype,
        fsdp=own.fsdp,
        overlap_grad_reduce=own.overlap_grad_reduce,
        param_offload=own.param_offload,
        optimizer_offload=own.optimizer_offload,
        optimizer_on_host=own.optimizer_on_host,
        lora_rank=own.lora_rank,
        lora_targets=own.lora_targets,
        local=own.local,
        shares_prefixes=own.shares_prefixes,
        old_share=pass_share(config),
        router_replay=actor.router_replay,
        most_drawn=_most_drawn(config, int(own.hf["vocab_size"])),
        pins_routes=rollout.engine != "hf",
        # The planner does not know whether the cluster has deep_ep, so auto is planned as alltoall.
        dispatch="once" if actor.megatron.moe_token_dispatcher_type == "flex" else "each",
        critic=role_of(config, "critic") if config.uses_critic and not is_sft else None,
        reference=role_of(config, "ref") if config.uses_reference and not is_sft else None,
        teachers=() if is_sft else tuple(role_of(config, name) for name in config.teachers_on_ranks),
        reads_heads=bool(config.divergence_of_vocabulary),
        teacher_top_k=(config.distill.top_k or 0) if config.teachers and config.distill.form == "loss" else 0,
        shared=rollout.placement == "shared",
        server_gpus=rollout.tensor_model_parallel_size,
        num_servers=0 if is_sft else len(rollout.urls) or rollout.num_servers,
        server_ep=rollout.expert_parallel_size,
        attention_dp=rollout.attention_dp,
        server_precision="fp8" if rollout.quantization == "fp8" else "bf16",
        memory_fraction=rollout.memory_fraction or MEMORY_FRACTION,
        max_running=rollout.max_running_requests,
        max_in_flight=rollout.max_in_flight,
        max_total_tokens=rollout.max_total_tokens,
        lora_slots=config.adapters_kept + 1 if config.adapters_kept else 0,
        ahead=rollout.ahead if rollout.turn_s is None else 1,  # as in trainer/run.py
        order=rollout.order,
        drains=rollout.ahead > 0 and rollout.update == "drain",
        turn_s=rollout.turn_s,
        push="sharded" if rollout.push in ("auto", "sharded") else "gathered",  # shared falls back, GPUs being apart
        bucket_bytes=rollout.bucket_bytes or bucket_bytes_of(_WIDTHS[rollout.dtype] * whole(own.hf)),
        async_save=config.trainer.async_save and config.trainer.saves,
    )
    read = server_args.read(rollout.sglang.args) if rollout.engine != "hf" else {"not_modelled": ()}
    return replace(job, **read | {"not_modelled": (*_not_modelled(config), *read["not_modelled"])})


def _most_drawn(config: Config, vocab_size: int) -> int:
    """`Job.most_drawn`; top_p alone has no limit but the vocabulary."""
    if not config.narrows_sampling:
        return 0
    return vocab_size if config.rollout.top_k == -1 else min(config.rollout.top_k, vocab_size)


def _not_modelled(config: Config) -> Iterator[str]:
    """Keys that change the time of a step, and are not predicted: KEY=VALUE, and what they do."""
    rollout, filters = config.rollout, config.algorithm.filter_groups
    if rollout.ahead and rollout.update == "retract":
        yield "rollout.update=retract: servers compute the KV of what they are generating again after each push"
    if rollout.turn_s is not None:
        yield f"rollout.turn_s={rollout.turn_s:g}: servers compute the KV of what continues again in each turn"
    if config.has_agents:
        yield "agent.fn, agent.command: the time of tools; an episode is planned as one prompt and one completion"
    for role in (role for role in config.teacher_roles if role not in config.teachers_on_ranks):
        yield f"{role}.engine=server: its servers, and the time in which they answer"
    if whole := config.divergence_of_vocabulary:
        yield f"{whole}: teachers' hidden states on their way to the actor's ranks, and both heads once more"
    if filters.enable and filters.refill:
        yield "algorithm.filter_groups.refill=true: completions of the groups that others replace"


_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number


def role_of(config: Config, name: str) -> Role:
    """A role's model and its ranks."""
    node: Any = config.role(name)
    keys, megatron = micro_batch_keys(name), node.megatron
    longest = config.longest[1]
    sequences = getattr(node, keys.per_rank)
    limit = getattr(node, keys.tokens) if sequences is None else sequences * longest
    recompute = recompute_of(megatron)
    lora_rank = config.actor.lora.rank if name == "actor" else 0  # adapters need local layers
    layout, device = layout_of(megatron), "cpu" if config.trainer.device == "cpu" else "cuda"
    replays = name == "actor" and config.actor.router_replay != "off"
    asked, impl = config.trainer.share_prefixes, megatron.transformer_impl
    can_share = can_share_prefixes(
        layout, router_replay=replays, transformer_engine=impl == "transformer_engine" and device == "cuda"
    )
    return Role(
        name=name,
        hf=numbers_of_model(config, name),
        layout=layout,
        num_ranks=node.num_ranks,
        first_rank=node.first_rank,
        max_tokens=limit,
        log_prob_tokens=limit,
        max_sequences=sequences,
        recompute=recompute,
        recompute_modules=tuple(megatron.override_transformer_config.get(RECOMPUTED, ())),
        optimizer=node.optim.name if name in ("actor", "critic") else None,
        dtype=config.model.dtype,
        fsdp=node.strategy == "fsdp",
        overlap_grad_reduce=megatron.overlap_grad_reduce,
        param_offload=megatron.param_offload,
        optimizer_offload=megatron.optimizer_offload,
        optimizer_on_host=name in ("actor", "critic") and node.optim.on_host,
        lora_rank=lora_rank,
        lora_targets=tuple(config.actor.lora.targets),
        local=device == "cpu" or impl == "local" or config.model.dtype == "float32" or lora_rank > 0 or asked == "on",
        shares_prefixes=shares_prefixes(asked, name, device, can_share=can_share),
    )


def numbers_of_model(config: Config, role: str) -> dict[str, Any]:
    """The role's config.json.  Raises: ValueError if it is not known yet or the model is not supported."""
    hf = model_config(config, role)
    if not hf:
        where = f"{group_of(role)}.path={model_of(config, role).path}"
        raise ValueError(f"{where}: its config.json is not here; expected a folder that has one, or model=PRESET")
    check(hf)
    return hf


def recompute_of(megatron: Any) -> str:
    """none | selective | full, from a role's `megatron` group; method=block counts as none: most layers are kept."""
    if megatron.recompute_granularity == "full":
        return "full" if megatron.recompute_method == "uniform" else "none"
    return megatron.recompute_granularity or "none"


def _mean(name: str, given: float | None, limit: int, share: float) -> float:
    if given is None:
        return limit * share
    if not 0 < given <= limit:
        raise ValueError(f"--{name}-tokens {given:g}: expected more than 0, and at most data.max_{name}_length={limit}")
    return given
