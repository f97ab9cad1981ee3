"""Slow and obvious: advantages, correction and shaping, sample by sample in plain Python numbers.

Everywhere: rewards, masks and other columns are lists of one list per sample, groups and scores one number per sample.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def compared(groups: list[int], masks: Masks) -> Masks:
    """The trainable tokens of samples that have somebody to compare with."""
    together = {i for members in members_of(groups, masks) if len(members) > 1 for i in members}
    return [[m and i in together for m in mask] for i, mask in enumerate(masks)]


@dataclass(frozen=True)
class Data:
    """What an estimator may ask for besides rewards."""

    gamma: float
    lam: float
    by_std: bool
    values: Columns
    old: Columns
    squares: Columns
    greedy: list[float]  # this and what follows: per sample
    raw: list[float]
    parts: list[list[float]]
    part_weights: Sequence[float]


# (rewards, masks, groups, data) -> (advantages, returns)
Estimator = Callable[[Columns, Masks, list[int], Data], tuple[Columns, Columns]]


def returns_to_go(rewards: Columns, masks: Masks, gamma: float) -> Columns:
    return [to_go(r, m, gamma) for r, m in zip(rewards, masks, strict=True)]


def on_tokens(per_sample: list[float], masks: Masks) -> Columns:
    return [[x if m else 0.0 for m in mask] for x, mask in zip(per_sample, masks, strict=True)]


def gae(rewards: Columns, masks: Masks, groups: list[int], data: Data) -> tuple[Columns, Columns]:
    pairs = [gae_sequence(*x, data.gamma, data.lam) for x in zip(rewards, data.values, masks, strict=True)]
    return whiten_columns([a for a, _ in pairs], masks), [r for _, r in pairs]


def reinforce_plus_plus(rewards: Columns, masks: Masks, groups: list[int], data: Data) -> tuple[Columns, Columns]:
    returns = returns_to_go(rewards, masks, data.gamma)
    return whiten_columns(returns, masks), returns


def remax(rewards: Columns, masks: Masks, groups: list[int], data: Data) -> tuple[Columns, Columns]:
    returns, greedy = returns_to_go(rewards, masks, 1.0), on_tokens(data.greedy, masks)
    return [[g - b for g, b in zip(*rows, strict=True)] for rows in zip(returns, greedy, strict=True)], returns


def token_baseline(rewards: Columns, masks: Masks, groups: list[int], data: Data) -> tuple[Columns, Columns]:
    """Group by group, step by step."""
    returns, sums = [], []
    for i, mask in enumerate(masks):
        live = [t for t, m in enumerate(mask) if m]
        energies = [1 - 2 * math.exp(data.old[i][t]) + data.squares[i][t] for t in live]
        sums.append([sum(energies[: k + 1]) for k in range(len(live))])
        returns.append([to_go(rewards[i], mask, data.gamma)[t] for t in live])
    steps = [[0.0] * len(r) for r in returns]
    for members in members_of(groups, masks):
        for k in range(max((len(returns[i]) for i in members), default=0)):
            here = [i for i in members if len(returns[i]) > k]
            top, bottom = sum(returns[i][k] * sums[i][k] for i in here), sum(sums[i][k] for i in here)
            for i in here:
                baseline = top / (bottom + 1e-8) if len(here) > 1 else 0.0
                steps[i][k] = returns[i][k] - baseline if len(members) > 1 else 0.0
    advantages = [spread(row, mask) for row, mask in zip(steps, masks, strict=True)]
    return advantages, returns_to_go(rewards, masks, data.gamma)


def of_groups(rule_of: Callable[[Data], GroupRule], *, whitened: bool = False, scaled: bool = False) -> Estimator:
    """The samples of a prompt compared by a rule; `scaled`: by the share of samples whose group has a difference."""

    def estimator(rewards: Columns, masks: Masks, groups: list[int], data: Data) -> tuple[Columns, Columns]:
        scores = [sum(row) for row in rewards]
        per_sample = by_group(rule_of(data), scores, groups, masks)
        unequal = [m for m in members_of(groups, masks) if len({scores[i] for i in m}) > 1]
        if scaled and unequal:
            alpha = sum(any(mask) for mask in masks) / sum(map(len, unequal))
            per_sample = [alpha * a for a in per_sample]
        columns = on_tokens(per_sample, masks)
        return whiten_columns(columns, compared(groups, masks)) if whitened else columns, on_tokens(scores, masks)

    return estimator


def gdpo(rewards: Columns, masks: Masks, groups: list[int], data: Data) -> tuple[Columns, Columns]:
    scores = [sum(row) for row in rewards]
    per_sample = by_group(grpo_rule(False), [r - s for r, s in zip(scores, data.raw, strict=True)], groups, masks)
    for k, weight in enumerate(data.part_weights):
        part = by_group(grpo_rule(data.by_std), [p[k] for p in data.parts], groups, masks)
        per_sample = [a + weight * b for a, b in zip(per_sample, part, strict=True)]
    return whiten_columns(on_tokens(per_sample, masks), compared(groups, masks)), on_tokens(scores, masks)


# Each built-in estimator needs an entry.
ESTIMATORS: dict[str, Estimator] = {
    "none": lambda rewards, masks, groups, data: (on_tokens([0.0] * len(masks), masks),) * 2,
    "gae": gae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "optimal_token_baseline": token_baseline,
    "grpo": of_groups(lambda data: grpo_rule(data.by_std)),
    "grpo_passk": of_groups(lambda data: passk_rule(data.by_std)),
    "gdpo": gdpo,
    "rloo": of_groups(lambda data: rloo_rule),
    "opo": of_groups(lambda data: opo_rule),
    "gpg": of_groups(lambda data: grpo_rule(False), scaled=True),
    "reinforce_plus_plus_baseline": of_groups(lambda data: grpo_rule(False), whitened=True),
}


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
