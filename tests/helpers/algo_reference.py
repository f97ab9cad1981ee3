"""Slow and obvious: every formula per sequence and per token, in plain Python numbers."""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megarl.samples.batch import Batch

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


Token = tuple[float, dict[str, bool]]  # the loss, and its statistics


@dataclass(frozen=True)
class LossReference:
    """A policy loss, slowly: the token losses of one sequence and their statistics, from its trainable tokens only.

    `tokens`: f(new, old, advantages, *, still, selected, hyperparameters); `still` is l where the formula has sg(l).
    """

    tokens: Callable[..., list[Token]]
    settings: tuple[dict[str, Any], ...] = ({},)  # hyperparameters to compare with
    has_stop_gradient: bool = False  # its gradient is not that of its value


def of_tokens(one: Callable[..., Token]) -> Callable[..., list[Token]]:
    """A loss of each token by itself: one(l, l_old, A, sg(l), is selected, hyperparameters)."""

    def tokens(new, old, advantages, *, still, selected, **how) -> list[Token]:
        return [one(*columns, **how) for columns in zip(new, old, advantages, still, selected, strict=True)]

    return tokens


def surrogate(r: float, a: float, low: float, high: float) -> Token:
    plain, clipped = -a * r, -a * min(max(r, 1 - low), 1 + high)
    return max(plain, clipped), {"pg_clipfrac": clipped > plain}


def ppo(new, old, a, still, selected, clip_low=0.2, clip_high=0.2, clip_c: float | None = 3.0) -> Token:
    loss, info = surrogate(ratio(new, old), a, clip_low, clip_high)
    if clip_c is None:
        return loss, info
    bounded = a < 0 and ratio(new, old) > clip_c
    return min(loss, -clip_c * a) if a < 0 else loss, info | {"pg_clipfrac_lower": bounded}


def reinforce(new, old, a, still, selected) -> Token:
    return -a * new, {}


def cispo(new, old, a, still, selected, clip_low=0.2, clip_high=0.2) -> Token:
    r = ratio(still, old)
    return -min(max(r, 1 - clip_low), 1 + clip_high) * a * new, {"pg_clipfrac": not 1 - clip_low <= r <= 1 + clip_high}


def sapo(new, old, a, still, selected, tau_pos=1.0, tau_neg=1.05) -> Token:
    tau = tau_pos if a > 0 else tau_neg
    z = tau * (ratio(new, old) - 1)
    return -a * (1 / (1 + math.exp(-z)) if z > -700 else 0.0) * 4 / tau, {}


def trusted(new: float, old: float, a: float, still: float, cap: float, *, inside: bool) -> Token:
    return -a * min(ratio(still, old), cap) * new * inside, {"pg_clipfrac": not inside and a != 0}


def dppo_tv(new, old, a, still, selected, clip_low=0.15, clip_high=0.15, dppo_ratio_cap=20.0) -> Token:
    moved = math.exp(min(still, 0.0)) - math.exp(min(old, 0.0))
    inside = moved <= clip_high if a > 0 else moved >= -clip_low
    return trusted(new, old, a, still, dppo_ratio_cap, inside=inside)


def dppo_kl(new, old, a, still, selected, clip_low=0.05, clip_high=0.05, dppo_ratio_cap=20.0) -> Token:
    p, p_old = math.exp(min(still, 0.0)), math.exp(min(old, 0.0))
    k = p_old * (old - still) + (1 - p_old) * math.log((1 - p_old + 1e-8) / (1 - p + 1e-8))
    inside = k <= clip_high or p <= p_old if a > 0 else k <= clip_low or p >= p_old
    return trusted(new, old, a, still, dppo_ratio_cap, inside=inside)


def dro(new, old, a, still, selected, beta) -> Token:
    return -(new * a - beta / 2 * (new - old) ** 2), {}


def clip_cov(new, old, a, still, selected, clip_low=0.2, clip_high=0.2) -> Token:
    loss, info = surrogate(ratio(new, old), a, clip_low, clip_high)
    chosen = bool(selected)
    return 0.0 if chosen else loss, {"pg_clipfrac": info["pg_clipfrac"] and not chosen, "cov_selected": chosen}


def kl_cov(new, old, a, still, selected, ppo_kl_coef=0.1) -> Token:
    return -a * ratio(new, old) + (ppo_kl_coef * abs(new - old) if selected else 0.0), {"cov_selected": bool(selected)}


def gspo(new, old, advantages, *, still, selected, clip_low=3e-4, clip_high=4e-4) -> list[Token]:
    if not new:
        return []
    mean = sum(x - o for x, o in zip(still, old, strict=True)) / len(new)
    ratios = [math.exp(min(x - s + mean, 10.0)) for x, s in zip(new, still, strict=True)]
    return [surrogate(r, a, clip_low, clip_high) for r, a in zip(ratios, advantages, strict=True)]


def gmpo(new, old, advantages, *, still, selected, clip_low=0.4, clip_high=0.4) -> list[Token]:
    if not new:
        return []
    mean = sum(advantages) / len(advantages)
    pick = min if mean > 0 else max
    moved = [x - o for x, o in zip(new, old, strict=True)]
    kept = [pick(d, min(max(d, -clip_low), clip_high)) for d in moved]
    loss = -mean * math.exp(min(max(sum(kept) / len(kept), -LIMIT), LIMIT)) if mean else 0.0
    return [(loss, {"pg_clipfrac": bool(mean) and k != d}) for k, d in zip(kept, moved, strict=True)]


