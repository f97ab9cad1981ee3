"""The gated delta rule and its convolution over packed rows in plain torch, for machines without `fla`.

No sequence of a row sees another.  16-bit numbers are computed in float32.  The functions have the arguments that
Megatron's gated delta net gives to those of `fla` (flash-linear-attention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens at most; the time of long sequences is the same from 16 to 64


def l2norm(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    """x divided by its length, as the models' own code does it."""
    wide = widened(x)
    return (wide * torch.rsqrt(wide.square().sum(dim, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, cu_seqlens: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """x [B, T, D] -> silu of the sum over taps j of weight[D, W - 1 - j] times the token j places before.

    `cu_seqlens` [S + 1]: where the sequences of the row begin and end; None: each of the B rows is one.
    """
    _check(options, activation="silu", initial_state=None, output_final_state=False)
    position = _positions(x, cu_seqlens)
    wide, taps = widened(x), widened(weight)
    out = wide * taps[:, -1]
    for back in range(1, min(weight.size(1), x.size(1))):
        before = F.pad(wide[:, :-back], (0, 0, back, 0))
        out = out + before.masked_fill((position < back)[None, :, None], 0) * taps[:, -1 - back]
    return F.silu(out if bias is None else out + bias).to(x.dtype), None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """q, k [1, T, H, K], v [1, T, H, V], g, beta [1, T, H] -> [1, T, H, V].

    A state S [K, V] of each head and sequence begins at 0.  Each token lets it fade, adds to it what is new in its
    value under its key, and reads it: S = e^g S; S += beta k (v - S^T k)^T; out = scale S^T q.

    Yang et al., "Gated Delta Networks", arXiv:2412.06464, section 3.3: inside a chunk, the new values U of all tokens
    solve a triangular system, (I + A) U = beta V - (beta e^G K) S, where G sums g from the start of the chunk and A
    holds beta_i e^(G_i - G_j) k_i.k_j for j < i.  Of all chunks at once that is one solve; then a scan goes over the
    chunks of a sequence, side by side for all sequences that have so many.
    """
    _check(options, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False)
    assert q.size(0) == 1, "rows are packed"
    chunks = Chunks.of(torch.tensor([0, q.size(1)]) if cu_seqlens is None else cu_seqlens.long())
    dtype = q.dtype
    q, k, v, g, beta = (chunks.split(widened(x[0])) for x in (q, k, v, g, beta))
    q = q * (q.size(-1) ** -0.5 if scale is None else scale)
    faded = g.cumsum(-1)
    below = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).tril()
    decay = (faded[..., :, None] - faded[..., None, :]).masked_fill(~below, float("-inf")).exp()
    keys = k * beta[..., None]
    wanted = torch.cat([v * beta[..., None], keys * faded.exp()[..., None]], -1)
    system = (keys @ k.mT) * decay  # what is on its diagonal is taken for ones
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    new, known = solved.split((v.size(-1), k.size(-1)), -1)
    scores = (q @ k.mT) * decay
    q = q * faded.exp()[..., None]
    k = k * (faded[..., -1:] - faded).exp()[..., None]
    left = faded[..., -1].exp()[..., None, None]
    parts = [x.split(chunks.rounds) for x in (q, k, new, known, scores, left)]
    state, outs = v.new_zeros(chunks.rounds[0], v.size(1), k.size(-1), v.size(-1)), []
    for q_, k_, new_, known_, scores_, left_ in zip(*parts, strict=True):
        state = state[: len(q_)]
        values = new_ - known_ @ state
        outs.append(q_ @ state + scores_ @ values)
        state = state * left_ + k_.mT @ values
    return chunks.join(torch.cat(outs))[None].to(dtype), None


@dataclass(frozen=True)
class Chunks:
    """The chunks of a row's sequences: in one round the first chunk of each, in the next their second ones, and so on.

    In a round the longer sequences come first, so those that go on are always the first ones of the round before.
    """

    places: Tensor  # [T] the place of each token among the places of all chunks
    rounds: tuple[int, ...]  # chunks of each round
    size: int  # tokens of a chunk

    @classmethod
    def of(cls, ends: Tensor) -> Chunks:
        """`ends` [S + 1]: 0 and the ends of the sequences."""
        lengths = ends.diff()
        size = min(CHUNK, int(lengths.max()))  # short sequences are not padded to a whole chunk
        counts = -(-lengths // size)
        rounds = (counts[None] > torch.arange(int(counts.max()), device=ends.device)[:, None]).sum(1)
        rank = lengths.argsort(descending=True, stable=True).argsort()
        sequence = torch.repeat_interleave(lengths)
        position = torch.arange(len(sequence), device=ends.device) - ends[sequence]
        first = rounds.cumsum(0) - rounds
        places = (first[position // size] + rank[sequence]) * size + position % size
        return cls(places, tuple(rounds.tolist()), size)

    def split(self, x: Tensor) -> Tensor:
        """[T, H, ...] -> [chunks, H, size, ...], with zeros behind a sequence's end."""
        padded = x.new_zeros(sum(self.rounds) * self.size, *x.shape[1:]).index_copy(0, self.places, x)
        return padded.unflatten(0, (-1, self.size)).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """[chunks, H, size, ...] -> [T, H, ...]."""
        return x.transpose(1, 2).flatten(0, 1)[self.places]


def _positions(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[T] of each token in its sequence."""
    tokens = torch.arange(x.size(1), device=x.device)
    if cu_seqlens is None:
        return tokens
    ends = cu_seqlens.long()
    return tokens - ends[torch.repeat_interleave(ends.diff())]


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(options: dict[str, Any], **known: Any) -> None:
    other = {name: value for name, value in options.items() if name not in known or value != known[name]}
    assert not other, f"Megatron asks for {other}, which these functions do not have"
