"""Tiny HF folders for the tests: every weight random, none at its initial 0 or 1."""

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import package_info
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from megarl.arch.hf_config import read_hf_config
from megarl.arch.model_types import OF_0_19
from megarl.arch.mtp import COUNTS, with_mtp
from megarl.weights.mapping.families import table_for
from megarl.weights.mapping.mtp import shared_copies

SIZES: dict[str, Any] = {
    "vocab_size": 45,  # padded to 48: rank 1 of two holds 21 rows and 3 of padding
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
}

_SPARSE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
_GLM: dict[str, Any] = {
    "head_dim": 16,
    "attention_bias": True,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "rope_theta": 100.0,
}
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,  # of the four layers the first and the third are linear
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}
_DELTA_SPARSE: dict[str, Any] = {
    **_DELTA,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
_INDEXED: dict[str, Any] = {
    **{key: value for key, value in _DEEPSEEK.items() if key != "num_nextn_predict_layers"},
    "q_lora_rank": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 16,  # so many that hardly a key has a score of 0, by which it would tie with others
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]
    + ["linear_attention", "full_attention", "linear_attention", "moe"],
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "layer_norm_epsilon": 1e-3,  # not that of Megatron's mixer
    "conv_kernel": 3,
}
# Sizes at which what sets a family apart shows: windows shorter than sequences, contexts shorter than slow rope pairs.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "llama2": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": (MistralConfig, {"sliding_window": 4}),
    "mistral_nemo": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen3_moe": (Qwen3MoeConfig, {**_SPARSE, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3_moe_plain": (Qwen3MoeConfig, {**_SPARSE, "num_experts": 4, "norm_topk_prob": False}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **_DEEPSEEK,
            "q_lora_rank": 12,
            "n_routed_experts": 16,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 8.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "kimi_k2": (
        DeepseekV3Config,
        {
            **_DEEPSEEK,
            "q_lora_rank": 12,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50.0,
                "factor": 8.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 1.0,  # as beta_slow: between slowed and kept pairs there is next to no ramp
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "glm4_moe": (  # as GLM-4.5
        Glm4MoeConfig,
        {**_GLM, "n_shared_experts": 2, "n_routed_experts": 8, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe_air": (  # as GLM-4.5-Air: without norms of q and k
        Glm4MoeConfig,
        {**_GLM, "n_shared_experts": 1, "n_routed_experts": 4, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-2},
    ),
    "minimax_m2": (
        MiniMaxM2Config,
        {
            "head_dim": 16,
            "intermediate_size": 24,  # of an expert
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rotary_dim": 8,
            "rope_theta": 100.0,
            "use_qk_norm": True,  # this and the next three are read by SGLang, not by transformers
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
        },
    ),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 16,
            "intermediate_size": 24,  # of an expert
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "swiglu_limit": 0.5,  # such that many numbers are beyond it
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 8.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "deepseek_v3_plain": (
        DeepseekV3Config,
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "rms_norm_eps": 1e-2,
        },
    ),
    "deepseek_v32": (
        DeepseekV32Config,
        {
            **_INDEXED,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 8.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "glm_moe_dsa": (
        GlmMoeDsaConfig,
        {
            **_INDEXED,
            "indexer_types": ["full", "full", "shared", "full"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "qwen3_next": (Qwen3NextConfig, _DELTA_SPARSE),
    "qwen3_5_text": (Qwen3_5TextConfig, _DELTA),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, _DELTA_SPARSE),
    "nemotron_h": (NemotronHConfig, _NEMOTRON),
    "nemotron_h_latent": (
        NemotronHConfig,
        _NEMOTRON | {"moe_latent_size": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "nemotron_h_dense": (
        NemotronHConfig,
        _NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "n_groups": 2},
    ),
}
ZERO_CENTRED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # their norms multiply by 1 + weight
# Those that the installed Megatron-Core lacks.
LACKING = OF_0_19 if package_info.__version__.startswith("0.16.1") else ()
for variant in [name for name in FAMILIES if name.startswith(LACKING)]:
    del FAMILIES[variant]


def tiny_model(family: str, *, tied: bool, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    kind, own = FAMILIES[family]
    config = kind(**(SIZES | own | sizes | {"tie_word_embeddings": tied}))
    torch.manual_seed(seed)
    return filled(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def filled(model: PreTrainedModel) -> PreTrainedModel:
    """The model with random weights everywhere, ready to be evaluated."""
    with torch.no_grad():
        is_centred = model.config.model_type in ZERO_CENTRED
        for name, param in model.named_parameters():
            is_about_one = "linear_attn.norm" in name if is_centred else "norm" in name
            param.copy_(torch.randn_like(param) * 0.2 + (1.0 if is_about_one else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model.eval()


def write_model(folder: Path, family: str, *, tied: bool, max_shard_size: str = "1GB", **sizes: Any) -> Path:
    """A folder as `transformers` writes it, with a stand-in for the tokenizer's files."""
    tiny_model(family, tied=tied, **sizes).save_pretrained(folder, max_shard_size=max_shard_size)
    if family == "kimi_k2":  # transformers has its model under another family's name
        (folder / "config.json").write_text(json.dumps(read_config(folder) | {"model_type": family}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def write_with_mtp(folder: Path, family: str, number: int = 1, *, tied: bool = False, **sizes: Any) -> Path:
    return add_mtp(write_model(folder, family, tied=tied, **sizes), number)


def add_mtp(folder: Path, number: int = 1) -> Path:
    """Random MTP layers in a folder of one file, under the names of their table, and their number in config.json."""
    config = read_config(folder)
    if key := COUNTS[config["model_type"]]:
        (folder / "config.json").write_text(json.dumps(config | {key: number}))
    hf = with_mtp(read_hf_config(folder), "joint")
    ops = [op for op in table_for(hf) if op.param.startswith("mtp.")]
    generator, held = torch.Generator().manual_seed(2), load_file(folder / "model.safetensors")
    for name, shape in (size for op in ops for size in op.hf_shapes.items()):
        is_about_one = "norm" in name and hf["model_type"] not in ZERO_CENTRED
        held[name] = torch.randn(shape, generator=generator) * 0.2 + (1.0 if is_about_one else 0.0)
    held |= {copy: held[own].clone() for copy, own in shared_copies(hf).items() if own in held}
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write_packed(folder: Path, plain: Path) -> Path:
    """A folder of gpt-oss as on the hub: the other weights of `plain`, and random experts in MXFP4."""
    generator = torch.Generator().manual_seed(1)
    held = load_file(plain / "model.safetensors")
    for name in [name for name in held if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = held.pop(name).shape
        blocks = (experts, rows, columns // 32)
        held[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), generator=generator, dtype=torch.uint8)
        held[f"{name}_scales"] = torch.randint(122, 126, blocks, generator=generator, dtype=torch.uint8)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = read_config(plain) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
