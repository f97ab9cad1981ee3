"""Gated delta nets (Qwen3-Next, Qwen3.5) in plain torch, in place of SGLang's kernels for processors with AMX.

The functions have the names and arguments of these kernels, some of which SGLang takes from `torch.ops.sgl_kernel`.
A pool has states by slots; each sequence of a batch continues the state of its slot, and leaves it behind the last
token.  Numbers of 16 bits are computed in float32.  The rule is computed token by token, in another way than the
trainer's kernels, all sequences side by side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any,  # noqa: ARG001
) -> Tensor:
    """x [D, T] of several sequences, weight [D, W], pool [slots, D, W - 1] -> silu of the convolutions [D, T]."""
    out, ends = torch.zeros_like(x), query_start_loc.tolist()
    for number, slot in enumerate(cache_indices.tolist()):
        if not has_initial_state[number]:
            conv_states[slot] = 0
        of_sequence = slice(ends[number], ends[number + 1])
        before = conv_states[slot].to(x.dtype)
        out[:, of_sequence], conv_states[slot] = _convolved(before, x[:, of_sequence], weight, bias, activation)
    return out


def causal_conv1d_update_cpu(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, conv_state_indices: Tensor
) -> Tensor:
    """The same for one token of each sequence: x [B, D] -> [B, D]."""
    before = conv_state[conv_state_indices].to(x.dtype)
    out, conv_state[conv_state_indices] = _convolved(before, x[..., None], weight, bias, activation)
    return out[..., 0]


def _convolved(before: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, ...]:
    """`before` [..., D, W - 1] and x [..., D, T] -> [..., D, T], and the last W - 1 of both."""
    assert activation == "silu" and bias is None
    taps = weight.size(1)
    both = torch.cat((before, x), -1)
    windows = both.float().unfold(-1, taps, 1)
    return F.silu((windows * weight.float()[:, None]).sum(-1)).to(x.dtype), both[..., 1 - taps :]


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """q, k [1, T, H, K], v [1, T, G, V], g and beta [1, T, G] of several sequences, pool [slots, G, V, K] -> as v.

    A state S [V, K] of each head of values fades with each token, takes what is new in its value under its key, and is
    read: S = e^g S; S += beta (v - S k) k^T; out = S q.  A head of keys serves G / H heads of values.
    """
    assert use_qk_l2norm_in_kernel and not head_first
    served = v.size(2) // q.size(2)
    queries = (_unit(q[0].float()) * q.size(-1) ** -0.5).repeat_interleave(served, 1)
    keys, values = _unit(k[0].float()).repeat_interleave(served, 1), v[0].float()
    fading, beta = g[0].float().exp()[..., None, None], beta[0].float()[..., None]
    lengths, order = cu_seqlens.diff().sort(descending=True)
    first, slots = cu_seqlens[:-1][order], initial_state_indices[order]
    states, out = initial_state[slots].float(), torch.zeros_like(values)
    for token in range(int(lengths[0])):
        going = int((lengths > token).sum())  # the sequences that have so many tokens come first
        at, state = first[:going] + token, states[:going]
        state *= fading[at]
        new = beta[at] * (values[at] - _times(state, keys[at]))
        state += new[..., None] * keys[at][..., None, :]
        out[at] = _times(state, queries[at])
    initial_state[slots] = states.to(initial_state.dtype)
    return out[None].to(v.dtype), None, None


def _times(state: Tensor, vector: Tensor) -> Tensor:
    """[..., V, K] and [..., K] -> [..., V]."""
    return (state @ vector[..., None])[..., 0]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def fused_gdn_gating_cpu(a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """a, b [T, G] -> the logarithm of what is left of a state, and how much of a value is taken, both [1, T, G]."""
    left = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return left[None], b.float().sigmoid()[None]


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,  # noqa: N803
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> Tensor:
    """Both in one: q, k [1, B, H, K], v [1, B, G, V], a and b [B, G] -> as v."""
    assert (softplus_beta, softplus_threshold) == (1.0, 20.0), "those of torch"
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    out, *_ = chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        cu_seqlens=cu_seqlens,
        initial_state_indices=initial_state_indices,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )
    return out


def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """The norm of a head [N, V], scaled by the silu of its gate [N, V]."""
    return (_normalised(x, eps) * weight.float() * F.silu(gate.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, ...]:
    """q and k, any shapes of whole heads -> normalised [heads, head_dim] each; weights are stored less 1."""
    pairs = ((x.reshape(-1, head_dim), weight) for x, weight in ((q, q_weight), (k, k_weight)))
    return tuple((_normalised(x, eps) * (1 + weight.float())).to(x.dtype) for x, weight in pairs)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int, heads: int
) -> tuple[Tensor, ...]:
    """The same where each head of q is followed by its gate; the gates [heads, head_dim] are the third result."""
    q, gate = q_gate.reshape(-1, heads, 2 * head_dim).chunk(2, -1)
    return (*fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous().view(-1, head_dim))


def _normalised(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """In place, x by the sigmoid of a gate of as many numbers."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, ...]:
    """Rows q, k, v, z [T, ...] and b, a [T, ...] -> q, k and v together, z [T, G, V], b, a [T, G]."""
    z = qkvz[:, -value_heads * value_dim :]
    mixed = qkvz[:, : 2 * key_heads * key_dim + value_heads * value_dim]
    b, a = ba.chunk(2, -1)
    return mixed.contiguous(), z.reshape(len(z), value_heads, value_dim), b.contiguous(), a.contiguous()


for _kernel in (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_rmsnorm_gated_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_sigmoid_mul_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)
