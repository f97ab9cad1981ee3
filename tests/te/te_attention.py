"""cuDNN's attention over packed rows and the kernels of Transformer-Engine's context parallelism, in plain torch.

Names and arguments are those of `transformer_engine_torch` (2.20.2).  A row is [tokens, heads, size]; sequence i begins
at `padded[i]` and has `ends[i + 1] - ends[i]` tokens.
"""

import enum
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


def get_fused_attn_backend(asked: Any) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """cuDNN takes what Python's own filters of Transformer-Engine leave."""
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def get_cudnn_version() -> int:
    return 92400


def _pairs(ends_q: Tensor, padded_q: Any, ends_kv: Tensor, padded_kv: Any) -> Iterator[tuple[slice, slice]]:
    """The places of each sequence's queries and keys."""
    sides = []
    for ends, padded in ((ends_q, padded_q), (ends_kv, padded_kv)):
        firsts = (ends if padded is None else padded).tolist()
        sides.append([slice(first, first + n) for first, n in zip(firsts, ends.diff().tolist(), strict=False)])
    for queries, keys in zip(*sides, strict=True):
        if queries.stop > queries.start:
            yield queries, keys


def _heads(keys: Tensor, num_heads: int) -> Tensor:
    """[k, groups, d] -> [k, heads, d] in float32."""
    return keys.float().repeat_interleave(num_heads // keys.shape[1], 1)


def _scores(q: Tensor, k: Tensor, scale: float, is_causal: bool, window: tuple[int, int]) -> Tensor:
    """[q, h, d], [k, groups, d] -> [h, q, k]; a token sees itself and `window[0]` before it (-1: all)."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), _heads(k, q.shape[1])) * scale
    if not is_causal:
        return scores
    back = torch.arange(len(q))[:, None] - torch.arange(len(k))[None]
    hidden = (back < 0) | ((back > window[0]) if window[0] >= 0 else torch.zeros_like(back, dtype=torch.bool))
    return scores.masked_fill(hidden, float("-inf"))


def fused_attn_fwd(
    longest_q: int,
    longest_kv: int,
    is_training: bool,
    scale: float,
    dropout: float,
    fill: bool,
    layout: Any,
    out_format: Any,
    inverse_format: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: tuple[int, int],
    bottom_right: Any,
    ends_q: Tensor,
    ends_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: Any,
    padded_q: Tensor | None,
    padded_kv: Tensor | None,
    pages_k: Any,
    pages_v: Any,
    s_quantizer: Any,
    o_quantizer: Any,
    bias: Any,
    sinks: Tensor | None,
    *_: Any,
) -> list[Tensor]:
    """[output, log of the sum of exponentials [tokens, heads, 1], state of the generator, sinks]."""
    assert not dropout and bias is None and "NO_BIAS" in bias_type.name.upper(), "not in the stand-in"
    assert longest_q >= ends_q.diff().max() and longest_kv >= ends_kv.diff().max(), "a longest sequence that is longer"
    out, stats = q.new_zeros(*q.shape[:2], v.shape[-1]), torch.zeros(*q.shape[:2], 1)
    for queries, keys in _pairs(ends_q, padded_q, ends_kv, padded_kv):
        assert queries.stop <= len(q) and keys.stop <= len(k), "a sequence beyond the end of its row"
        scores = _scores(q[queries], k[keys], scale, "CAUSAL" in mask.name, window)
        beside = [] if sinks is None else [sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)]
        total = torch.cat((scores, *beside), -1).logsumexp(-1)
        weights = (scores - total[..., None]).exp()
        out[queries] = torch.einsum("hqk,khd->qhd", weights, _heads(v[keys], q.shape[1])).to(out.dtype)
        stats[queries, :, 0] = total.T
    return [out, stats, torch.zeros(2, dtype=torch.int64), *([] if sinks is None else [sinks])]


def fused_attn_bwd(
    longest_q: int,
    longest_kv: int,
    scale: float,
    dropout: float,
    fill: bool,
    layout: Any,
    out_format: Any,
    grad_format: Any,
    grad_layout: Any,
    inverse_format: Any,
    grad_inverse_format: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: tuple[int, int],
    bottom_right: Any,
    deterministic: bool,
    ends_q: Tensor,
    ends_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    dtype: Any,
    kept: list[Tensor],
    padded_q: Tensor | None,
    padded_kv: Tensor | None,
    *_: Any,
) -> list[Tensor | None]:
    """[dq, dk, dv, of the bias, of the sinks].  `kept`: what `fused_attn_fwd` gives after its output."""
    stats, sinks = kept[0], kept[2] if len(kept) > 2 else None
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_sinks = None if sinks is None else torch.zeros(sinks.shape)
    for queries, keys in _pairs(ends_q, padded_q, ends_kv, padded_kv):
        total = stats[queries, :, 0].T[..., None]
        weights = (_scores(q[queries], k[keys], scale, "CAUSAL" in mask.name, window) - total).exp()
        of_out = grad[queries].float()
        of_weights = torch.einsum("qhd,khd->hqk", of_out, _heads(v[keys], q.shape[1]))
        inside = (of_out * out[queries].float()).sum(-1).T[..., None]  # sum over keys of weights * of_weights
        of_scores = weights * (of_weights - inside) * scale
        if sinks is not None and of_sinks is not None:
            of_sinks -= ((sinks.float().view(-1, 1, 1) - total).exp() * inside).sum((1, 2)).view(of_sinks.shape)
        dq[queries] = torch.einsum("hqk,khd->qhd", of_scores, _heads(k[keys], q.shape[1])).to(dq.dtype)
        for target, sums in (
            (dk, torch.einsum("hqk,qhd->khd", of_scores, q[queries].float())),
            (dv, torch.einsum("hqk,qhd->khd", weights, of_out)),
        ):
            target[keys] = sums.unflatten(1, (target.shape[1], -1)).sum(2).to(target.dtype)
    return [dq, dk, dv, None, *([] if of_sinks is None else [of_sinks])]


def convert_thd_to_bshd(row: Tensor, ends: Tensor, batch: int, longest: int) -> Tensor:
    out = row.new_zeros(batch, longest, *row.shape[1:])
    for i, (first, end) in enumerate(ends.unfold(0, 2, 1).tolist()):
        out[i, : end - first] = row[first:end]
    return out


def convert_bshd_to_thd(padded: Tensor, ends: Tensor, tokens: int) -> Tensor:
    out = padded.new_zeros(tokens, *padded.shape[2:])
    for i, (first, end) in enumerate(ends.unfold(0, 2, 1).tolist()):
        out[first:end] = padded[i, : end - first]
    return out


# A rank of context parallelism has two chunks of each sequence, one from its first half and one from its second.


def _half(ends: Tensor, second: int) -> Tensor:
    """The places of each sequence's first or second half."""
    places = [range(first, end) for first, end in ends.unfold(0, 2, 1).tolist()]
    return torch.tensor(
        [at for own in places for at in (own[len(own) // 2 :] if second else own[: len(own) // 2])]
    ).long()


def _rank_order(ends: Tensor, cp: int) -> Tensor:
    """Of each place, ranks one after another: where it is in the order of sequences."""
    order: list[int] = []
    for rank in range(cp):
        for first, end in ends.unfold(0, 2, 1).tolist():
            chunk = (end - first) // (2 * cp)
            for at in (rank, 2 * cp - 1 - rank):
                order += range(first + at * chunk, first + (at + 1) * chunk)
    return torch.tensor(order).long()


def thd_sequence_order_to_cp_rank_order(row: Tensor, ends: Tensor, cp: int, tokens: int) -> Tensor:
    return row[_rank_order(ends, cp)]


def thd_cp_rank_order_to_sequence_order(row: Tensor, ends: Tensor, cp: int, tokens: int) -> Tensor:
    out = torch.empty_like(row)
    out[_rank_order(ends, cp)] = row
    return out


def thd_read_half_tensor(row: Tensor, ends: Tensor, second: int) -> Tensor:
    return row.index_select(row.dim() - 3, _half(ends, second)).contiguous()


def thd_second_half_lse_correction(total: Tensor, of_step: Tensor, ends: Tensor, is_packed: bool) -> None:
    assert is_packed, "[heads, tokens]"
    places = _half(ends, 1)
    total[:, places] = torch.logaddexp(total[:, places], of_step[:, : len(places)])


def thd_read_second_half_lse(total: Tensor, ends: Tensor, is_packed: bool, tokens: int) -> Tensor:
    assert is_packed, "[heads, tokens]"
    places = _half(ends, 1)
    out = total.new_zeros(total.shape[0], tokens)
    out[:, : len(places)] = total[:, places]
    return out


def thd_out_correction(
    out: Tensor, of_step: Tensor, old: Tensor, new: Tensor, step: Tensor, ends: Tensor, second: bool, is_packed: bool
) -> None:
    """Add a step of the ring to the output: both sums are scaled from their own total to the new one."""
    places = _half(ends, 1) if second else torch.arange(int(ends[-1]))
    heads = new.shape[0]
    size = out.numel() // (heads * new.shape[1])
    whole, part = out.view(-1, heads, size), of_step.view(-1, heads, size)[: len(places)]
    before, added = ((x - new[:, places]).exp().T[..., None] for x in (old[:, places], step[:, : len(places)]))
    whole[places] = (whole[places].float() * before + part.float() * added).to(out.dtype)


def thd_grad_correction(grad: Tensor, of_step: Tensor, ends: Tensor, first: str, second: str) -> None:
    """Each half of `grad` is kept ("none"), replaced, increased, or set to zero by the step's."""
    is_half = "none" in (first, second)  # the step has nothing else
    dim = grad.dim() - 3
    for half, what in enumerate((first, second)):
        if what == "none":
            continue
        places = _half(ends, half)
        if what == "zero":
            grad.index_fill_(dim, places, 0.0)
            continue
        added = of_step.index_select(dim, torch.arange(len(places)) if is_half else places)
        (grad.index_copy_ if what == "copy" else grad.index_add_)(dim, places, added)


KERNELS = (
    NVTE_Fused_Attn_Backend,
    get_fused_attn_backend,
    get_cudnn_version,
    fused_attn_fwd,
    fused_attn_bwd,
    convert_thd_to_bshd,
    convert_bshd_to_thd,
    thd_sequence_order_to_cp_rank_order,
    thd_cp_rank_order_to_sequence_order,
    thd_read_half_tensor,
    thd_second_half_lse_correction,
    thd_read_second_half_lse,
    thd_out_correction,
    thd_grad_correction,
)
