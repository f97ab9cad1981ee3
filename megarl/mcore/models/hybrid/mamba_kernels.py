"""Mamba-2's convolution and scan over packed rows in plain torch, for machines without `mamba_ssm`.

No sequence of a row sees another.  16-bit numbers are computed in float32.  What Megatron's mixer takes from
`mamba_ssm` has its arguments here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.mcore.models.hybrid.delta_kernels import Chunks, causal_conv1d, widened


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    *,
    headdim: int,
    ngroups: int,
    seq_idx: Tensor | None,
    **options: Any,
) -> Tensor:
    """[1, T, z x B C dt] -> silu(z) times what the scan makes of x: [1, T, heads * headdim].

    `seq_idx` [1, T]: the number of each token's sequence; None: the row is one sequence.
    """
    assert zxbcdt.size(0) == 1 and not options["norm_before_gate"], "rows are packed; the norm is the caller's"
    total, width = zxbcdt.shape[1:]
    heads, inner = len(A), len(A) * headdim
    state = (width - 2 * inner - heads) // (2 * ngroups)
    ends = torch.tensor([0, total], device=zxbcdt.device)
    if seq_idx is not None:
        ends = F.pad(seq_idx[0].unique_consecutive(return_counts=True)[1].cumsum(0), (1, 0))
    z, xbc, dt = zxbcdt.split((inner, width - inner - heads, heads), -1)
    xbc, _ = causal_conv1d(xbc, conv1d_weight, conv1d_bias, activation="silu", cu_seqlens=ends)
    x, B, C = xbc[0].split((inner, ngroups * state, ngroups * state), -1)  # noqa: N806
    x, B, C = (part.unflatten(-1, (-1, size)) for part, size in ((x, headdim), (B, state), (C, state)))  # noqa: N806
    step = F.softplus(widened(dt[0]) + widened(dt_bias))
    out = scan(x, step, A, B, C, ends) + widened(x) * widened(D)[:, None]
    return (out.flatten(1) * F.silu(widened(z[0])))[None].to(zxbcdt.dtype)


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ends: Tensor) -> Tensor:  # noqa: N803
    """x [T, H, P], dt [T, H], A [H], B, C [T, G, N] -> [T, H, P]; 0 and the ends of the sequences [S + 1].

    A state S [N, P] of each head and sequence begins at 0.  Each token lets it fade, adds x to it, and reads it:
    S = e^(dt A) S + dt B x^T; out = S^T C.  The heads of a group have the same B and C.

    Dao and Gu, "Transformers are SSMs", arXiv:2405.21060, section 6: inside a chunk that is attention, whose scores
    fade; between the chunks of a sequence only the state is handed on.
    """
    chunks, groups = Chunks.of(ends.long()), B.size(1)
    x, faded = chunks.split(widened(x) * dt[..., None]), chunks.split(dt * widened(A))
    x, faded = x.unflatten(1, (groups, -1)), faded.unflatten(1, (groups, -1)).cumsum(-1)
    keys, queries = (chunks.split(widened(part))[:, :, None] for part in (B, C))
    below = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=x.device).tril()
    decay = (faded[..., :, None] - faded[..., None, :]).masked_fill(~below, float("-inf")).exp()
    inside = ((queries @ keys.mT) * decay) @ x
    queries = queries * faded.exp()[..., None]
    keys = keys * (faded[..., -1:] - faded).exp()[..., None]
    left = faded[..., -1].exp()[..., None, None]
    parts = [part.split(chunks.rounds) for part in (queries, keys, x, inside, left)]
    state, outs = x.new_zeros(chunks.rounds[0], *x.shape[1:3], keys.size(-1), x.size(-1)), []
    for q, k, v, own, rest in zip(*parts, strict=True):
        state = state[: len(q)]
        outs.append(own + q @ state)
        state = state * rest + k.mT @ v
    return chunks.join(torch.cat(outs).flatten(1, 2))
