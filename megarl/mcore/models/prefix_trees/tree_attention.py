"""Causal attention over rows whose common prefixes stand once, on CPUs: see data/prefix_tree.py.

A place attends to the places before it in its node, and to all of the node's ancestors but each one's last place, which
the node below repeats.  Where the ancestors are short, both are one call, for which each node gets a copy of their
keys: of torch's fused attention, or of `attend_short` if the node is short too.  Where they are long, each part is
a call with its own softmax, the one over the ancestors for all children of a node at once; the parts are merged by the
logarithms of their sums, as Ring Attention merges blocks (arXiv:2310.01889).  In the backward pass each part gets the
merged output and logarithm, with which its probabilities are those of the whole softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.data.prefix_tree import PrefixTree

# On CPUs one call in place of two is faster, by a third for short nodes; a longer one's mask would take much memory.
REPEATED = 128  # keys above a node that are copied for each of its children
MASKED = 512  # places of such a child
SHORT = 64  # places of a node with none above it that is masked as a child is
FEW_SCORES = SHORT**2  # of a head in a part: with more, torch's fused attention is faster than attend_short
WASTE = 1.3  # of a call: its largest part is at most this times the smallest and 8, in queries and in keys

# Scores are in units of ln 2: torch's powers of two take a third of the time of its powers of e, whose library (MKL's)
# is slower still where a score is minus infinity.
LN2 = math.log(2)

Part = tuple[np.ndarray, np.ndarray]  # places of queries, and of keys


@dataclass(frozen=True)
class Call:
    """Some parts of a row with about as many queries and keys each, in one call; padding is behind each part's end."""

    queries: Tensor  # [b * q] int64, places of the row; of padding T, behind them
    keys: Tensor  # [b * k] int64
    shape: tuple[int, int, int]  # b, q, k
    is_causal: bool  # over the places of a node: queries are the keys
    is_first: bool  # of those in which its queries are
    query_positions: Tensor  # [b, q] int64, in the sequences; of padding -1
    key_positions: Tensor  # [b, k] int64
    has_all_keys: bool  # no part has padding for keys

    @property
    def is_short(self) -> bool:
        """Its scores are few, and each of its queries but padding sees something."""
        return self.is_first and not self.is_causal and self.shape[1] * self.shape[2] <= FEW_SCORES

    def places(self, of_queries: int, of_keys: int) -> tuple[Tensor, Tensor]:
        """Where the heads of its queries are in [T, n, ...] as [T * n, ...], and those of its keys, in the order in
        which they are computed: [b, n, q] and [b, m, k] of a short call, [b, q, n] and [b, k, m] of others."""
        found = []
        for places, heads in ((self.queries, of_queries), (self.keys, of_keys)):
            head = torch.arange(heads, device=places.device)
            of_heads = places.view(self.shape[0], -1, 1) * heads + head
            found.append(of_heads.transpose(1, 2) if self.is_short else of_heads)
        return found[0], found[1]

    def on(self, device: torch.device) -> Call:
        names = ("queries", "keys", "query_positions", "key_positions")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True)
class TreePlan:
    """The calls for a row, made once for all layers."""

    calls: tuple[Call, ...]
    num_places: int
    longest: int  # positions of the longest sequence

    UNIT = 1  # rows are not padded for it

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int | None, scale: float) -> Tensor:
        """`TreeAttention` over this row."""
        out: Tensor = TreeAttention.apply(q, k, v, sinks, self, window, scale)
        return out

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device) -> TreePlan:
        own = [np.arange(a, a + n) for a, n in zip(tree.places.tolist(), tree.lengths.tolist(), strict=True)]
        below: dict[int, list[int]] = {}  # node -> its children, which see the same of the nodes above them
        above = {-1: np.zeros(0, dtype=np.int64)}  # node -> what its children see of it and of its ancestors
        for node, parent in enumerate(tree.parents.tolist()):
            below.setdefault(parent, []).append(node)
        for node in below:  # a parent comes before its children
            if node >= 0:
                above[node] = np.concatenate([above[int(tree.parents[node])], own[node][:-1]])
        whole: list[Part] = []  # a node, and all that it sees
        alone: list[Part] = []  # a node without what is above it
        seen: list[Part] = []  # children of a node, and what is above them
        for node, children in below.items():
            most = 0 if len(above[node]) > REPEATED else MASKED if len(above[node]) else SHORT
            repeats = {child: len(own[child]) <= most for child in children}
            whole += [(own[child], np.concatenate([above[node], own[child]])) for child in children if repeats[child]]
            apart = [own[child] for child in children if not repeats[child]]
            alone += [(places, places) for places in apart]
            if apart and len(above[node]):
                seen.append((np.concatenate(apart), above[node]))
        at = np.append(tree.place_positions, -1)
        calls = [
            *_calls(alone, at, is_causal=True, is_first=True),
            *_calls(whole, at, is_causal=False, is_first=True),
            *_calls(seen, at, is_causal=False, is_first=False),
        ]
        longest = int((tree.positions + tree.lengths).max())
        return cls(tuple(call.on(device) for call in calls), tree.num_places, longest)


def _calls(parts: list[Part], at: np.ndarray, *, is_causal: bool, is_first: bool) -> Iterator[Call]:
    """Parts (queries, keys) of similar size together, so that little is padding."""
    for lot in _lots(parts):
        queries, keys = (_padded([part[i] for part in lot], len(at) - 1) for i in (0, 1))
        yield Call(
            queries=torch.from_numpy(queries.ravel()),
            keys=torch.from_numpy(keys.ravel()),
            shape=(len(lot), queries.shape[1], keys.shape[1]),
            is_causal=is_causal,
            is_first=is_first,
            query_positions=torch.from_numpy(at[queries]),
            key_positions=torch.from_numpy(at[keys]),
            has_all_keys=bool(keys.max() < len(at) - 1),
        )


def _lots(parts: list[Part]) -> list[list[Part]]:
    """Parts with keys in lots of which the largest is near the smallest, in queries and in keys."""
    by_size: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        by_size.setdefault((len(part[1]), len(part[0])), []).append(part)
    lots: list[list[Part]] = []  # fewest keys first
    queries: list[tuple[int, int]] = []  # the fewest and the most of each lot
    for keys, own in sorted(size for size in by_size if size[0]):
        for at, lot in enumerate(lots):
            fewest, most = min(own, queries[at][0]), max(own, queries[at][1])
            if most <= WASTE * fewest + 8 and keys <= WASTE * len(lot[0][1]) + 8:
                lot += by_size[keys, own]
                queries[at] = (fewest, most)
                break
        else:
            lots.append(by_size[keys, own])
            queries.append((own, own))
    return lots


def _padded(parts: list[np.ndarray], padding: int) -> np.ndarray:
    lengths = np.array([len(part) for part in parts])
    found = np.full((len(parts), lengths.max()), padding)
    found[np.arange(found.shape[1]) < lengths[:, None]] = np.concatenate(parts)
    return found


def mask_of(call: Call, window: int | None, longest: int) -> Tensor | None:
    """[b, 1, q or 1, k] bool, what a query sees of the keys; None if the call needs no mask."""
    near = None
    if window is not None and longest > window:
        near = (call.query_positions[:, :, None] - call.key_positions[:, None] < window)[:, None]
    if call.is_causal:  # what a node lacks is behind its end, where its places do not look
        if near is None:
            return None
        own = torch.arange(call.shape[1], device=near.device)
        return near & (own[:, None] >= own)
    there = None if call.has_all_keys else (call.key_positions >= 0)[:, None, None]
    if call.is_first:  # a node and all that it sees, of which its own places come later than others of it
        past = (call.query_positions[:, :, None] >= call.key_positions[:, None])[:, None]
        there = past if there is None else past & there
    return there if near is None else near if there is None else near & there


