"""What Megatron is told about a model of each family, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megarl.layout import Layout
from megarl.mcore.models.families import family_of, sparse_layers
from megarl.mcore.models.layers import block_spec, check_trainable, layers_with_experts
from megarl.mcore.models.model import transformer_config
from megarl.mcore.training import execution

pytestmark = pytest.mark.usefixtures("one_rank")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 45,
}
LLAMA = SIZES | {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
MISTRAL = SIZES | {"model_type": "mistral", "sliding_window": 4096, "head_dim": 16}
MIXTRAL = SIZES | {"model_type": "mixtral", "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = SIZES | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GLM = SIZES | {
    "model_type": "glm4_moe",
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
MINIMAX = SIZES | {
    "model_type": "minimax_m2",
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 8,
    "attn_type_list": [1, 1, 1, 1],
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "sliding_window": None,
}


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    return family_of(hf).settings(hf)


def test_llama_has_neither_biases_nor_norms_on_q_and_k() -> None:
    found = settings(LLAMA)
    assert (found["add_qkv_bias"], found["qk_layernorm"], found["kv_channels"]) == (False, False, 8)
    assert found["num_query_groups"] == 2
    assert "window_size" not in found
    assert settings({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})["num_query_groups"] == 4


def test_mistral_sees_a_window_that_counts_the_token_itself() -> None:
    assert settings(MISTRAL)["window_size"] == (4095, 0)
    assert "window_size" not in settings(MISTRAL | {"sliding_window": None})
    assert settings(MISTRAL)["kv_channels"] == 16, "not hidden_size / num_attention_heads"


def test_mixtral_renormalises_its_choice_and_has_experts_everywhere() -> None:
    found = settings(MIXTRAL)
    assert (found["num_moe_experts"], found["moe_router_topk"], found["moe_ffn_hidden_size"]) == (4, 2, 48)
    assert (found["moe_router_pre_softmax"], found["moe_layer_freq"]) == (False, 1)
    assert found["moe_router_load_balancing_type"] == "none", "no loss beside the user's"


def test_qwen3_moe_by_its_keys() -> None:
    found = settings(QWEN3_MOE)
    assert (found["num_moe_experts"], found["moe_ffn_hidden_size"], found["ffn_hidden_size"]) == (8, 24, 48)
    assert (found["moe_router_pre_softmax"], found["qk_layernorm"]) == (False, True)
    assert settings(QWEN3_MOE | {"norm_topk_prob": False})["moe_router_pre_softmax"]
    as_transformers_5_writes_it = {("num_local_experts" if k == "num_experts" else k): v for k, v in QWEN3_MOE.items()}
    assert settings(as_transformers_5_writes_it) == found


def test_glm_has_grouped_queries_and_the_experts_of_deepseek() -> None:
    found = settings(GLM)
    assert (found["add_qkv_bias"], found["qk_layernorm"], found["num_query_groups"]) == (True, True, 2)
    assert (found["num_moe_experts"], found["moe_router_topk"], found["moe_ffn_hidden_size"]) == (8, 3, 24)
    assert (found["moe_shared_expert_intermediate_size"], found["moe_layer_freq"]) == (48, [0, 1, 1, 1])
    assert (found["moe_router_score_function"], found["moe_router_topk_scaling_factor"]) == ("sigmoid", 2.5)
    air = settings(GLM | {"use_qk_norm": False, "attention_bias": None})
    assert (air["add_qkv_bias"], air["qk_layernorm"]) == (False, False)


def test_minimax_has_experts_everywhere_and_norms_that_megatron_does_not_know() -> None:
    found = settings(MINIMAX)
    assert (found["num_moe_experts"], found["moe_router_topk"], found["moe_ffn_hidden_size"]) == (8, 3, 48)
    assert (found["moe_router_score_function"], found["moe_router_topk_scaling_factor"]) == ("sigmoid", 1.0)
    assert not found["qk_layernorm"]
    assert "moe_layer_freq" not in found and "moe_shared_expert_intermediate_size" not in found
    config = transformer_config(MINIMAX, Layout(), torch.float32)
    attention = family_of(MINIMAX).layer(config, True).submodules.self_attention.submodules
    assert [norm.params["num_heads"] for norm in (attention.q_layernorm, attention.k_layernorm)] == [4, 2]


def test_only_experts_are_dispatched_by_deepep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "has_deep_ep", lambda: True)
    for hf, layout, chosen in ((QWEN3_MOE, Layout(ep=2), "flex"), (QWEN3_MOE, Layout(), "alltoall"),
                               (LLAMA, Layout(tp=2), "alltoall")):  # fmt: skip
        assert transformer_config(hf, layout, torch.bfloat16).moe_token_dispatcher_type == chosen


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, [1, 1, 1, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1]),
    ],
)
def test_layers_without_experts_are_built_dense(change: dict[str, Any], sparse: list[int]) -> None:
    hf = QWEN3_MOE | change
    assert sparse_layers(hf) == sparse
    config = transformer_config(hf, Layout(), torch.float32)
    assert layers_with_experts(config) == [bool(s) for s in sparse]
    specs = block_spec(config).layer_specs
    assert [spec.submodules.mlp.module is MoELayer for spec in specs] == [bool(s) for s in sparse]


@pytest.mark.parametrize(
    ("hf", "change", "sentence"),
    [
        (LLAMA, {"attention_bias": True}, "attention_bias=true is not supported; expected false"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias=true is not supported; expected false"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; expected silu"),
        (LLAMA, {"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        (LLAMA, {"num_hidden_layers": None}, "there is no num_hidden_layers; expected the config of a llama model"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window=true is not supported; expected false"),
        (QWEN3_MOE, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types holds sliding_attention"),
        (QWEN3_MOE, {"num_experts": None}, "there is no num_experts or num_local_experts"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 leaves a renormalised router no gradient"),
        (MINIMAX, {"use_qk_norm": False}, "use_qk_norm=false is not supported; expected true"),
        (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type=per_head is not supported; expected per_layer"),
        (MINIMAX, {"attn_type_list": [1, 0]}, "attn_type_list holds 0; expected 1 only, which is full attention"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size=64 is not supported; expected 0"),
        (MINIMAX, {"scoring_func": "softmax"}, "scoring_func=softmax is not supported; expected sigmoid"),
        (GLM, {"norm_topk_prob": False}, "norm_topk_prob=false is not supported; expected true"),
        (GLM, {"n_shared_experts": 0}, "n_shared_experts=0 is not supported; expected at least 1"),
        (GLM, {"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8'; expected unquantized weights"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3]}, "leave no layer experts; expected qwen3"),
    ],
)
def test_other_mathematics_is_refused_in_one_sentence(
    hf: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as caught:
        settings(hf | change)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layouts_of_experts_that_do_not_train_are_refused() -> None:
    half = QWEN3_MOE | {"mlp_only_layers": [0, 1]}
    check_trainable(transformer_config(half, Layout(pp=2), torch.float32))
    check_trainable(transformer_config(QWEN3_MOE, Layout(pp=2, ep=2), torch.float32))
    check_trainable(transformer_config(LLAMA, Layout(tp=2), torch.float32))
    with pytest.raises(
        ValueError, match=r"^pipeline_model_parallel_size=2: stage 0 would hold no experts, which expert"
    ):
        check_trainable(transformer_config(half, Layout(pp=2, ep=2), torch.float32))
    with pytest.raises(
        ValueError, match=r"^sequence_parallel=false: expected true to train experts with tensor_model_paral"
    ):
        check_trainable(transformer_config(QWEN3_MOE, Layout(tp=2), torch.float32))
    for layout in (Layout(tp=2, sequence_parallel=True, etp=1), Layout(etp=2)):
        with pytest.raises(ValueError, match=f"^expert_tensor_parallel_size={layout.etp}: .*; expected {layout.tp}, "):
            check_trainable(transformer_config(QWEN3_MOE, layout, torch.float32))
    check_trainable(transformer_config(QWEN3_MOE, Layout(ep=2, etp=2), torch.float32))


def test_expert_parallelism_takes_its_ranks_from_data_parallelism() -> None:
    assert Layout(ep=4).data_parallel_size(8) == 8
    assert Layout(tp=2, ep=4, etp=1).data_parallel_size(8) == 4
    assert Layout(tp=2).expert_tp == 2
    assert Layout(tp=2, etp=1).expert_tp == 1
    with pytest.raises(ValueError, match=r"^ep\*etp\*pp = 4\*2\*2 = 16 does not divide 8 ranks$"):
        Layout(tp=2, pp=2, ep=4).data_parallel_size(8)
    with pytest.raises(ValueError, match=r"^ep\*etp\*pp = 1\*4\*1 = 4 does not divide 2 ranks$"):
        Layout(etp=4).data_parallel_size(2)
