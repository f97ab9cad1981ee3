"""Targets of adapters that the model has, and adapters that servers can take."""

from typing import Any

import pytest
from config_helpers import load, refusal

from megarl.config.validate.lora import partly_loaded_by_peft, refused_by_sglang

DEEPSEEK: dict[str, Any] = {"num_hidden_layers": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "n_shared_experts": 1}
DEEPSEEK |= {"n_routed_experts": 8, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
PLAIN = DEEPSEEK | {"q_lora_rank": None}
QWEN: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 8}
OSS: dict[str, Any] = {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 8, "intermediate_size": 8}
DENSE: dict[str, Any] = {"num_hidden_layers": 4}
ADAPTER = ("actor.lora.rank=8", "actor.lora.push=adapter", "rollout.engine=sglang")


@pytest.mark.parametrize(
    ("hf", "targets", "reason"),
    [
        (DENSE, "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj", ""),
        (DENSE, "q_proj v_proj", ""),
        (DENSE, "o_proj", ""),
        (DENSE, "q_proj", "SGLang adapts q_proj, k_proj and v_proj only if q_proj and v_proj are targets"),
        (DENSE, "k_proj v_proj", "SGLang adapts q_proj, k_proj and v_proj only if q_proj and v_proj are targets"),
        (DENSE, "up_proj", "SGLang adapts up_proj only if gate_proj is a target"),
        (QWEN, "q_proj v_proj gate_proj up_proj down_proj", ""),
        (QWEN, "down_proj", "SGLang adapts experts only if gate_proj, up_proj and down_proj all are targets"),
        (QWEN | {"mlp_only_layers": [1]}, "gate_proj up_proj down_proj", "SGLang adapts no dense feed-forwards beside"),
        (QWEN | {"mlp_only_layers": [1]}, "o_proj", ""),
        (OSS, "gate_proj up_proj down_proj", "SGLang has no adapters of the single experts of gpt_oss, which it holds"),
        (OSS, "q_proj k_proj v_proj o_proj", ""),
        (DEEPSEEK, "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj gate_proj up_proj down_proj", ""),
        (DEEPSEEK, "q_a_proj", "SGLang adapts q_a_proj and kv_a_proj_with_mqa only if both are targets"),
        (PLAIN, "q_proj", "SGLang adapts q_proj and kv_a_proj_with_mqa only of models with q_lora_rank"),
        (PLAIN, "kv_b_proj o_proj", ""),
    ],
)
def test_adapters_that_sglang_would_drop_or_fail_on_are_known(hf: dict[str, Any], targets: str, reason: str) -> None:
    assert refused_by_sglang(hf, set(targets.split()), on_cpu=False).startswith(reason)
    assert bool(refused_by_sglang(hf, set(targets.split()), on_cpu=False)) is bool(reason)


def test_experts_and_latents_have_adapters_on_gpus_only() -> None:
    experts, latents = {"gate_proj", "up_proj", "down_proj"}, {"kv_b_proj"}
    assert refused_by_sglang(QWEN, experts, on_cpu=True) == "SGLang has adapters of experts on GPUs only"
    assert refused_by_sglang(DEEPSEEK, latents, on_cpu=True) == "SGLang has adapters of latent attention on GPUs only"
    assert refused_by_sglang(QWEN, {"o_proj"}, on_cpu=True) == ""
    assert refused_by_sglang(DENSE, experts, on_cpu=True) == ""


def test_adapters_beside_those_of_experts_that_peft_leaves_out_are_known() -> None:
    experts = {"gate_proj", "up_proj", "down_proj"}
    assert partly_loaded_by_peft(DEEPSEEK, experts)
    assert partly_loaded_by_peft(QWEN | {"mlp_only_layers": [1]}, experts)
    assert not partly_loaded_by_peft(QWEN, experts)
    assert not partly_loaded_by_peft(DEEPSEEK, {"o_proj"})
    assert not partly_loaded_by_peft(DENSE, experts)


def test_targets_that_the_model_lacks_are_refused_before_the_start() -> None:
    words = ("model=deepseek_v3_mini", "actor.lora.rank=8")
    assert load(*words).actor.lora.targets == ["all-linear"]
    assert refusal(*words, "actor.lora.targets=[q_proj,o_proj]").startswith(
        "actor.lora.targets=['q_proj', 'o_proj']: this model has no q_proj; expected all-linear, or some of q_a_proj,"
    )


def test_a_push_of_adapters_that_cannot_be_served_says_that_merged_weights_can() -> None:
    words = ("model=deepseek_v3_mini", "trainer.device=cpu", *ADAPTER)
    assert refusal(*words) == (
        "actor.lora.push=adapter: SGLang has adapters of experts on GPUs only; expected push=merged"
    )
    load(*words, "actor.lora.push=merged")
    load(*words, "actor.lora.targets=[o_proj]")
