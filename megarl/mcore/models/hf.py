"""Reads a Hugging Face config.json: helpers that every family uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

HFConfig = Mapping[str, Any]
Settings = dict[str, Any]  # fields of Megatron's TransformerConfig


def head_dim(hf: HFConfig) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def need(hf: HFConfig, *names: str) -> Any:
    """The value of a setting that has several names: the first name that is there."""
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise ValueError(
        f"config.json: there is no {' or '.join(names)}; expected the config of a {hf.get('model_type')} model"
    )


def refuse(hf: HFConfig, **wanted: Any) -> None:
    """Raise ValueError if a key is in config.json and its value is not the wanted one."""
    for key, value in wanted.items():
        if hf.get(key, value) not in (value, None):
            raise ValueError(f"config.json: {key}={_plain(hf[key])} is not supported; expected {_plain(value)}")


def refuse_quantized(hf: HFConfig) -> None:
    """Raise ValueError for a folder whose weights are quantized, as those of the largest models on the hub are."""
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise ValueError(f"config.json: quantization_config says quant_method={method!r}; expected unquantized weights")


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def base(hf: HFConfig) -> Settings:
    """Settings that all decoders with RMS norms and gated feed-forwards share."""
    refuse(hf, hidden_act="silu")
    return {
        "num_layers": need(hf, "num_hidden_layers"),
        "hidden_size": need(hf, "hidden_size"),
        "ffn_hidden_size": need(hf, "intermediate_size"),
        "num_attention_heads": need(hf, "num_attention_heads"),
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "init_method_std": hf.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }
