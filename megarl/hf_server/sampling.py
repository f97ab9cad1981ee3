"""Samples the next token of many rows at once, and computes the log-probs of the sampled tokens.

Randomness is counter-based: the uniform number of a token is a hash of (row key, position of the token in the whole
sequence, prompt included).  So the sampled tokens do not depend on the other rows of the batch, on the time a row joins
it, or on retractions, and a completion that is asked for in pieces is the one that is asked for at once.
R rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # the increment of splitmix64 (Steele, Lea, Flood 2014), 2^64 / golden ratio
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BLOCK = 256  # tokens
_MAX_ELEMENTS = 1 << 23  # float64 scratch of one chunk of rows: 64 MiB


def row_key(seed: int, completion: int) -> int:
    """The key of completion number `completion` of a prompt, as a signed 64-bit number."""
    return _signed(_mix_int(_mix_int(seed & _MASK) + (completion + 1) * _STEP))


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MIX[1]) & _MASK
    return x ^ (x >> 31)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """keys [R] int64, positions [R] int64 -> [R] float64 in [0, 1): splitmix64 of key and position, its upper 53 bits.

    On any device: torch's int64 products and sums keep the low 64 bits, as unsigned ones do.
    """
    x = keys + (positions + 1) * _signed(_STEP)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shifted(x, 27)) * _signed(_MIX[1])
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).double() * 2.0**-53


def _signed(x: int) -> int:
    """The signed 64-bit number with the bits of an unsigned one."""
    return x - (1 << 64) if x >> 63 else x


def _shifted(x: Tensor, bits: int) -> Tensor:
    """int64 shifted to the right as if unsigned: torch's own shift copies the sign into the upper bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row: invert the cumulative distribution at `uniform`.

    log_probs are of softmax(logits / temperature), not renormalised over top-p and top-k; a greedy row (temperature 0)
    takes the largest logit and its log-prob at temperature 1.

    Args: logits [R, V]; temperature, top_p, uniform [R] floating; top_k [R] int64 (V or more: all).
    Returns: tokens [R] int64, log_probs [R] float32.
    """
    rows = max(1, _MAX_ELEMENTS // logits.shape[1])
    if len(logits) <= rows:
        return _draw(logits, temperature, top_p, top_k, uniform)
    parts = zip(*(x.split(rows) for x in (logits, temperature, top_p, top_k, uniform)), strict=True)
    tokens, log_probs = zip(*(_draw(*part) for part in parts), strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _draw(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    greedy = temperature == 0
    all_log_probs = _log_probs(logits, temperature)
    if greedy.all():
        tokens = logits.argmax(-1)
    else:
        tokens = _invert(all_log_probs.exp(), uniform)
        narrowed = ((top_p < 1) | (top_k < logits.shape[1])) & ~greedy
        if narrowed.any():
            probs = all_log_probs[narrowed].double().exp()
            tokens[narrowed] = _draw_narrowed(probs, top_p[narrowed], top_k[narrowed], uniform[narrowed])
        if greedy.any():
            tokens[greedy] = logits[greedy].argmax(-1)
    return tokens, all_log_probs.gather(1, tokens[:, None])[:, 0]


def _log_probs(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] float32; of a greedy row at temperature 1."""
    return torch.log_softmax(logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None], dim=-1)


def _draw_narrowed(probs: Tensor, top_p: Tensor, top_k: Tensor, uniform: Tensor) -> Tensor:
    narrow = _narrowed(probs, top_p, top_k)
    picked = _invert(narrow.probs, uniform)
    return narrow.order.gather(1, picked[:, None])[:, 0]


class _Narrowed(NamedTuple):
    """Of each row the tokens, likeliest first, and their probabilities, 0 of those that cannot be drawn."""

    probs: Tensor  # [R, V]
    order: Tensor  # [R, V] token ids
    kept: Tensor  # [R, V] bool


def _narrowed(probs: Tensor, top_p: Tensor, top_k: Tensor) -> _Narrowed:
    """Keep the k likeliest tokens, and of these the shortest prefix that reaches mass p of the whole."""
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = probs.cumsum(-1) - probs
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = (rank < top_k[:, None]) & (mass_before <= top_p[:, None])
    return _Narrowed(torch.where(kept, probs, 0.0), order, kept)


def support(
    logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor, tokens: Tensor
) -> tuple[list[list[int]], list[float]]:
    """Of each row the ids that `draw` could draw, likeliest first, and the log-prob of `tokens` [R] among these.

    Arguments as of `draw`; a greedy row could draw one token only.
    """
    ids: list[list[int]] = []
    log_probs: list[float] = []
    rows = max(1, _MAX_ELEMENTS // logits.shape[1])
    parts = (x.split(rows) for x in (logits, temperature, top_p, top_k, tokens))
    for own, heat, p, k, drawn in zip(*parts, strict=True):
        greedy = heat == 0
        probs = _log_probs(own, heat).double().exp()
        narrow = _narrowed(probs, torch.where(greedy, 1.0, p), torch.where(greedy, own.shape[1], k))
        is_drawn = narrow.order == drawn[:, None]
        kept = torch.where(greedy[:, None], is_drawn, narrow.kept)
        of_drawn, of_kept = ((narrow.probs * which).sum(-1) for which in (is_drawn, kept))
        log_probs += (of_drawn / of_kept).log().tolist()
        ids += [order[which].tolist() for order, which in zip(narrow.order.cpu(), kept.cpu(), strict=True)]
    return ids, log_probs


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds uniform * total; so its own probability is above 0.

    A vocabulary is searched in two levels, the block and the index in it: float64 sums up to each token take longer.

    Args: probs [R, V]; uniform [R] float64.  Returns: [R] int64.
    """
    rows, vocab = probs.shape
    if vocab <= _BLOCK:
        sums = probs.double().cumsum(-1)
        return _first_above(sums, uniform[:, None] * sums[:, -1:])[:, 0]
    blocks = F.pad(probs, (0, -vocab % _BLOCK)) if vocab % _BLOCK else probs
    blocks = blocks.view(rows, -1, _BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    target = uniform[:, None] * sums[:, -1:]
    block = _first_above(sums, target)
    begin = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    share = (target - begin) / (sums.gather(1, block) - begin)  # of the block, whose own sums round otherwise
    sums = blocks[torch.arange(rows, device=probs.device), block[:, 0]].double().cumsum(-1)
    return (block * _BLOCK + _first_above(sums, share * sums[:, -1:]))[:, 0]


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """sums [R, N] ascending, target [R, 1] -> [R, 1] int64.  Never none: a target may round up to the last sum."""
    return torch.searchsorted(sums, torch.minimum(target, sums[:, -1:] * (1 - 2.0**-52)), right=True)