# By the first of a loss's names; each built-in loss needs an entry.
POLICY_LOSSES = {
    "ppo": LossReference(of_tokens(ppo), ({}, {"clip_low": 0.1, "clip_high": 0.4, "clip_c": 1.3}, {"clip_c": None})),
    "reinforce": LossReference(of_tokens(reinforce)),
    "gpg": LossReference(of_tokens(reinforce)),
    "gspo": LossReference(gspo, ({}, {"clip_low": 0.3, "clip_high": 0.3}), has_stop_gradient=True),
    "gmpo": LossReference(gmpo, ({}, {"clip_low": 0.1, "clip_high": 2.0})),
    "cispo": LossReference(of_tokens(cispo), ({}, {"clip_low": 1.0}), has_stop_gradient=True),
    "sapo": LossReference(of_tokens(sapo), ({}, {"tau_pos": 3.0, "tau_neg": 0.5})),
    "dppo_tv": LossReference(
        of_tokens(dppo_tv), ({}, {"clip_low": 0.02, "clip_high": 0.01, "dppo_ratio_cap": 1.1}), has_stop_gradient=True
    ),
    "dppo_kl": LossReference(of_tokens(dppo_kl), ({}, {"clip_low": 0.001, "clip_high": 0.002}), has_stop_gradient=True),
    "dro": LossReference(of_tokens(dro), ({"beta": 0.5},)),
    "clip_cov": LossReference(of_tokens(clip_cov), ({}, {"clip_low": 0.1})),
    "kl_cov": LossReference(of_tokens(kl_cov), ({"ppo_kl_coef": 0.7},)),
}


def first_names(table: Mapping[str, object]) -> list[str]:
    """The names of a table of choices without aliases: of equal entries, the first."""
    return [name for i, (name, entry) in enumerate(table.items()) if entry not in list(table.values())[:i]]


def missing(table: Mapping[str, object], references: Mapping[str, object]) -> str:
    """What a table of choices has and no reference, or the other way round; empty where they agree."""
    names = first_names(table)
    lacking = [f"reference missing: {name}" for name in names if name not in references]
    return ", ".join(lacking + [f"no longer built in: {name}" for name in references if name not in names])


def policy_tokens(
    name: str,
    new: list[float],
    old: list[float],
    advantages: list[float],
    *,
    selected: list[float] | None = None,
    constant: list[float] | None = None,
    **hyperparameters: Any,
) -> list[Token]:
    """Of one sequence, its trainable tokens only; `constant`: l where the formula has sg(l)."""
    still = new if constant is None else constant
    chosen = [0.0] * len(new) if selected is None else selected
    return POLICY_LOSSES[name].tokens(new, old, advantages, still=still, selected=chosen, **hyperparameters)


def value_token(value: float, old: float, target: float, cliprange: float | None) -> float:
    """The critic's loss."""
    near = value if cliprange is None else old + min(max(value - old, -cliprange), cliprange)
    return max((value - target) ** 2, (near - target) ** 2) / 2


def k3(x: float) -> float:
    start = 2.610868638149876
    return math.exp(-x) + x - 1 if -x <= start else 10 + (10 + start) * (-x - start)


# Of x = l - l_ref, by the first of an estimator's names.
KL_ESTIMATORS: dict[str, Callable[[float], float]] = {
    "kl": lambda x: x,
    "mse": lambda x: x * x / 2,
    "low_var_kl": k3,
    "low_var_kl_clamped": lambda x: 10.0 if -x > 2.610868638149876 else math.exp(-x) + x - 1,
    "abs": abs,
}


@dataclass(frozen=True)
class Counts:
    """What an aggregation looks at: of the token's sequence, of its prompt group, and of the step."""

    own: int  # trainable tokens of the sequence
    of_group: int
    tokens: int
    sequences: int  # with a trainable token
    groups: int  # with a trainable token
    scale: float  # loss_scale_factor


# The weight of a trainable token, by the first of an aggregation's names.
AGG_MODES: dict[str, Callable[[Counts], float]] = {
    "token-mean": lambda c: 1 / c.tokens,
    "token-sum": lambda c: 1.0,
    "seq-mean-token-sum": lambda c: 1 / c.sequences,
    "seq-mean-token-mean": lambda c: 1 / (c.sequences * c.own),
    "seq-mean-token-sum-norm": lambda c: 1 / (c.sequences * c.scale),
    "token-sum-norm": lambda c: 1 / c.scale,
    "prompt-mean-token-mean": lambda c: 1 / (c.groups * c.of_group),
}


def weights(mode: str, masks: list[list[bool]], groups: list[int], scale: float) -> list[float]:
    """The weight of every token of the step, flat."""
    n = [sum(m) for m in masks]
    of_group = {g: sum(k for h, k in zip(groups, n, strict=True) if h == g) for g in groups}
    live = (sum(k > 0 for k in n), sum(k > 0 for k in of_group.values()))
    out = []
    for b, mask in enumerate(masks):
        counts = Counts(n[b], of_group[groups[b]], sum(n), *live, scale)
        out += [AGG_MODES[mode](counts) if m else 0.0 for m in mask]
    return out
