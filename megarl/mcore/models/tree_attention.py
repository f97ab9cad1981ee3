"""Causal attention over rows whose common prefixes stand once: see data/prefix_tree.py.

A place attends to the places before it in its node, and to all of the node's ancestors but each one's last place, which
the node below repeats.  Each of the two parts is a call of torch's fused attention with its own softmax; the parts are
merged by the logarithms of their sums, as Ring Attention merges blocks (arXiv:2310.01889).  In the backward pass each
part gets the merged output and logarithm, with which its probabilities are those of the whole softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.data.prefix_tree import PrefixTree

WASTE = 1.3  # of a call: the largest part of it by the smallest, in queries and in keys


@dataclass(frozen=True)
class Call:
    """Some parts of a row with about as many queries and keys each, in one call; padding is behind each part's end."""

    queries: Tensor  # [b * q] int64, places of the row; of padding T
    keys: Tensor  # [b * k] int64
    shape: tuple[int, int, int]  # b, q, k
    is_causal: bool  # over the places of a node: queries are the keys
    query_positions: Tensor  # [b, q] int64, in the sequences; of padding -1
    key_positions: Tensor  # [b, k] int64
    has_all_keys: bool  # no part has padding for keys

    def on(self, device: torch.device) -> Call:
        names = ("queries", "keys", "query_positions", "key_positions")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True)
class TreePlan:
    """The calls for a row, made once for all layers."""

    calls: tuple[Call, ...]
    num_places: int
    longest: int  # positions of the longest sequence

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
        seen = [(np.concatenate([own[child] for child in below[node]]), above[node]) for node in below if node >= 0]
        at = np.append(tree.place_positions, -1)
        calls = [*_calls([(x, x) for x in own], at, is_causal=True), *_calls(seen, at, is_causal=False)]
        longest = int((tree.positions + tree.lengths).max())
        return cls(tuple(call.on(device) for call in calls), tree.num_places, longest)


def _calls(parts: list[tuple[np.ndarray, np.ndarray]], at: np.ndarray, *, is_causal: bool) -> Iterator[Call]:
    """Parts (queries, keys) of similar size together, so that little is padding."""
    lots: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for part in sorted((part for part in parts if len(part[1])), key=lambda part: (len(part[1]), len(part[0]))):
        if lots and all(len(x) <= WASTE * len(least) + 8 for x, least in zip(part, lots[-1][0], strict=True)):
            lots[-1].append(part)
        else:
            lots.append([part])
    for lot in lots:
        queries, keys = (_padded([part[i] for part in lot], len(at) - 1) for i in (0, 1))
        tensors = [torch.from_numpy(x) for x in (queries.ravel(), keys.ravel(), at[queries], at[keys])]
        shape = len(lot), queries.shape[1], keys.shape[1]
        yield Call(tensors[0], tensors[1], shape, is_causal, tensors[2], tensors[3], keys.max() < len(at) - 1)


