"""Converts a `Config` and a GPU type to a `Job`.

Of `rollout.sglang.args` a few options are predicted, and the others are listed as not modelled.  These arguments come
after ours on the server's command line, and the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from megarl.arch.buckets import bucket_bytes_of
from megarl.arch.gpus import Gpu
from megarl.arch.layout import can_share_prefixes, shares_prefixes
from megarl.arch.megatron_fields import RECOMPUTED
from megarl.arch.mtp import trained_mtp, with_mtp
from megarl.arch.sglang_options import options_of
from megarl.config import Config, layout_of, model_config
from megarl.config.names import SUPERVISED
from megarl.config.old_log_probs import pass_share
from megarl.config.validate.models import group_of, model_of
from megarl.plan.job import Job, Role
from megarl.weights.count import check, whole
from megarl.weights.mapping.blocks import HFConfig
from megarl.weights.mapping.families import stacks_for

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
    """The run of a command (train, sft, dpo or rm) on such GPUs.  Lengths are means.

    Raises: ValueError if a model's numbers are not known, or for a value in rollout.sglang.args.
    """
    data, rollout, actor = config.data, config.rollout, config.actor
    actor_role, is_sft = role_of(config, "actor"), command in SUPERVISED
    job = Job(
        gpu=gpu,
        actor=actor_role,
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
        old_share=pass_share(config),
        router_replay=actor.router_replay,
        most_drawn=_most_drawn(config, int(actor_role.hf["vocab_size"])),
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
        push="sharded" if _pushes_slices(config, actor_role.hf) else "gathered",
        bucket_bytes=rollout.bucket_bytes or bucket_bytes_of(_WIDTHS[rollout.dtype] * whole(actor_role.hf)),
        async_save=config.trainer.async_save and config.trainer.saves,
    )
    read = read_server_args(rollout.sglang.args) if rollout.engine != "hf" else {"not_modelled": ()}
    return replace(job, **read | {"not_modelled": (*_not_modelled(config), *read["not_modelled"])})


def _pushes_slices(config: Config, hf: HFConfig) -> bool:
    """Servers on GPUs of their own cannot map what `shared` sends; each way needs servers that take slices."""
    rollout = config.rollout
    wanted = ("auto", "shared" if rollout.placement == "shared" else "sharded")
    return rollout.push in wanted and rollout.quantization != "fp8" and not stacks_for(hf)


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
    megatron = node.megatron
    longest = config.longest[1]
    sequences = node.ppo_micro_batch_size_per_gpu
    limit = node.ppo_max_token_len_per_gpu if sequences is None else sequences * longest
    recompute = recompute_of(megatron)
    lora_rank = config.actor.lora.rank if name == "actor" else 0  # adapters need local layers
    layout, device = layout_of(megatron), "cpu" if config.trainer.device == "cpu" else "cuda"
    replays = name == "actor" and config.actor.router_replay != "off"
    asked, impl = config.trainer.share_prefixes, megatron.transformer_impl
    hf, has_te = numbers_of_model(config, name), impl == "transformer_engine" and device == "cuda"
    trained = with_mtp(hf, config.actor.mtp if name == "actor" else "off")
    can_share = can_share_prefixes(trained, layout, router_replay=replays, transformer_engine=has_te)
    return Role(
        name=name,
        hf=hf,
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
        mtp=trained_mtp(trained),
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


KEY = "rollout.sglang.args"


def read_server_args(args: Sequence[str]) -> dict[str, Any]:
    """Fields of a `Job`.  Raises: ValueError of one sentence for a value that SGLang would refuse.

    Example: read(["--max-running-requests", "64", "--enable-torch-compile"]) ->
    {"max_running": 64, "not_modelled": ("rollout.sglang.args=--enable-torch-compile",)}
    """
    fields: dict[str, Any] = {}
    unknown: list[str] = []
    for option, value in options_of(args):
        if option in _MODELLED:
            field, parsed = _MODELLED[option]
            new = parsed(option, value)
            if new is None:
                unknown.append(f"{KEY}={option} {value}")
            else:
                fields[field] = new
        elif option not in _WITHOUT_EFFECT:
            unknown.append(f"{KEY}={option} {value}".strip())
    return fields | {"not_modelled": tuple(unknown)}


def _share(option: str, text: str) -> float:
    return _number(option, text, float, "a share between 0 and 1", lambda value: 0 < value < 1)


def _count(option: str, text: str) -> int:
    return _number(option, text, int, "a whole number of at least 1", lambda value: value >= 1)


def _number(option: str, text: str, kind: type, expected: str, is_right: Callable[[Any], bool]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_right(value):
        raise ValueError(f"{KEY}={option} {text}: expected {expected}")
    return value


def _cache_width(option: str, text: str) -> int | None:  # noqa: ARG001
    """Bytes of a number in the KV cache."""
    return {"auto": 2, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}.get(text)


_MODELLED: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "--mem-fraction-static": ("memory_fraction", _share),
    "--max-running-requests": ("max_running", _count),
    "--max-total-tokens": ("max_total_tokens", _count),
    "--kv-cache-dtype": ("cache_width", _cache_width),
}
_WITHOUT_EFFECT = frozenset(
    (
        "--log-level", "--log-level-http", "--log-requests", "--decode-log-interval", "--enable-metrics",
        "--random-seed", "--served-model-name", "--chat-template", "--trust-remote-code", "--watchdog-timeout",
    )
)  # fmt: skip
