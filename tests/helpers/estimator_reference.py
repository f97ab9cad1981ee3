"""Slow and obvious: advantages, correction and shaping, sample by sample in plain Python numbers.

Everywhere: rewards, masks and other columns are lists of one list per sample, groups and scores one number per sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Columns = list[list[float]]
Masks = list[list[bool]]


def steps_only(rewards: list[float], mask: list[bool]) -> list[float]:
    """The rewards of the trainable tokens; one on a masked token goes to the trainable one before it."""
    pending, out = 0.0, []
    for r, m in zip(reversed(rewards), reversed(mask), strict=True):
        pending += r
        if m:
            out.append(pending)
            pending = 0.0
    return out[::-1]


def spread(steps: list[float], mask: list[bool]) -> list[float]:
    """One number per trainable token, back among the masked ones, which get 0."""
    waiting = iter(steps)
    return [next(waiting) if m else 0.0 for m in mask]


def gae_sequence(
    rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    reward_steps, value_steps = steps_only(rewards, mask), [v for v, m in zip(values, mask, strict=True) if m]
    next_value = next_advantage = 0.0
    advantages, returns = [], []
    for r, v in zip(reversed(reward_steps), reversed(value_steps), strict=True):
        next_advantage = r + gamma * next_value - v + gamma * lam * next_advantage
        next_value = v
        advantages.append(next_advantage)
        returns.append(next_advantage + v)
    return spread(advantages[::-1], mask), spread(returns[::-1], mask)


def to_go(rewards: list[float], mask: list[bool], gamma: float) -> list[float]:
    steps, out, following = steps_only(rewards, mask), [], 0.0
    for r in reversed(steps):
        following = r + gamma * following
        out.append(following)
    return spread(out[::-1], mask)


def whiten(xs: list[float]) -> list[float]:
    if len(xs) < 2:
        return xs
    mean = sum(xs) / len(xs)
    var = sum((x - mean) ** 2 for x in xs) / (len(xs) - 1)
    return [(x - mean) / math.sqrt(var + 1e-8) for x in xs]


def whiten_columns(columns: Columns, masks: Masks) -> Columns:
    white = iter(
        whiten([x for row, mask in zip(columns, masks, strict=True) for x, m in zip(row, mask, strict=True) if m])
    )
    return [[next(white) if m else 0.0 for m in mask] for mask in masks]


def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs)


def std(xs: list[float]) -> float:
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


# One group at a time: (rewards of its samples, their numbers of trainable tokens) -> advantages.
GroupRule = Callable[[list[float], list[int]], list[float]]


def grpo_rule(by_std: bool) -> GroupRule:
    def rule(rs: list[float], ns: list[int]) -> list[float]:
        return [(r - mean(rs)) / (std(rs) + 1e-6 if by_std else 1.0) for r in rs]

    return rule


def passk_rule(by_std: bool) -> GroupRule:
    def rule(rs: list[float], ns: list[int]) -> list[float]:
        best, second = sorted(rs, reverse=True)[:2]
        out = [0.0] * len(rs)
        out[rs.index(best)] = (best - second) / (std(rs) + 1e-6 if by_std else 1.0)
        return out

    return rule


def rloo_rule(rs: list[float], ns: list[int]) -> list[float]:
    return [r - (sum(rs) - r) / (len(rs) - 1) for r in rs]


def opo_rule(rs: list[float], ns: list[int]) -> list[float]:
    baseline = sum(n * r for n, r in zip(ns, rs, strict=True)) / sum(ns)
    return [r - baseline for r in rs]


def members_of(groups: list[int], masks: Masks) -> list[list[int]]:
    """The samples of each group that have a trainable token."""
    return [[i for i, h in enumerate(groups) if h == g and any(masks[i])] for g in sorted(set(groups))]


def by_group(rule: GroupRule, scores: list[float], groups: list[int], masks: Masks) -> list[float]:
    """A rule, applied to every group of at least two; 0 for all others."""
    out = [0.0] * len(scores)
    for members in members_of(groups, masks):
        if len(members) > 1:
            values = rule([scores[i] for i in members], [sum(masks[i]) for i in members])
            for i, value in zip(members, values, strict=True):
                out[i] = value
    return out


def gpg_scale(scores: list[float], groups: list[int], masks: Masks) -> float:
    unequal = [m for m in members_of(groups, masks) if len({scores[i] for i in m}) > 1]
    return sum(any(mask) for mask in masks) / sum(map(len, unequal)) if unequal else 1.0


def compared(groups: list[int], masks: Masks) -> Masks:
    """The trainable tokens of samples that have somebody to compare with."""
    together = {i for members in members_of(groups, masks) if len(members) > 1 for i in members}
    return [[m and i in together for m in mask] for i, mask in enumerate(masks)]


def token_baseline(
    rewards: Columns, masks: Masks, groups: list[int], old: Columns, squares: Columns, gamma: float
) -> Columns:
    """Group by group, step by step."""
    out = []
    returns, sums = [], []
    for i, mask in enumerate(masks):
        live = [t for t, m in enumerate(mask) if m]
        energies = [1 - 2 * math.exp(old[i][t]) + squares[i][t] for t in live]
        sums.append([sum(energies[: k + 1]) for k in range(len(live))])
        returns.append([to_go(rewards[i], mask, gamma)[t] for t in live])
    steps = [[0.0] * len(r) for r in returns]
    for members in members_of(groups, masks):
        for k in range(max((len(returns[i]) for i in members), default=0)):
            here = [i for i in members if len(returns[i]) > k]
            top, bottom = sum(returns[i][k] * sums[i][k] for i in here), sum(sums[i][k] for i in here)
            for i in here:
                baseline = top / (bottom + 1e-8) if len(here) > 1 else 0.0
                steps[i][k] = returns[i][k] - baseline if len(members) > 1 else 0.0
    for row, mask in zip(steps, masks, strict=True):
        out.append(spread(row, mask))
    return out


def advantages(
    name: str, rewards: Columns, masks: Masks, groups: list[int], *, gamma: float, lam: float, by_std: bool, **data
) -> tuple[Columns, Columns]:
    """Any estimator.  data: values, old, squares [per token]; greedy, score, raw [per sample]; parts, part_weights."""
    scores = [sum(row) for row in rewards]
    returns = [[to_go(r, m, gamma if name != "remax" else 1.0), m] for r, m in zip(rewards, masks, strict=True)]
    G = [row for row, _ in returns]
    on_all = [[scores[i] if m else 0.0 for m in mask] for i, mask in enumerate(masks)]
    if name == "gae":
        pairs = [gae_sequence(*x, gamma, lam) for x in zip(rewards, data["values"], masks, strict=True)]
        return whiten_columns([a for a, _ in pairs], masks), [r for _, r in pairs]
    if name == "reinforce_plus_plus":
        return whiten_columns(G, masks), G
    if name == "remax":
        return [
            [g - data["greedy"][i] if m else 0.0 for g, m in zip(G[i], masks[i], strict=True)] for i in range(len(G))
        ], G
    if name == "optimal_token_baseline":
        return token_baseline(rewards, masks, groups, data["old"], data["squares"], gamma), G
    if name == "gdpo":
        extra = [r - s for r, s in zip(scores, data["raw"], strict=True)]
        per_sample = by_group(grpo_rule(False), extra, groups, masks)
        for k, weight in enumerate(data["part_weights"]):
            part = by_group(grpo_rule(by_std), [p[k] for p in data["parts"]], groups, masks)
            per_sample = [a + weight * b for a, b in zip(per_sample, part, strict=True)]
    else:
        rule = {
            "grpo": grpo_rule(by_std),
            "grpo_passk": passk_rule(by_std),
            "rloo": rloo_rule,
            "reinforce_plus_plus_baseline": grpo_rule(False),
            "opo": opo_rule,
            "gpg": grpo_rule(False),
        }[name]
        per_sample = by_group(rule, scores, groups, masks)
    if name == "gpg":
        per_sample = [gpg_scale(scores, groups, masks) * a for a in per_sample]
    columns = [[per_sample[i] if m else 0.0 for m in mask] for i, mask in enumerate(masks)]
    if name in ("gdpo", "reinforce_plus_plus_baseline"):
        columns = whiten_columns(columns, compared(groups, masks))
    return columns, on_all


def bounded_exp(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def ratios(level: str, gaps: Columns, masks: Masks) -> Columns:
    """rho of every trainable token, 0 at masked ones."""
    out = []
    for row, mask in zip(gaps, masks, strict=True):
        live = [d for d, m in zip(row, mask, strict=True) if m]
        whole = {"token": 0.0, "sequence": sum(live), "geometric": sum(live) / max(len(live), 1)}[level]
        out.append(
            [(bounded_exp(d if level == "token" else whole) if m else 0.0) for d, m in zip(row, mask, strict=True)]
        )
    return out


def cut(weight: float, truncate: float | None, low: float | None, high: float | None) -> float:
    if truncate is not None:
        return min(weight, truncate)
    if low is not None and high is not None:
        return weight if low <= weight <= high else 0.0
    return weight


def rejected(by: str, level: str, low: float | None, high: float | None, gaps: Columns, masks: Masks) -> Masks:
    """Which trainable tokens are taken out."""

    def k(d: float) -> float:
        d = min(max(d, -20.0), 20.0)
        return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[by]

    out = []
    for b, (row, mask) in enumerate(zip(gaps, masks, strict=True)):
        if by == "ratio":
            scores = ratios(level, gaps, masks)[b]
        else:
            scores = [k(d) if m else 0.0 for d, m in zip(row, mask, strict=True)]
            if level == "sequence":
                scores = [sum(scores) / max(sum(mask), 1)] * len(mask)
        out.append(
            [
                m and not ((low is None or s >= low) and (high is None or s <= high))
                for s, m in zip(scores, mask, strict=True)
            ]
        )
    return out
