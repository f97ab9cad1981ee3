"""Rotary position embeddings as config.json describes them: a frequency for every pair of a head's dimensions.

Megatron's own scaled rope supports only one setting of Llama 3's four numbers, so frequencies of every kind are
computed here and passed to its rotary embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.mcore.models.hf import head_dim as head_dim_of


@dataclass(frozen=True)
class Rope:
    """Pair i of a head rotates by `frequencies[i]` radians per position; then q and k are multiplied by `factor`.

    With fewer frequencies than pairs, only the first dimensions of a head are rotated.
    """

    frequencies: Tensor  # [rotated dimensions / 2] float32
    factor: float = 1.0


# Families that can rotate a part of each head only -> the part if config.json does not say.
PARTIAL = {"glm4_moe": 0.5, "minimax_m2": 1.0}


def make_rope(hf: Mapping[str, Any], head_dim: int) -> Rope:
    """ValueError for a kind of rope that is not in KINDS, or a missing setting."""
    settings = rope_settings(hf)
    kind = settings["rope_type"]
    if kind not in KINDS:
        raise ValueError(f"config.json: rope type {kind!r} is not supported; expected one of {', '.join(KINDS)}")
    part = settings.get("partial_rotary_factor", PARTIAL.get(hf.get("model_type", ""), 1.0))
    if part != 1.0 and hf.get("model_type") not in PARTIAL:
        raise ValueError(f"config.json: partial_rotary_factor={part} is not supported; expected 1.0")
    theta, size = float(settings["rope_theta"]), int(head_dim * part)
    plain = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size)
    try:
        rope = KINDS[kind](plain, theta, settings)
    except KeyError as missing:
        raise ValueError(f"config.json: rope type {kind!r} needs {missing}, which is not there") from missing
    if part != 1.0 and rope.factor != 1.0:  # it would scale the rotated part alone, and is applied to whole heads here
        raise ValueError(f"config.json: rope type {kind!r} is not supported with partial_rotary_factor={part}")
    return rope


def rope_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in one form: transformers 5 has them in rope_parameters, older files in rope_scaling and at the top."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    settings = {"rope_theta": hf.get("rope_theta", 10000.0), **given}
    settings["rope_type"] = given.get("rope_type", given.get("type", "default"))
    if hf.get("rotary_dim") is not None:  # MiniMax-M2's name for it
        settings.setdefault("partial_rotary_factor", hf["rotary_dim"] / head_dim_of(hf))
    elif hf.get("partial_rotary_factor") is not None:
        settings.setdefault("partial_rotary_factor", hf["partial_rotary_factor"])
    longest = hf.get("max_position_embeddings")
    original = hf.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or longest
    if original is not None:
        settings["original_max_position_embeddings"] = original
        if settings.get("factor", 1.0) is None:  # default: the ratio of the two contexts
            settings["factor"] = longest / original
    return settings


def _default(plain: Tensor, theta: float, settings: Mapping[str, Any]) -> Rope:  # noqa: ARG001
    return Rope(plain)


def _linear(plain: Tensor, theta: float, settings: Mapping[str, Any]) -> Rope:  # noqa: ARG001
    return Rope(plain / settings["factor"])


def _llama3(plain: Tensor, theta: float, settings: Mapping[str, Any]) -> Rope:  # noqa: ARG001
    """Pairs with fewer than low_freq_factor turns over the original context are slowed by `factor`; pairs with more
    than high_freq_factor turns stay; in between is a linear ramp (Llama 3, arXiv:2407.21783)."""
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
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
    slowed = ((torch.arange(pairs) - first) / (max(last - first, 0.001))).clamp(0, 1)
    return Rope(slowed * plain / factor + (1 - slowed) * plain, _yarn_factor(factor, settings))


def _yarn_factor(factor: float, settings: Mapping[str, Any]) -> float:
    """The attention temperature for a longer context, as its square root, by which q and k are each multiplied."""

    def sharper(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    over, under = settings.get("mscale"), settings.get("mscale_all_dim")
    return sharper(over) / sharper(under) if over and under else sharper(1.0)


def with_positions(ends: Tensor, positions: Tensor) -> Tensor:
    """The cumulative lengths of a row, with the positions [T/cp] of this rank's tokens in their sequences.

    Megatron hands a row's ends, and nothing else of it, to its rotary embedding.
    """
    ends.positions = positions  # type: ignore[attr-defined]
    return ends


def packed_angles(angles: Tensor, ends: Tensor, num_tokens: int, *, cp: int, rank: int) -> Tensor:
    """Angles [longest, ...] of positions -> [num_tokens, ...]: angles of a row's tokens on one context-parallel rank.

    `ends` [B + 1] are the row's cumulative lengths, if possible `with_positions`; of each sequence the rank holds
    chunks rank and 2cp-1-rank of 2cp.
    """
    if (positions := getattr(ends, "positions", None)) is not None:
        return angles[positions]
    sizes = (ends[1:] - ends[:-1]) // cp
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes, output_size=num_tokens)
    at = torch.arange(num_tokens, device=ends.device) - starts
    if cp > 1:
        chunk = torch.repeat_interleave(sizes // 2, sizes, output_size=num_tokens)
        at = torch.where(at < chunk, at + rank * chunk, at + (2 * cp - 2 - rank) * chunk)
    return angles[at]


def turned(
    t: Tensor, angles: Tensor, ends: Tensor, *, factor: float = 1.0, in_pairs: bool = False, cp: int, rank: int
) -> Tensor:
    """[T, n, d] of a packed row, each token rotated by the `angles` [longest, 1, 1, r] of its position.

    The first r dimensions of a head are rotated, the others stay.
    `in_pairs`: neighbouring dimensions form a pair (latent attention); in the output, pairs are r/2 apart as usual.
    Cosines are computed per position, not per token, because there are many more tokens.
    """
    if (size := angles.size(-1)) < t.size(-1):
        first, rest = t[..., :size], t[..., size:]
        rotated = turned(first, angles, ends, factor=factor, in_pairs=in_pairs, cp=cp, rank=rank)
        return torch.cat((rotated, rest), dim=-1)
    if in_pairs:
        t = torch.cat((t[..., 0::2], t[..., 1::2]), dim=-1)
    half = angles.size(-1) // 2  # the second half repeats the first
    waves = torch.cat((angles.cos(), angles[..., :half].sin()), dim=-1).mul_(factor).to(t.dtype)
    cos, sin = packed_angles(waves[:, 0], ends, len(t), cp=cp, rank=rank).split((2 * half, half), dim=-1)
    return _Turn.apply(t, cos, sin)


class _Turn(torch.autograd.Function):
    """Rotation that saves only cosines and sines for the backward pass, which rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(t, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = t * cos
    (first, second), (out_first, out_second) = t.chunk(2, dim=-1), out.chunk(2, dim=-1)
    out_first -= second * sin
    out_second += first * sin
    return out


KINDS: dict[str, Callable[[Tensor, float, Mapping[str, Any]], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
