"""Statistics of a whole batch, and the final values of the statistics that the losses return.

The names are those of common PPO frameworks.  Everything is computed over whole samples on the CPU; "over tokens" means
over trainable tokens.  batch.py merges Stats; algo defines what a loss measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.samples.batch import Batch, Stats
from megarl.samples.sample import AUDIT_ERROR, OF_AGENTS, REWARD_ERROR, Sample
from megarl.samples.token_age import by_age, token_ages


def batch_stats(batch: Batch, *, version: int | None = None) -> dict[str, float]:
    """Statistics of a scored batch; statistics without their input are left out.

    Args: batch: column response_mask and any of token_level_rewards, advantages, returns, values, versions; per
        sequence score, truncated, version_min.  version: of the weights that will be trained.
    Returns: critic/{score,rewards,advantages,returns,values}/*, response_length/*, prompt_length/*,
        off_policy/version_lag/*, off_policy/token_age/*; rows/* if a sample has several.
    """
    mask = batch.columns["response_mask"] != 0
    out = _spread("critic/score", batch.per_sequence["score"]) if "score" in batch.per_sequence else {}
    if "token_level_rewards" in batch.columns:
        out |= _spread("critic/rewards", _sum_per_sequence(batch, batch.columns["token_level_rewards"], mask))
    for name in ("advantages", "returns", "values"):
        if name in batch.columns:
            out |= _spread(f"critic/{name}", batch.columns[name][mask], std=True)
    out |= _lengths(batch, mask)
    if version is not None and "version_min" in batch.per_sequence:
        lag = _spread("off_policy/version_lag", version - batch.per_sequence["version_min"])
        out |= {name: value for name, value in lag.items() if not name.endswith("/min")}
    if version is not None and "versions" in batch.columns:
        out |= _ages(token_ages(batch.columns["versions"], version), mask)
    return out


def reward_stats(groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """reward/NAME: the mean of each extra number of the rewards, over the samples that have it.

    reward/reward_error is the share of all samples on which a reward or an episode failed and was counted as 0, and
    reward/audit_error of those on which the audit failed, if there are any.  The numbers of episodes are agent/NAME; of
    their turns also the maximum.
    """
    found: dict[str, list[float]] = {}
    for sample in (sample for group in groups for sample in group):
        for name, number in sample.reward_extra.items():
            found.setdefault(name, []).append(number)
    means = {name: sum(numbers) / len(numbers) for name, numbers in found.items()}
    out = {name if name.startswith(OF_AGENTS) else f"reward/{name}": mean for name, mean in means.items()}
    if turns := found.get(f"{OF_AGENTS}turns"):
        out |= {f"{OF_AGENTS}turns/mean": out.pop(f"{OF_AGENTS}turns"), f"{OF_AGENTS}turns/max": max(turns)}
    for name in {REWARD_ERROR, AUDIT_ERROR} & found.keys():
        out[f"reward/{name}"] = len(found[name]) / sum(len(group) for group in groups)
    return out


def finalise(stats: Stats) -> dict[str, float]:
    """Merged statistics as plain numbers.

    A name "x~part" is a part of x, which is computed after the last merge: see DERIVED.
    Raises: ValueError for a set of parts that is not in DERIVED.
    """
    out: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for name, stat in stats.items():
        base, tilde, part = name.partition("~")
        if tilde:
            parts.setdefault(base, {})[part] = stat.result()
        else:
            out[name] = stat.result()
    for base, found in parts.items():
        if frozenset(found) not in DERIVED:
            known = "; ".join(", ".join(sorted(names)) for names in DERIVED)
            raise ValueError(f"statistic {base} came in the parts {', '.join(sorted(found))}: expected one of {known}")
        out[base] = DERIVED[frozenset(found)](found)
    return out


def _std(parts: Mapping[str, float]) -> float:
    """sqrt(E x^2 - (E x)^2)"""
    return math.sqrt(_variance(parts["mean"], parts["square"]))


def _explained_variance(parts: Mapping[str, float]) -> float:
    """1 - Var(target - prediction) / Var(target); 0 for a constant target."""
    target = _variance(parts["target_mean"], parts["target_square"])
    error = _variance(parts["error_mean"], parts["error_square"])
    return 1 - error / target if target > 1e-12 * max(parts["target_square"], 1e-12) else 0.0


DERIVED: dict[frozenset[str], Callable[[Mapping[str, float]], float]] = {
    frozenset({"mean", "square"}): _std,
    frozenset({"error_mean", "error_square", "target_mean", "target_square"}): _explained_variance,
}


def _variance(mean: float, square: float) -> float:
    return max(square - mean * mean, 0.0)


def _spread(name: str, values: Tensor, *, std: bool = False) -> dict[str, float]:
    """mean, max, min and, if wanted, the (population) std; {} without values."""
    if values.numel() == 0:
        return {}
    wide = values.double()
    numbers = {"mean": wide.mean(), "max": wide.max(), "min": wide.min()}
    if std:
        numbers["std"] = wide.std(correction=0)
    return {f"{name}/{key}": number.item() for key, number in numbers.items()}


def _lengths(batch: Batch, mask: Tensor) -> dict[str, float]:
    """Prompt and response lengths of samples, and how many rows they have.

    A response starts at the first trainable token of a row and includes tool output; those of a sample's rows add up.
    The prompt is what its first row begins with.
    """
    context = batch.context_lengths(mask)
    out = _spread("prompt_length", context[batch.rows.cumsum(0) - batch.rows])
    out |= _spread("response_length", batch.sum_rows(batch.lengths - context))
    if (batch.rows > 1).any():
        out |= _spread("rows", batch.rows)
    if "truncated" in batch.per_sequence:
        out["response_length/clip_ratio"] = batch.per_sequence["truncated"].double().mean().item()
    return out


def _ages(ages: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, median, 99th percentile and maximum of the tokens' ages [N], and the share of each bucket of ages.

    {} if the weights in training generated all tokens.
    """
    parts = by_age(ages, mask)
    if not parts:
        return {}
    found = ages[mask].numpy()
    median, p99 = np.quantile(found, (0.5, 0.99), method="inverted_cdf")  # ages that occur, nothing between them
    out = {"mean": found.mean(), "p50": median, "p99": p99, "max": found.max()}
    out |= {f"share/{name}": float(part.sum()) / len(found) for name, part in parts.items()}
    return {f"off_policy/token_age/{name}": float(value) for name, value in out.items()}


def _sum_per_sequence(batch: Batch, column: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, column, 0.0)
    return torch.zeros(batch.num_sequences, dtype=kept.dtype).index_add(0, batch.segment_ids, kept)