def _padded(parts: list[np.ndarray], padding: int) -> np.ndarray:
    found = np.full((len(parts), max(map(len, parts))), padding)
    for row, part in zip(found, parts, strict=True):
        row[: len(part)] = part
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
        # With a place more, which padding reads and writes.
        out = q.new_zeros(plan.num_places + 1, q.size(1), v.size(2), dtype=exact)
        sums = out.new_full(out.shape[:2], -torch.inf) if sinks is None else sinks.to(exact).repeat(len(out), 1)
        inputs = [_resized(x[: plan.num_places], plan.num_places + 1) for x in (q, k, v)]
        for call in plan.calls:
            mask = mask_of(call, window, plan.longest)
            found = attend(*_taken(call, *inputs), mask, is_causal=call.is_causal, scale=scale)
            part, of_part = (x.to(exact).flatten(0, 1) for x in found)
            if not (call.is_causal and sinks is None):  # the first that a place sees
                before = sums.index_select(0, call.queries)
                total = torch.logaddexp(before, of_part)
                part = torch.lerp(
                    out.index_select(0, call.queries), part, (of_part - total).exp()[..., None].expand_as(part)
                )
                of_part = total
            out.index_copy_(0, call.queries, part)
            sums.index_copy_(0, call.queries, of_part)
        result = _resized(out[:-1].to(q.dtype), len(q))
        ctx.save_for_backward(q, k, v, sinks, result, sums[:-1])
        ctx.how = (plan, window, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, sums = ctx.saved_tensors
        plan, window, scale = ctx.how
        given, merged, *inputs = (_resized(x[: plan.num_places], plan.num_places + 1) for x in (grad, out, q, k, v))
        infinite = torch.cat([sums, sums.new_full((1, sums.size(1)), torch.inf)])  # padding has no probability
        totals = [x.new_zeros(x.shape, dtype=sums.dtype) for x in inputs]
        for call in plan.calls:
            grads, outs, logs = (
                x.index_select(0, call.queries).unflatten(0, call.shape[:2]) for x in (given, merged, infinite)
            )
            mask = mask_of(call, window, plan.longest)
            parts = attend_backward(
                grads, outs, logs, *_taken(call, *inputs), mask, is_causal=call.is_causal, scale=scale
            )
            for total, part, places in zip(totals, parts, (call.queries, call.keys, call.keys), strict=True):
                total.index_add_(0, places, part.flatten(0, 1).to(total.dtype))
        of_q, of_k, of_v = (_resized(total[:-1].to(q.dtype), len(q)) for total in totals)
        of_sinks = None
        if sinks is not None:  # of a key with a value of zeros
            change = (given[:-1].to(sums.dtype) * merged[:-1].to(sums.dtype)).sum(-1)
            of_sinks = -((sinks.to(sums.dtype) - sums).exp() * change).sum(0).to(sinks.dtype)
        return of_q, of_k, of_v, of_sinks, None, None, None


def _resized(x: Tensor, size: int) -> Tensor:
    """[T, ...] -> [size, ...], zeros behind the end."""
    return x if len(x) == size else F.pad(x, (0, 0) * (x.dim() - 1) + (0, size - len(x)))


def _taken(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, q, n, d], [b, k, m, d], [b, k, m, e]"""
    b, num_queries, num_keys = call.shape
    k, v = (x.index_select(0, call.keys).unflatten(0, (b, num_keys)) for x in (k, v))
    return q.index_select(0, call.queries).unflatten(0, (b, num_queries)), k, v


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q [b, q, n, d], k [b, k, m, d], v [b, k, m, e] -> output [b, q, n, e], logarithm of each softmax's sum [b, q, n].

    A query that sees nothing gets zeros, and minus infinity.
    """
    width, (q, k, v) = v.size(-1), _same_heads(q, k, v)
    how: dict[str, Any] = {"attn_mask": _added(mask, q), "scale": scale}
    is_causal = is_causal and mask is None
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, **how)
    if mask is not None:  # torch says zeros, and a sum of 1, of a query that sees nothing
        sums = sums.masked_fill(~mask.any(-1), -torch.inf)
    return out.transpose(1, 2)[..., :width], sums.transpose(1, 2)


def attend_backward(
    grad: Tensor,
    out: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their shapes, as parts of a softmax with this output and log of the sum."""
    shapes = q.shape, k.shape, v.shape
    wide = max(q.size(-1), v.size(-1))
    grad, out = (F.pad(x, (0, wide - x.size(-1))).transpose(1, 2) for x in (grad, out))
    q, k, v = _same_heads(q, k, v)
    how: dict[str, Any] = {"attn_mask": _added(mask, q), "scale": scale}
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums.transpose(1, 2), 0.0, is_causal and mask is None, **how
    )
    found = []
    for part, (_, _, heads, size) in zip(parts, shapes, strict=True):
        part = part.transpose(1, 2)[..., :size]
        found.append(part.unflatten(2, (heads, -1)).sum(3) if part.size(2) != heads else part)
    return found[0], found[1], found[2]


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[b, n, l, w] each: as many heads and dimensions as the most of them have."""
    wide, times = max(q.size(-1), v.size(-1)), q.size(2) // k.size(2)
    q, k, v = (F.pad(x, (0, wide - x.size(-1))).transpose(1, 2) for x in (q, k, v))
    return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """What is added to the scores: 0 where a query sees a key, else -inf."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(~mask, -torch.inf)
