"""Rotary position embeddings of packed rows: angles of tokens in their sequences, and the rotation.

The frequencies are those of `arch/settings/rope.py`, which are passed to Megatron's rotary embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
