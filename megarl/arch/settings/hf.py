"""Reads a Hugging Face config.json: helpers that every family uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

HFConfig = Mapping[str, Any]
Settings = dict[str, Any]  # fields of Megatron's TransformerConfig


def head_dim(hf: HFConfig) -> int:
    """Dimensions of a head; ValueError for an odd number, as pairs of them are rotated."""
    size: int = hf["hidden_size"] // at_least(1, hf, "num_attention_heads")
    if hf.get("head_dim") is not None:
        size = at_least(1, hf, "head_dim")
    if size % 2:
        raise ValueError(f"config.json: heads have {size} dimensions; expected an even number")
    return size


def need(hf: HFConfig, *names: str) -> Any:
    """The value of a setting that has several names: the first name that is there."""
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise ValueError(
        f"config.json: there is no {' or '.join(names)}; expected the config of a {hf.get('model_type')} model"
    )


def refuse(hf: HFConfig, **wanted: Any) -> None:
    """Raise ValueError if a key is in config.json and its value is not the wanted one; null is false, but not true."""
    for key, value in wanted.items():
        if hf.get(key, value) not in ((True,) if value is True else (value, None)):
            raise ValueError(f"config.json: {key}={_plain(hf[key])} is not supported; expected {_plain(value)}")


def at_least(least: int, hf: HFConfig, key: str) -> int:
    value: int = need(hf, key)
    if value < least:
        raise ValueError(f"config.json: {key}={value} is not supported; expected at least {least}")
    return value


def in_groups(hf: HFConfig, heads: str, groups: str) -> tuple[int, int]:
    """The numbers of heads and of their groups, by their keys; ValueError for groups of unequal size."""
    count, of = at_least(1, hf, heads), at_least(1, hf, groups)
    if count % of:
        raise ValueError(f"config.json: {groups}={of} does not divide {heads}={count}")
    return count, of


def window(hf: HFConfig) -> tuple[int, int]:
    """Megatron's window of `sliding_window` tokens: a token attends to itself and to those before it."""
    return at_least(1, hf, "sliding_window") - 1, 0


def full_layers(hf: HFConfig) -> None:
    """Raise ValueError if some layers have other attention than full."""
    if other := sorted(set(hf.get("layer_types") or ()) - {"full_attention"}):
        raise ValueError(f"config.json: layer_types holds {', '.join(other)}; expected full_attention only")


def refuse_quantized(hf: HFConfig) -> None:
    """Raise ValueError for a folder whose weights are quantized, as those of the largest models on the hub are."""
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise ValueError(f"config.json: quantization_config says quant_method={method!r}; expected unquantized weights")


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def base(hf: HFConfig) -> Settings:
    """Settings that all decoders with RMS norms and gated feed-forwards share."""
    refuse(hf, hidden_act="silu", per_layer_config=None)
    at_least(1, hf, "vocab_size")
    return {
        "num_layers": at_least(1, hf, "num_hidden_layers"),
        "hidden_size": at_least(1, hf, "hidden_size"),
        "ffn_hidden_size": at_least(1, hf, "intermediate_size"),
        "num_attention_heads": at_least(1, hf, "num_attention_heads"),
        "layernorm_epsilon": need(hf, "rms_norm_eps"),
        "init_method_std": need(hf, "initializer_range"),
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }
