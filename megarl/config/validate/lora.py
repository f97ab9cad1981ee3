"""Checks whether the model has the targets of adapters, and whether servers can take these adapters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.arch.layout import numbers_of
from megarl.arch.projections import chosen, projections_of
from megarl.config.schema import Config
from megarl.config.validate import models

ADAPTER = "actor.lora.push=adapter"
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}
_LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}


def contradictions(config: Config) -> Iterator[str]:
    """One sentence for each invalid combination."""
    lora, hf = config.actor.lora, models.model_config(config, "actor")
    if not lora.rank:
        return
    if lora.push == "adapter" and config.rollout.engine == "hf":
        yield f"{ADAPTER}: expected merged, because rollout.engine=hf serves no adapters"
    if not hf:
        return
    try:
        targets = chosen(lora.targets, projections_of(hf))
    except ValueError as error:
        yield f"actor.{error}"
        return
    heads, tp = numbers_of(hf).num_key_value_heads, config.actor.megatron.tensor_model_parallel_size
    if heads is not None and heads < tp:
        shared = f"adapters of num_key_value_heads={heads} that ranks share are not made"
        yield f"actor.megatron.tensor_model_parallel_size={tp}: {shared}; expected at most {heads}, or lora.rank=0"
    on_cpu = config.trainer.device == "cpu" and not config.rollout.urls
    if lora.push == "adapter" and (reason := refused_by_sglang(hf, set(targets), on_cpu=on_cpu)):
        yield f"{ADAPTER}: {reason}; expected push=merged"


def refused_by_sglang(hf: Mapping[str, Any], targets: set[str], *, on_cpu: bool) -> str:
    """Why SGLang 0.5.23 cannot serve adapters of these projections; "" if it can.

    It keeps q, k and v in one matrix, gate and up in another, and in DeepSeek-V3 the two latents in a third: parts that
    it would drop without an error, or that it cannot do without, are named here (sglang/srt/lora/lora.py).
    """
    numbers, experts = numbers_of(hf), adapts_experts(hf, targets)
    if on_cpu and (experts or adapts_latents(targets)):
        return f"SGLang has adapters of {'experts' if experts else 'latent attention'} on GPUs only"
    if experts and hf.get("model_type") == "gpt_oss":  # in SGLang as outside, rows of gate and up alternate
        return "SGLang has no adapters of the single experts of gpt_oss, which it holds as stacks"
    if experts and targets & _FEED_FORWARD != _FEED_FORWARD:
        return "SGLang adapts experts only if gate_proj, up_proj and down_proj all are targets"
    if experts and numbers.dense_layers and not numbers.shared_intermediate_size:
        return "SGLang adapts no dense feed-forwards beside experts in a model without shared experts"
    if "kv_lora_rank" in hf:
        return _refused_latent(hf, targets)
    if targets & {"q_proj", "k_proj", "v_proj"} and not {"q_proj", "v_proj"} <= targets:
        return "SGLang adapts q_proj, k_proj and v_proj only if q_proj and v_proj are targets"
    if "up_proj" in targets and "gate_proj" not in targets:
        return "SGLang adapts up_proj only if gate_proj is a target"
    return ""


def adapts_experts(hf: Mapping[str, Any], targets: set[str]) -> bool:
    """Whether adapters of these projections include some of routed experts."""
    return bool(numbers_of(hf).num_experts) and bool(targets & _FEED_FORWARD)


def partly_loaded_by_peft(hf: Mapping[str, Any], targets: set[str]) -> bool:
    """Whether PEFT 0.21 leaves out adapters of these projections when it loads the folder of a run.

    Beside adapters of routed experts it leaves out those of other feed-forwards, whose projections have the same names
    (peft/utils/transformers_weight_conversion.py: _convert_peft_config_moe).
    """
    numbers = numbers_of(hf)
    return adapts_experts(hf, targets) and bool(numbers.dense_layers or numbers.shared_intermediate_size)


def adapts_latents(targets: set[str]) -> bool:
    """Whether adapters of these projections include some of latent attention."""
    return bool(targets & _LATENT)


def _refused_latent(hf: Mapping[str, Any], targets: set[str]) -> str:
    if hf.get("q_lora_rank") is None and targets & {"q_proj", "kv_a_proj_with_mqa"}:
        return "SGLang adapts q_proj and kv_a_proj_with_mqa only of models with q_lora_rank"
    if len(targets & {"q_a_proj", "kv_a_proj_with_mqa"}) == 1:
        return "SGLang adapts q_a_proj and kv_a_proj_with_mqa only if both are targets"
    return ""
