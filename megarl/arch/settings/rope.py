"""Rotary position embeddings as config.json describes them: a frequency for every pair of a head's dimensions.

Megatron's own scaled rope supports only one setting of Llama 3's four numbers, so frequencies of every kind are
computed here and passed to its rotary embedding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.arch.settings.hf import need


@dataclass(frozen=True)
class Rope:
    """Pair i of a head rotates by `frequencies[i]` radians per position; then q and k are multiplied by `factor`.

    With fewer frequencies than pairs, only the first dimensions of a head are rotated.
    """

    frequencies: Tensor  # [rotated dimensions / 2] float32
    factor: float = 1.0


# Families that can rotate a part of each head only.
PARTIAL = ("glm4_moe", "minimax_m2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def make_rope(hf: Mapping[str, Any], head_dim: int) -> Rope:
    """ValueError for a kind of rope that is not in KINDS, or a missing setting."""
    settings = rope_settings(hf)
    kind = settings["rope_type"]
    if kind not in KINDS:
        raise ValueError(f"config.json: rope type {kind!r} is not supported; expected one of {', '.join(KINDS)}")
    part = settings.get("partial_rotary_factor", 1.0)
    if part != 1.0 and hf.get("model_type") not in PARTIAL:
        raise ValueError(f"config.json: partial_rotary_factor={part} is not supported; expected 1.0")
    if not isinstance(part, int | float) or not 0 < part <= 1 or int(head_dim * part) % 2:
        raise ValueError(f"config.json: partial_rotary_factor={part} is not supported; expected an even part of a head")
    if kind == "yarn" and "head_dim" in hf and hf["head_dim"] is None:  # transformers does not compute it
        raise ValueError("config.json: head_dim=null is not supported with rope type 'yarn'; expected a number")
    theta, size = float(need(settings, "rope_theta")), int(head_dim * part)
    plain = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    try:
        rope = KINDS[kind](plain, theta, settings)
    except (KeyError, TypeError) as error:
        raise ValueError(f"config.json: rope type {kind!r} lacks a number among {json.dumps(settings)}") from error
    if part != 1.0 and rope.factor != 1.0:  # it would scale the rotated part alone, and is applied to whole heads here
        raise ValueError(f"config.json: rope type {kind!r} is not supported with partial_rotary_factor={part}")
    return rope


def rope_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Its settings; YaRN's factor is by default the ratio of the two contexts."""
    settings = dict(need(hf, "rope_parameters"))
    if "rope_type" not in settings:
        raise ValueError(f"config.json: rope_parameters has {', '.join(settings)}; expected one rope for all layers")
    if settings["rope_type"] == "yarn" and settings.get("factor") is None:
        settings["factor"] = hf["max_position_embeddings"] / settings["original_max_position_embeddings"]
    return settings


def _default(plain: Tensor, theta: float, settings: Mapping[str, Any]) -> Rope:  # noqa: ARG001
    return Rope(plain)


def _linear(plain: Tensor, theta: float, settings: Mapping[str, Any]) -> Rope:  # noqa: ARG001
    return Rope(plain / settings["factor"])


def _llama3(plain: Tensor, theta: float, settings: Mapping[str, Any]) -> Rope:  # noqa: ARG001
    """Pairs with fewer than low_freq_factor turns over the original context are slowed by `factor`; pairs with more
    than high_freq_factor turns stay; in between is a linear ramp (Llama 3, arXiv:2407.21783)."""
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    if not 0 < low < high:
        raise ValueError(f"config.json: low_freq_factor={low} and high_freq_factor={high}; expected 0 < low < high")
    turns = settings["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Rope(kept * plain + (1 - kept) * plain / settings["factor"])


def _yarn(plain: Tensor, theta: float, settings: Mapping[str, Any]) -> Rope:
    """Peng et al., "YaRN", arXiv:2309.00071: the ramp runs over pairs, from beta_fast to beta_slow turns."""
    pairs, factor = len(plain), settings["factor"]
    original = settings["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    first = pair_that_turns(settings.get("beta_fast") or 32)
    last = pair_that_turns(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slowed = ((torch.arange(pairs) - first) / (last - first or 0.001)).clamp(0, 1)  # below 0: none is slowed
    return Rope(slowed * plain / factor + (1 - slowed) * plain, _yarn_factor(factor, settings))


def _yarn_factor(factor: float, settings: Mapping[str, Any]) -> float:
    """The attention temperature for a longer context, as its square root, by which q and k are each multiplied."""

    def sharper(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    over, under = settings.get("mscale"), settings.get("mscale_all_dim")
    return sharper(over) / sharper(under) if over and under else sharper(1.0)


KINDS: dict[str, Callable[[Tensor, float, Mapping[str, Any]], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
