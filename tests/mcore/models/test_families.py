"""What Megatron is told about a model of each family, and what is refused."""

import math
from typing import Any

import pytest
import torch
from hf_configs import hf_of
from layer_specs import module_of
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.moe.moe_layer import MoELayer
from tiny_models import FAMILIES as TINY
from tiny_models import LACKING

from megarl.arch.hf_config import SUPPORTED, completed
from megarl.arch.layout import Layout
from megarl.arch.settings.families import settings_of
from megarl.mcore.models import execution
from megarl.mcore.models.families import FAMILIES, AttentionWithNormsOfAllHeads, family_of
from megarl.mcore.models.layers import block_spec, check_trainable, layers_with_experts
from megarl.mcore.models.model import check_layout, transformer_config

ABSENT = "absent"
QWEN3_MOE = hf_of("qwen3_moe", mlp_only_layers=[])
YARN = hf_of("deepseek_v3")["rope_parameters"]


def test_every_family_has_a_tiny_model_for_the_comparisons_with_transformers() -> None:
    """tests/dist compares log-probs and weights of each; a family without one is compared nowhere."""
    tiny = {hf_of(name)["model_type"] for name in TINY}
    assert sorted(set(FAMILIES) - tiny) == sorted(LACKING), "parity case missing in tests/helpers/tiny_models.py"
    assert sorted(tiny - set(FAMILIES)) == []
    assert sorted(FAMILIES) == sorted(SUPPORTED)


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    return family_of(hf).settings(completed(hf))


def changed(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    """`...` takes a key out."""
    return {key: value for key, value in (hf_of(family) | changes).items() if value is not ...}


PLAIN = {"add_qkv_bias": False, "qk_layernorm": False, "window_size": ABSENT, "softmax_scale": None}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 24}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_load_balancing_type": "none"}
FULL = ["full_attention"] * 4
OF_MIXER = {"mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_num_groups": 4, "mamba_state_dim": 8}
NEMOTRON: list[Any] = [
    ("nemotron_h", {}, EXPERTS | SIGMOID | OF_MIXER | {"linear_conv_kernel_dim": 3, "activation_func": squared_relu}),
    ("nemotron_h", {}, {"gated_linear_unit": False, "layernorm_epsilon": 1e-3, "moe_latent_size": ABSENT}),
    ("nemotron_h", {}, {"moe_layer_freq": [0, 1, 0, 0, 0, 0, 0, 1], "moe_shared_expert_intermediate_size": 40}),
    ("nemotron_h_latent", {}, {"moe_latent_size": 16, "moe_router_num_groups": 4, "moe_router_group_topk": 2}),
    (  # as folders of the hub have it
        "nemotron_h",
        {"layers_block_type": ..., "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4},
        {
            "num_layers": 4,
            "layer_kinds": ["linear_attention", "mlp", "full_attention", "mlp"],
            "num_moe_experts": ABSENT,
        },
    ),
]
NOT_NEMOTRON: list[Any] = [
    ("nemotron_h", "mlp_hidden_act", "silu", "expected relu2"),
    ("nemotron_h", "use_bias", True, "expected false"),
    ("nemotron_h", "use_conv_bias", False, "expected true"),
    ("nemotron_h", "tie_word_embeddings", True, "expected false"),
    ("nemotron_h", "n_shared_experts", 2, "expected 1"),
    ("nemotron_h", "n_groups", 3, "n_groups=3 does not divide mamba_num_heads=8"),
    ("nemotron_h", "layers_block_type", ["full_attention", "mlp"], "holds no linear_attention; expected some layers"),
    (
        "nemotron_h",
        "layers_block_type",
        ["linear_attention", "sliding_attention"],
        "invalid types: {'sliding_attention'}",
    ),
    ("nemotron_h", "time_step_limit", [0.0, 0.1], "time_step_limit=[0.0, 0.1] is not supported; expected none"),
    ("nemotron_h", "quantization_config", {"quant_method": "fp8"}, "quant_method='fp8'; expected unquantized"),
]
if "nemotron_h" in LACKING:
    NEMOTRON = NOT_NEMOTRON = []


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama3", {}, PLAIN | {"kv_channels": 8, "num_query_groups": 2}),
        ("llama3", {"num_key_value_heads": ...}, {"num_query_groups": 4}),
        ("qwen2", {}, PLAIN | {"add_qkv_bias": True}),
        ("qwen3", {}, PLAIN | {"qk_layernorm": True, "kv_channels": 16}),  # not hidden_size / num_attention_heads
        # A window of 4 counts the token itself.
        ("mistral", {}, PLAIN | {"window_size": (3, 0)}),
        ("mistral_nemo", {}, PLAIN | {"kv_channels": 16}),
        ("mixtral", {}, {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_layer_freq": 1}),
        ("mixtral", {}, {"moe_router_pre_softmax": False, "moe_router_load_balancing_type": "none"}),
        ("qwen3_moe", {}, EXPERTS | {"moe_router_topk": 2, "ffn_hidden_size": 48, "qk_layernorm": True}),
        ("qwen3_moe", {}, {"moe_router_pre_softmax": False, "moe_layer_freq": [1, 0, 1, 1]}),
        ("qwen3_moe", {"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": ...}, EXPERTS | {"moe_router_topk": 2}),  # transformers 4
        ("glm4_moe", {}, EXPERTS | SIGMOID | {"moe_router_topk_scaling_factor": 2.5, "num_query_groups": 2}),
        ("glm4_moe", {}, {"moe_shared_expert_intermediate_size": 48, "moe_layer_freq": [0, 1, 1, 1]}),
        ("glm4_moe", {}, {"add_qkv_bias": True, "qk_layernorm": True}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": False}, {"add_qkv_bias": False, "qk_layernorm": False}),
        ("minimax_m2", {}, EXPERTS | SIGMOID | {"moe_router_topk_scaling_factor": 1.0, "qk_layernorm": False}),
        ("minimax_m2", {}, {"moe_layer_freq": 1, "moe_shared_expert_intermediate_size": ABSENT}),
        ("deepseek_v3", {}, {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}),
        ("deepseek_v3", {}, {"v_head_dim": 6, "moe_layer_freq": [0, 1, 1, 1], "moe_router_topk": 4}),
        ("deepseek_v3", {}, {"moe_shared_expert_intermediate_size": 48, "moe_router_topk_scaling_factor": 2.5}),
        ("deepseek_v3", {}, {"moe_router_num_groups": 4, "moe_router_group_topk": 2}),
        *(  # all groups or one are no limit
            ("deepseek_v3", {"n_group": n, "topk_group": n}, {"moe_router_num_groups": ABSENT}) for n in (1, 8)
        ),
        ("deepseek_v3", {}, {"rope_type": "yarn", "rotary_scaling_factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3}),
        ("deepseek_v3_plain", {}, {"rope_type": "rope", "rotary_base": 10000.0, "q_lora_rank": None}),
        (  # YaRN without mscale sharpens by its factor alone
            "deepseek_v3",
            {"rope_parameters": {key: value for key, value in YARN.items() if "mscale" not in key}},
            {"mscale": 1.0, "mscale_all_dim": 0.0},
        ),
        ("gpt_oss", {}, EXPERTS | {"moe_router_pre_softmax": False, "add_bias_linear": True}),
        ("gpt_oss", {}, {"window_size": (3, 0), "window_attn_skip_freq": [1, 0, 1, 0], "softmax_type": "learnable"}),
        ("gpt_oss", {"layer_types": ...}, {"window_attn_skip_freq": [1, 0, 1, 0]}),
        ("gpt_oss", {"layer_types": FULL}, {"window_attn_skip_freq": ABSENT, "window_size": ABSENT}),
        ("gpt_oss", {"rope_parameters": ...}, {"softmax_scale": pytest.approx((0.1 * math.log(32) + 1) ** 2 / 4)}),
        ("qwen2", {"attention_bias": False}, {"add_qkv_bias": True}),  # its code does not read it
        ("qwen2", {"use_sliding_window": True, "layer_types": ..., "max_window_layers": 4}, {"window_size": ABSENT}),
        ("mistral", {"layer_types": FULL}, {"window_size": ABSENT}),
        ("mistral", {"layer_types": ["sliding_attention"] * 4}, {"window_size": (3, 0)}),
        ("deepseek_v3", {"routed_scaling_factor": ...}, {"moe_router_topk_scaling_factor": 2.5}),
        ("mixtral", {"rms_norm_eps": ...}, {"layernorm_epsilon": 1e-5}),
        ("gpt_oss", {}, {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5}),
        ("gpt_oss", {}, {"softmax_scale": pytest.approx((0.1 * math.log(8) + 1) ** 2 / 4)}),  # YaRN's factor is 8
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, EXPERTS),
        *NEMOTRON,
    ],
)
def test_megatrons_settings(family: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = settings(changed(family, changes))
    assert {key: found.get(key, None if expected[key] is None else ABSENT) for key in expected} == expected


def test_norms_of_all_heads_that_megatron_does_not_know() -> None:
    hf = hf_of("minimax_m2")
    attention = family_of(hf).layer(transformer_config(hf, Layout(), torch.float32), True).submodules.self_attention
    assert attention.module is AttentionWithNormsOfAllHeads


def test_only_experts_are_dispatched_by_deepep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "has_deep_ep", lambda: True)
    for hf, layout, chosen in (
        (QWEN3_MOE, Layout(ep=2), "flex"),
        (QWEN3_MOE, Layout(), "alltoall"),
        (hf_of("llama3"), Layout(tp=2), "alltoall"),
    ):
        assert transformer_config(hf, layout, torch.bfloat16).moe_token_dispatcher_type == chosen


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, [1, 1, 1, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1]),
    ],
)
def test_layers_without_experts_are_built_dense(change: dict[str, Any], sparse: list[int]) -> None:
    hf = QWEN3_MOE | change
    config = transformer_config(hf, Layout(), torch.float32)
    assert layers_with_experts(config) == sparse
    assert [module_of(spec.submodules.mlp) is MoELayer for spec in block_spec(config).layer_specs] == sparse


FP8 = {"quant_method": "fp8"}
UNQUANTIZED = "quant_method='fp8'; expected unquantized weights"


@pytest.mark.parametrize(
    ("family", "key", "value", "expected"),
    [
        ("llama3", "attention_bias", True, "expected false"),
        ("llama3", "mlp_bias", True, "expected false"),
        ("llama3", "hidden_act", "gelu", "expected silu"),
        ("llama3", "rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic' is not supported"),
        ("llama3", "num_hidden_layers", None, "transformers refuses it for model_type='llama' (Val"),
        ("llama3", "per_layer_config", {"0": {"head_dim": 4}}, "is not supported; expected null"),
        ("qwen2", "layer_types", [*FULL[:3], "sliding_attention"], "layer_types holds sliding_attention"),
        ("mistral", "layer_types", [*FULL[:3], "sliding_attention"], "holds full_attention and sliding_attention"),
        ("mistral", "sliding_window", 0, "expected at least 1"),
        ("qwen3_moe", "num_local_experts", None, "there is no num_experts or num_local_experts"),
        ("qwen3_moe", "num_experts_per_tok", 1, "num_experts_per_tok=1 leaves a renormalised router no gradient"),
        ("qwen3_moe", "num_experts_per_tok", 100, "=100; expected at most the"),
        ("minimax_m2", "num_experts_per_tok", 100, "experts of a layer"),
        (
            "qwen3",
            "rope_parameters",
            {"full_attention": {"rope_type": "default"}},
            "has full_attention; expected one rope for all layers",
        ),
        ("qwen3", "transformers_weights", "other.safetensors", "; expected weights in model.safetensors"),
        ("qwen3", "dtype", [], "=[]; expected a name, as bfloat16"),
        ("qwen3_moe", "mlp_only_layers", [0, 1, 2, 3], "none of 4 layers has experts"),
        ("minimax_m2", "use_qk_norm", False, "expected true"),
        ("minimax_m2", "qk_norm_type", "per_head", "expected per_layer"),
        ("minimax_m2", "attn_type_list", [1, 0], "attn_type_list holds 0; expected 1 only, which is full attention"),
        ("minimax_m2", "shared_intermediate_size", 64, "expected 0"),
        ("minimax_m2", "scoring_func", "softmax", "expected sigmoid"),
        ("glm4_moe", "norm_topk_prob", False, "expected true"),
        ("glm4_moe", "n_shared_experts", 0, "expected at least 1"),
        ("glm4_moe", "quantization_config", FP8, UNQUANTIZED),
        ("deepseek_v3", "scoring_func", "softmax", "expected sigmoid"),
        ("deepseek_v3", "topk_method", "greedy", "expected noaux_tc"),
        ("deepseek_v3", "norm_topk_prob", False, "expected true"),
        ("deepseek_v3", "attention_bias", True, "expected false"),
        ("deepseek_v3", "rope_interleave", False, "expected true"),
        ("deepseek_v3", "num_key_value_heads", 2, "expected 4"),
        ("deepseek_v3", "head_dim", 128, "expected 4"),
        ("deepseek_v3", "n_shared_experts", 0, "expected at least 1"),
        ("kimi_k2", "num_experts_per_tok", 1, "num_experts_per_tok=1"),
        ("deepseek_v3", "first_k_dense_replace", 4, "none of 4 layers has experts"),
        ("deepseek_v3", "topk_group", 3, "num_experts_per_tok=4 with topk_group=3 is not supported"),
        ("deepseek_v3", "topk_group", 1, "with topk_group=1 is not supported; expected twice topk_group"),
        ("deepseek_v3", "rope_parameters", {"rope_type": "linear", "factor": 2.0}, "rope type 'linear'"),
        ("deepseek_v3", "rope_parameters", YARN | {"mscale_all_dim": 0}, "both of mscale and mscale_all_dim or neit"),
        ("deepseek_v3", "rope_parameters", YARN | {"attention_factor": 1.0}, "no attention_factor"),
        ("deepseek_v3", "quantization_config", FP8, UNQUANTIZED),
        ("gpt_oss", "attention_bias", False, "expected true"),
        ("gpt_oss", "swiglu_alpha", 1.0, "expected 1.702"),
        ("gpt_oss", "quantization_config", FP8, "quant_method='fp8'; expected mxfp4 or none"),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 4, "holds chunked_attention; expected sliding_attention"),
        ("gpt_oss", "layer_types", ["full_attention"], "transformers refuses it for model_type='gpt_oss'"),
        ("gpt_oss", "sliding_window", None, "there is no sliding_window; expected the config of a gpt_oss model"),
        *NOT_NEMOTRON,
    ],
)
def test_other_mathematics_is_refused_in_one_sentence(family: str, key: str, value: Any, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings_of(completed(hf_of(family) | {key: value}))
    sentence = str(caught.value)
    if expected.startswith("expected"):
        assert f"{key}={str(value).lower() if isinstance(value, bool) else value} is not supported" in sentence
    assert expected in sentence and "\n" not in sentence


def test_windows_of_qwen3_moe_which_all_its_layers_would_have_are_refused() -> None:
    with pytest.raises(ValueError, match="use_sliding_window=true is not supported with sliding_window=5; expected"):
        settings(hf_of("qwen3_moe") | {"use_sliding_window": True, "sliding_window": 5})


def test_latents_of_queries_are_divided_too() -> None:
    """Other layouts are in tests/arch/test_layout.py."""
    with pytest.raises(ValueError, match=r"^tensor_model_parallel_size=4 .* the model's q_lora_rank=10"):
        check_layout(hf_of("deepseek_v3") | {"q_lora_rank": 10}, Layout(tp=4))
    for family in ("deepseek_v3", "gpt_oss"):
        check_layout(hf_of(family), Layout(tp=2, ep=4, etp=1))


def test_layouts_of_experts_that_do_not_train_are_refused() -> None:
    def check(hf: dict[str, Any], **layout: Any) -> None:
        check_trainable(transformer_config(hf, Layout(**layout), torch.float32))

    half = QWEN3_MOE | {"mlp_only_layers": [0, 1]}
    check(half, pp=2)
    check(QWEN3_MOE, pp=2, ep=2)
    check(QWEN3_MOE, ep=2, etp=2)
    check(hf_of("llama3"), tp=2)
    with pytest.raises(
        ValueError, match=r"^pipeline_model_parallel_size=2: stage 0 would hold no experts, which expert"
    ):
        check(half, pp=2, ep=2)
    with pytest.raises(ValueError, match=r"^sequence_parallel=false: expected true to train experts with tensor_model"):
        check(QWEN3_MOE, tp=2)
    for layout in ({"tp": 2, "sequence_parallel": True, "etp": 1}, {"etp": 2}):
        words = f"^expert_tensor_parallel_size={layout['etp']}: .*; expected {layout.get('tp', 1)}, "
        with pytest.raises(ValueError, match=words):
            check(QWEN3_MOE, **layout)
