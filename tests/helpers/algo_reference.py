"""Slow and obvious: every formula per sequence and per token, in plain Python numbers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.batch import Batch

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
    more = {name: torch.rand(n, generator=g, dtype=torch.float64).to(dtype) for name in ("full_kl", "rollout_weight")}
    more["selected"] = (torch.rand(n, generator=g) < 0.3).to(dtype)
    columns |= {k: torch.where(mask != 0, c, math.nan) if poison else c for k, c in more.items()}
    rows = {"group": group, "score": score}
    return Packed(Batch(torch.arange(n), torch.tensor(lengths, dtype=torch.int64), columns, rows))


def cut_into_rows(batch: Batch, seed: int) -> Batch:
    """The same samples, each of one to three rows; a sample's sequence stays what it was."""
    rng = random.Random(seed)
    rows = []
    for length in batch.lengths.tolist():
        cuts = sorted(rng.sample(range(1, length), min(rng.randint(0, 2), max(0, length - 1))))
        rows.append([end - start for start, end in zip([0, *cuts], [*cuts, length], strict=True)])
    lengths = torch.tensor([n for of_sample in rows for n in of_sample], dtype=torch.int64)
    return replace(batch, lengths=lengths, rows=torch.tensor([len(of_sample) for of_sample in rows]))


def packed_in_rows(lengths: list[int], seed: int) -> Packed:
    return Packed(cut_into_rows(random_packed(lengths, seed).batch, seed))


lengths_of_samples = st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=6)
packs = st.builds(random_packed, lengths_of_samples, st.integers(0, 10**6)) | st.builds(
    packed_in_rows, lengths_of_samples, st.integers(0, 10**6)
)


def ratio(new: float, old: float) -> float:
    return math.exp(min(max(new - old, -LIMIT), LIMIT))


def ppo_token(new: float, old: float, a: float, low: float = 0.2, high: float = 0.2, c: float | None = 3.0) -> float:
    r = ratio(new, old)
    loss = max(-a * r, -a * min(max(r, 1 - low), 1 + high))
    return min(loss, -c * a) if c is not None and a < 0 else loss


def policy_sequence(
    name: str,
    new: list[float],
    old: list[float],
    advantages: list[float],
    *,
    selected: list[float] | None = None,
    constant: list[float] | None = None,
    **hyperparameters,
) -> list[float]:
    """The token losses of one sequence, its trainable tokens only; `constant`: l where the formula has sg(l)."""
    still = new if constant is None else constant
    n = len(new)
    if name in ("gmpo", "geo_mean"):
        return [
            gmpo_sequence(
                new, old, advantages, hyperparameters.get("clip_low", 0.4), hyperparameters.get("clip_high", 0.4)
            )
        ] * n
    out = []
    for t in range(n):
        x, o, a, s = new[t], old[t], advantages[t], still[t]
        if name in ("ppo", "vanilla", "grpo", "clip_cov"):
            c = None if name == "clip_cov" else hyperparameters.get("clip_c", 3.0)
            loss = ppo_token(x, o, a, hyperparameters.get("clip_low", 0.2), hyperparameters.get("clip_high", 0.2), c)
            out.append(0.0 if name == "clip_cov" and selected[t] else loss)
        elif name in ("reinforce", "gpg"):
            out.append(-a * x)
        elif name == "gspo":
            mean = sum(i - j for i, j in zip(still, old, strict=True)) / n
            r = math.exp(min(x - s + mean, 10.0))
            low, high = 1 - hyperparameters.get("clip_low", 3e-4), 1 + hyperparameters.get("clip_high", 4e-4)
            out.append(max(-a * r, -a * min(max(r, low), high)))
        elif name == "cispo":
            low, high = 1 - hyperparameters.get("clip_low", 0.2), 1 + hyperparameters.get("clip_high", 0.2)
            out.append(-min(max(ratio(s, o), low), high) * a * x)
        elif name == "sapo":
            tau = hyperparameters.get("tau_pos", 1.0) if a > 0 else hyperparameters.get("tau_neg", 1.05)
            z = tau * (ratio(x, o) - 1)
            out.append(-a * (1 / (1 + math.exp(-z)) if z > -700 else 0.0) * 4 / tau)
        elif name in ("dppo_tv", "dppo_kl"):
            weight = min(ratio(s, o), hyperparameters.get("dppo_ratio_cap", 20.0))
            out.append(-a * weight * x * dppo_inside(name, s, o, a, hyperparameters))
        elif name == "dro":
            out.append(-(x * a - hyperparameters["beta"] / 2 * (x - o) ** 2))
        elif name == "kl_cov":
            pull = hyperparameters.get("ppo_kl_coef", 0.1) * abs(x - o) if selected[t] else 0.0
            out.append(-a * ratio(x, o) + pull)
    return out


def gmpo_sequence(new: list[float], old: list[float], advantages: list[float], low: float, high: float) -> float:
    if not new:
        return 0.0
    mean = sum(advantages) / len(advantages)
    if mean > 0:
        moved = [min(x - o, min(max(x - o, -low), high)) for x, o in zip(new, old, strict=True)]
    else:
        moved = [max(x - o, min(max(x - o, -low), high)) for x, o in zip(new, old, strict=True)]
    return -mean * math.exp(min(max(sum(moved) / len(moved), -LIMIT), LIMIT)) if mean else 0.0


def dppo_inside(name: str, new: float, old: float, a: float, hyperparameters: dict) -> bool:
    p, p_old = math.exp(min(new, 0.0)), math.exp(min(old, 0.0))
    if name == "dppo_tv":
        return (
            p - p_old <= hyperparameters.get("clip_high", 0.15)
            if a > 0
            else p - p_old >= -hyperparameters.get("clip_low", 0.15)
        )
    k = p_old * (old - new) + (1 - p_old) * math.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    if a > 0:
        return k <= hyperparameters.get("clip_high", 0.05) or p <= p_old
    return k <= hyperparameters.get("clip_low", 0.05) or p >= p_old


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