class TreeAttention(torch.autograd.Function):
    """q [T, n, d], k [T, m, d], v [T, m, e], sinks [n] or None -> [T, n, e], for n a multiple of m.

    Places behind those of the plan are padding, and get zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: TreePlan,
        window: int | None,
        scale: float,
    ) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        # With a place more, which padding writes.
        out = q.new_zeros(plan.num_places + 1, q.size(1), v.size(2), dtype=exact)
        sums = out.new_full(out.shape[:2], -torch.inf) if sinks is None else sinks.to(exact).repeat(len(out), 1)
        for call in plan.calls:
            queries, keys = call.places(q.size(1), k.size(1))
            mask = mask_of(call, window, plan.longest)
            taken = _read(q, queries), _read(k, keys), _read(v, keys)
            if call.is_short:
                assert mask is not None, "a short call is masked: see mask_of"
                found = attend_short(*taken, mask, scale)
            else:
                found = attend(*taken, Seen(mask, call.is_causal), scale)
            part, of_part = found[0].to(exact).flatten(0, 2), found[1].to(exact).flatten()
            outs, logs, queries = out.flatten(0, 1), sums.flatten(), queries.flatten()
            if not (call.is_first and sinks is None):
                before = logs.index_select(0, queries)
                total = torch.logaddexp(before, of_part)
                part = torch.lerp(
                    outs.index_select(0, queries), part, (of_part - total).exp()[..., None].expand_as(part)
                )
                of_part = total
            outs.index_copy_(0, queries, part)
            logs.index_copy_(0, queries, of_part)
        result = _resized(out[:-1].to(q.dtype), len(q))
        ctx.save_for_backward(q, k, v, sinks, result, sums[:-1])
        ctx.how = (plan, window, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, sums = ctx.saved_tensors
        plan, window, scale = ctx.how
        infinite = torch.cat([sums, sums.new_full((1, sums.size(1)), torch.inf)])  # padding has no probability
        size = plan.num_places + 1
        totals = [x.new_zeros(size, *x.shape[1:], dtype=sums.dtype) for x in (q, k, v)]
        for call in plan.calls:
            queries, keys = call.places(q.size(1), k.size(1))
            grads, outs, logs = (_read(x, queries) for x in (grad, out, infinite))
            taken = _read(q, queries), _read(k, keys), _read(v, keys)
            mask = mask_of(call, window, plan.longest)
            if call.is_short:
                assert mask is not None, "a short call is masked: see mask_of"
                parts = attend_short_backward(grads, outs, logs, *taken, mask, scale)
            else:
                parts = attend_backward(grads, outs, logs, *taken, Seen(mask, call.is_causal), scale)
            for total, part, places in zip(totals, parts, (queries, keys, keys), strict=True):
                total.flatten(0, 1).index_add_(0, places.flatten(), part.flatten(0, 2).to(total.dtype))
        of_q, of_k, of_v = (_resized(total[:-1].to(q.dtype), len(q)) for total in totals)
        of_sinks = None
        if sinks is not None:  # of a key with a value of zeros
            change = (grad[: len(sums)].to(sums.dtype) * out[: len(sums)].to(sums.dtype)).sum(-1)
            of_sinks = -((sinks.to(sums.dtype) - sums).exp() * change).sum(0).to(sinks.dtype)
        return of_q, of_k, of_v, of_sinks, None, None, None


def _resized(x: Tensor, size: int) -> Tensor:
    """[T, ...] -> [size, ...], zeros behind the end."""
    return x if len(x) == size else F.pad(x, (0, 0) * (x.dim() - 1) + (0, size - len(x)))


def _read(x: Tensor, places: Tensor) -> Tensor:
    """x [T, n, ...] at `Call.places` -> [*places.shape, ...]; what is read for padding has no effect."""
    rows = x.flatten(0, 1)
    return rows.index_select(0, places.flatten().clamp(max=len(rows) - 1)).unflatten(0, places.shape)


@dataclass(frozen=True)
class Seen:
    """What queries see of the keys: the mask says it, and without one all, or those up to themselves if `is_causal`."""

    mask: Tensor | None
    is_causal: bool


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, q, n, d], k [b, k, m, d], v [b, k, m, e] -> output [b, q, n, e], logarithm of each softmax's sum [b, q, n].

    A query that sees nothing gets zeros, and minus infinity.
    """
    mask, width, (q, k, v) = seen.mask, v.size(-1), _same_heads(q, k, v)
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, seen.is_causal and mask is None, attn_mask=_added(mask, q), scale=scale
    )
    if mask is not None:  # torch says zeros, and a sum of 1, of a query that sees nothing
        sums = sums.masked_fill(~mask.any(-1), -torch.inf)
    return out.transpose(1, 2)[..., :width], sums.transpose(1, 2)


