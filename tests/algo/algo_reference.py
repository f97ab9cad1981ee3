"""Slow and obvious: every formula per sequence and per token, in plain Python numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.sample import Batch

LIMIT = 20.0


@dataclass
class Packed:
    """B random sequences as columns [N] and rows [B], float64."""

    batch: Batch

    def lists(self, name: str) -> list[list[float]]:
        return [column.tolist() for column in self.batch.split(self.batch.columns[name])]

    @property
    def masks(self) -> list[list[bool]]:
        return [[m != 0 for m in row] for row in self.lists("response_mask")]


def random_packed(
    lengths: list[int], seed: int, *, groups: list[int] | None = None, dtype: torch.dtype = torch.float64, poison=True
) -> Packed:
    """Sequences of these lengths, about a third of the tokens masked; NaN and infinity at masked places if `poison`."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    mask = (torch.rand(n, generator=g) < 0.65).to(dtype)
    columns: dict[str, Tensor] = {"response_mask": mask}
    old = -3 * torch.rand(n, generator=g, dtype=torch.float64)
    noise = {name: torch.randn(n, generator=g, dtype=torch.float64) for name in "abcdefg"}
    columns |= {
        "old_log_probs": old,
        "log_probs": old + 0.3 * noise["a"],
        "ref_log_probs": old + 0.8 * noise["b"],
        "rollout_log_probs": old + 0.01 * noise["c"],
        "advantages": noise["d"],
        "entropy": noise["e"].abs(),
        "values": noise["f"],
        "returns": noise["g"],
    }
    columns = {name: column.to(dtype) for name, column in columns.items()}
    if poison:
        trash = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=dtype)[torch.arange(n) % 4]
        columns = {k: c if k == "response_mask" else torch.where(mask != 0, c, trash) for k, c in columns.items()}
    group = torch.tensor(groups if groups is not None else [i // 2 for i in range(len(lengths))], dtype=torch.int64)
    score = torch.randint(0, 3, (len(lengths),), generator=g).float()
    rows = {"group": group, "score": score}
    return Packed(Batch(torch.arange(n), torch.tensor(lengths, dtype=torch.int64), columns, rows))


packs = st.builds(
    random_packed, st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=6), st.integers(0, 10**6)
)


def ratio(new: float, old: float) -> float:
    return math.exp(min(max(new - old, -LIMIT), LIMIT))


def ppo_token(new: float, old: float, a: float, low: float = 0.2, high: float = 0.2, c: float | None = 3.0) -> float:
    r = ratio(new, old)
    loss = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
    return min(loss, -c * a) if c is not None and a < 0 else loss


def kl_token(name: str, new: float, ref: float) -> float:
    x = new - ref
    if name in ("kl", "k1"):
        return x
    if name in ("mse", "k2"):
        return x * x / 2
    if name == "abs":
        return abs(x)
    start = 2.610868638149876
    return math.exp(-x) + x - 1 if -x <= start else 10 + (10 + start) * (-x - start)


def weights(
    mode: str, masks: list[list[bool]], groups: list[int] | None = None, scale: float | None = None
) -> list[float]:
    """The weight of every token of the step, flat."""
    n = [sum(m) for m in masks]
    num_sequences = sum(k > 0 for k in n)
    group_tokens: dict[int, int] = {}
    for g, k in zip(groups or [], n, strict=False):
        group_tokens[g] = group_tokens.get(g, 0) + k
    num_groups = sum(k > 0 for k in group_tokens.values())
    out = []
    for b, mask in enumerate(masks):
        for m in mask:
            if not m:
                out.append(0.0)
            elif mode == "token-mean":
                out.append(1 / sum(n))
            elif mode == "token-sum":
                out.append(1.0)
            elif mode == "seq-mean-token-sum":
                out.append(1 / num_sequences)
            elif mode == "seq-mean-token-mean":
                out.append(1 / (num_sequences * n[b]))
            elif mode == "seq-mean-token-sum-norm":
                out.append(1 / (num_sequences * scale))
            elif mode == "token-sum-norm":
                out.append(1 / scale)
            elif mode == "prompt-mean-token-mean":
                out.append(1 / (num_groups * group_tokens[groups[b]]))
    return out


def gae_sequence(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """One sequence, backwards, one token at a time."""
    pending, moved = 0.0, [0.0] * len(mask)
    for t in range(len(mask) - 1, -1, -1):  # a reward waits until a trainable token takes it
        pending += rewards[t]
        if mask[t]:
            moved[t], pending = pending, 0.0
    next_value = next_advantage = 0.0
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for t in range(len(mask) - 1, -1, -1):
        if mask[t]:
            delta = moved[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[t], returns[t] = next_advantage, next_advantage + values[t]
    return advantages, returns


def grpo_samples(scores: list[float], groups: list[int], norm_by_std: bool = True) -> list[float]:
    out = []
    for score, g in zip(scores, groups, strict=True):
        peers = [s for s, h in zip(scores, groups, strict=True) if h == g]
        if len(peers) < 2:
            out.append(0.0)
            continue
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((p - mean) ** 2 for p in peers) / (len(peers) - 1))
        out.append((score - mean) / (std + 1e-6) if norm_by_std else score - mean)
    return out


def whiten(xs: list[float]) -> list[float]:
    if len(xs) < 2:
        return xs
    mean = sum(xs) / len(xs)
    var = sum((x - mean) ** 2 for x in xs) / (len(xs) - 1)
    return [(x - mean) / math.sqrt(var + 1e-8) for x in xs]