def attend_backward(
    grad: Tensor, out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their shapes, as parts of a softmax with this output and log of the sum."""
    shapes = q.shape, k.shape, v.shape
    wide = max(q.size(-1), v.size(-1))
    grad, out = (_widened(x, wide).transpose(1, 2) for x in (grad, out))
    q, k, v = _same_heads(q, k, v)
    mask, sums = seen.mask, sums.transpose(1, 2)
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, seen.is_causal and mask is None, attn_mask=_added(mask, q), scale=scale
    )
    found = []
    for part, (_, _, heads, size) in zip(parts, shapes, strict=True):
        part = part.transpose(1, 2)[..., :size]
        found.append(part.unflatten(2, (heads, -1)).sum(3) if part.size(2) != heads else part)
    return found[0], found[1], found[2]


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, n, l, w] each: as many heads and dimensions as the most of them have."""
    wide, times = max(q.size(-1), v.size(-1)), q.size(2) // k.size(2)
    q, k, v = (_widened(x, wide).transpose(1, 2) for x in (q, k, v))
    return (q, k, v) if times == 1 else (q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _widened(x: Tensor, width: int) -> Tensor:
    """Zeros behind the last dimension; `F.pad` copies also where there are none."""
    return x if x.size(-1) == width else F.pad(x, (0, width - x.size(-1)))


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to the scores: 0 where a query sees a key, else -inf."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(~mask, -torch.inf)


def attend_short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [b, n, q, d], k [b, m, k, d], v [b, m, k, e] -> output [b, n, q, e], logarithm of each softmax's sum [b, n, q].

    By products of all of a call's small matrices at once: torch's fused attention for CPUs works for each head of each
    sequence alone, on blocks of at least 32 queries, which is more work than the attention of short sequences.  All
    scores are in memory, which only short sequences allow.

    For n a multiple of m.  mask [b, 1, q, k] bool; a query that sees nothing, which only padding does, gets NaN.
    16-bit numbers are computed in float32.
    """
    shape, (q, k, v) = q.shape[:-1], _matrices(k, q, k, v)
    scores = _scores(q, k, mask, scale)
    largest = scores.amax(-1, keepdim=True)
    of_keys = scores.sub_(largest).exp2_()
    total = of_keys.sum(-1, keepdim=True)
    out = torch.bmm(of_keys, v).div_(total)
    return out.view(*shape, -1), total.log2_().add_(largest).mul_(LN2).view(shape)


def attend_short_backward(
    grad: Tensor, out: Tensor, sums: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their shapes, as parts of a softmax with this output and log of the sum."""
    shapes = q.shape, k.shape, v.shape
    q, k, v, grad, out, sums = _matrices(k, q, k, v, grad, out, sums[..., None])
    p = _scores(q, k, mask, scale).sub_(sums / LN2).exp2_()
    inner = (grad * out).sum(-1, keepdim=True)
    of_scores = torch.bmm(grad, v.mT).sub_(inner).mul_(p).mul_(scale)
    of_q, of_k, of_v = torch.bmm(of_scores, k), torch.bmm(of_scores.mT, q), torch.bmm(p.mT, grad)
    return of_q.view(shapes[0]), of_k.view(shapes[1]), of_v.view(shapes[2])


def _matrices(k: Tensor, *parts: Tensor) -> list[Tensor]:
    """[b * m, queries or keys, ...]: the queries of all heads that have the same keys are one below the other."""
    wide = torch.promote_types(k.dtype, torch.float32)
    return [x.to(wide).reshape(k.size(0) * k.size(1), -1, x.size(-1)) for x in parts]


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[b * m, queries, keys] in units of ln 2, -inf where a query does not see a key."""
    scores = torch.bmm(q, k.mT).mul_(scale / LN2)
    hidden = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -torch.inf)
    scores.view(len(mask), -1, *mask.shape[2:]).add_(hidden)
    return scores
