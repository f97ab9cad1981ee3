"""Rollout correction: corrects the difference between the server's log-probs and those of the policy in training.

From d = l_old - l_roll of every trainable token it computes an importance weight per token (`rollout_weight`), rejects
tokens or sequences from the step (`keep`), and always reports statistics of the gap.
The weight is a column; step_columns.py normalises it over an optimizer step and applies it to the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algo.finite import require_finite
from megarl.algo.segments import clean, segment_count, segment_mean, segment_sum
from megarl.samples.batch import Batch, Stat, Stats
from megarl.samples.token_age import by_age, token_ages

LIMIT = 20.0  # of every exponent
LEVELS = ("token", "sequence", "geometric")
REJECT_BY = ("ratio", "k1", "k2", "k3")
REJECT_LEVELS = ("token", "sequence")


@dataclass(frozen=True)
class Correction:
    """The settings of algorithm.rollout_correction; by default the gap is only measured, not corrected.

    Examples: TIS: Correction("token", truncate=2.0); IcePop: Correction("token", None, 0.5, 5.0); reject sequences
    whose policy moved too far: Correction(reject_by="k3", reject_level="sequence", reject_high=0.01).
    """

    level: str | None = None  # of the weight: token | sequence | geometric; None: no weight
    truncate: float | None = 2.0  # upper bound of w
    mask_low: float | None = None  # w = 0 below this
    mask_high: float | None = None  # w = 0 above this
    normalize: bool = False  # scale w to mean 1 over an optimizer step, after truncation and masking
    reject_by: str | None = None  # ratio | k1 | k2 | k3; None: nothing is rejected
    reject_level: str = "token"  # token | sequence
    reject_low: float | None = None
    reject_high: float | None = None
    bypass: bool = False  # l_old := l_roll in the loss, so that the loss's own ratio corrects

    def __post_init__(self) -> None:
        """Raises: ValueError for an invalid combination of settings."""
        if self.level is not None:
            self._require("level", self.level in LEVELS, f"expected null or one of {', '.join(LEVELS)}")
        if self.reject_by is not None:
            self._require("reject_by", self.reject_by in REJECT_BY, f"expected null or one of {', '.join(REJECT_BY)}")
        self._require("reject_level", self.reject_level in REJECT_LEVELS, f"expected one of {', '.join(REJECT_LEVELS)}")
        self._check_weight()
        self._check_rejection()

    def _check_weight(self) -> None:
        for name in ("mask_low", "mask_high", "normalize"):
            idle = self.level is None and getattr(self, name) not in (None, False)
            self._require(name, not idle, f"has no effect without a level, one of {', '.join(LEVELS)}")
        if self.truncate is not None:
            self._require("truncate", self.truncate >= 1, "expected null or a number of at least 1")
        low, high = self.mask_low, self.mask_high
        if low is None and high is None:
            return
        self._require("mask_low", low is not None, "mask_high is set and needs its other bound (0 for none)")
        self._require("mask_high", high is not None, "mask_low is set and needs its other bound (.inf for none)")
        assert low is not None and high is not None, "just required"
        self._require("mask_low", 0 <= low <= 1, "expected a number from 0 to 1, the ratio where both policies agree")
        self._require("mask_high", high >= 1, "expected a number of at least 1, the ratio where both policies agree")
        masked = f"a weight is cut by mask_low={low}, mask_high={high} or truncated, set one of them to null"
        self._require("truncate", self.truncate is None, masked)

    def _check_rejection(self) -> None:
        low, high = self.reject_low, self.reject_high
        if self.reject_by is None:
            for name in ("reject_low", "reject_high"):
                idle = getattr(self, name) is not None
                self._require(name, not idle, f"has no effect without reject_by, one of {', '.join(REJECT_BY)}")
            self._require("reject_level", self.reject_level == "token", "has no effect without reject_by")
            return
        self._require("reject_by", low is not None or high is not None, "needs reject_low, reject_high or both")
        agree = 1 if self.reject_by == "ratio" else 0
        why = f"the {self.reject_by} where both policies agree"
        if high is not None:
            self._require("reject_high", high >= agree, f"expected a number of at least {agree}, {why}")
        if low is not None:
            signed = self.reject_by in ("ratio", "k1")
            self._require("reject_low", signed, f"{self.reject_by} has only an upper bound, set it to null")
            self._require("reject_low", low <= agree, f"expected a number of at most {agree}, {why}")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ValueError(f"algorithm.rollout_correction.{name}={getattr(self, name)}: {wanted}")


def correct(batch: Batch, how: Correction, *, version: int | None = None) -> tuple[Batch, Stats]:
    """Add `keep`, and with a level `rollout_weight`, to the batch; measure the gap with any settings.

    rho = exp(clamp(x, -20, 20)):  token x_t = d_t;  sequence x = sum_b m d;  geometric x = mean_b d
    w = min(rho, truncate)   or   rho where mask_low <= rho <= mask_high, else 0
    keep *= reject_low <= s <= reject_high,   s = rho, k1 = -d, k2 = d^2 / 2 or k3 = exp(d) - d - 1 of the token, or of
    the sequence: its rho, or the mean of its tokens' k

    A token with weight 0 still counts in every denominator; a rejected token counts in none, nor does one that
    `leave_out_old` took out before.  The rho of a sequence is over all tokens that were sampled, whatever is rejected.
    Without a weight and a rejection the batch stays as it is, so that it may be measured after it was trained on.
    Papers: truncation, Ionides 2008, doi:10.1198/106186008X320456; masking, IcePop, arXiv:2510.18855.

    Args: batch: columns response_mask, old_log_probs, rollout_log_probs, and keep if tokens are rejected already.
        version: of the weights in training, for statistics by age from the column versions.
    Returns: the batch, with w = 0 at masked places and not normalised; statistics rollout_corr/*.
    Raises: ValueError for a missing column; NonFiniteError for a log-prob that is not finite.
    """
    mask = batch.columns["response_mask"] != 0
    segment_ids = batch.segment_ids
    num = batch.num_sequences
    gap = _gap(batch, mask)
    keep = batch.columns["keep"] != 0 if "keep" in batch.columns else torch.ones_like(mask)
    stats = gap_stats(gap, mask, segment_ids, num) | probability_stats(batch, mask)
    live = mask & keep
    stays = _stays(gap, mask, segment_ids, num, how)
    cut = torch.zeros_like(mask)
    columns = {"keep": (keep & stays).float()}
    if how.level is not None:
        rho = _ratio(how.level, gap, mask, segment_ids, num)
        weight = _cut(rho, how)
        cut = weight != rho
        columns["rollout_weight"] = clean(weight, mask).float()
    total = float(live.sum())
    stats["rollout_corr/share_cut"] = Stat("mean", float((live & cut).sum()), total)
    stats["rollout_corr/share_rejected"] = Stat("mean", float((live & ~stays).sum()), total)
    stats["rollout_corr/is_on"] = Stat("max", float(how.level is not None or how.reject_by is not None or how.bypass))
    if version is not None:
        for age, inside in by_age(token_ages(batch.columns["versions"], version), mask).items():
            stats |= {f"{name}/{age}": stat for name, stat in _stats_of_age(gap, inside, live, cut, how).items()}
    return batch.with_columns(**columns), stats


def leave_out_old(batch: Batch, *, version: int, max_age: int | None) -> tuple[Batch, Stats]:
    """Take the tokens that weights of before `version` - max_age generated out of `keep`; max_age None: none of them.

    They are taken out of the loss, and nothing else is: a sample whose first tokens are too old still teaches its
    last ones and counts in its group.  To drop samples by age would drop the longest answers.

    Args: batch: columns response_mask and versions, and keep if tokens are rejected already.
    """
    if max_age is None:
        return batch, {}
    mask = batch.columns["response_mask"] != 0
    keep = batch.columns["keep"] != 0 if "keep" in batch.columns else torch.ones_like(mask)
    old, live = token_ages(batch.columns["versions"], version) > max_age, mask & keep
    share = Stat("mean", float((live & old).sum()), float(live.sum()))
    return batch.with_columns(keep=(keep & ~old).float()), {"rollout_corr/share_too_old": share}


def gap_stats(gap: Tensor, mask: Tensor, segment_ids: Tensor, num_sequences: int) -> Stats:
    """The difference between the trainer's log-probs and the server's, d = l_old - l_roll; 0 is perfect.

    log_prob_gap_mean, _max: of |d|; kl: mean of -d; k3_kl: mean of exp(d) - d - 1; ppl_ratio: mean over sequences of
    exp(mean of -d), the trainer's perplexity over the server's; ess: (sum w)^2 / (n sum w^2), w = exp(d), the effective
    sample size as a share of the tokens.  {} without a trainable token.

    Args: gap [N] float64, 0 at masked places; mask [N] bool; segment_ids [N].
    """
    n = float(mask.sum())
    if n == 0:
        return {}
    d = gap.clamp(-LIMIT, LIMIT)
    trainable = segment_count(mask, segment_ids, num_sequences) > 0
    ppl_ratio_B = (-segment_mean(d, mask, segment_ids, num_sequences)).exp()[trainable]
    stats = {
        "log_prob_gap_mean": Stat("mean", float(gap.abs().sum()), n),
        "log_prob_gap_max": Stat("max", float(gap.abs().max())),
        "kl": Stat("mean", -float(gap.sum()), n),
        "k3_kl": Stat("mean", float((d.expm1() - d).sum()), n),
        "ppl_ratio": Stat("mean", float(ppl_ratio_B.sum()), float(len(ppl_ratio_B))),
        "ess": _ess(d, mask),
    }
    return {f"rollout_corr/{name}": stat for name, stat in stats.items()}


def probability_stats(batch: Batch, mask: Tensor) -> Stats:
    """The same difference in probabilities, under verl's names: |p_old - p_roll|, and how the two are correlated.

    {} without a trainable token; no std or correlation of a single one, or of constants.
    """
    old, rollout = (batch.columns[name][mask].double().exp() for name in ("old_log_probs", "rollout_log_probs"))
    if not len(old):
        return {}
    apart = (old - rollout).abs()
    stats = {
        "rollout_probs_diff_mean": Stat("mean", float(apart.sum()), float(len(apart))),
        "rollout_probs_diff_max": Stat("max", float(apart.max())),
    }
    if len(old) > 1:
        stats["rollout_probs_diff_std"] = Stat("mean", float(apart.std()))
    if all(bool(each.min() < each.max()) for each in (old, rollout)):
        correlation = float(torch.corrcoef(torch.stack([old, rollout]))[0, 1])
        stats["rollout_actor_probs_pearson_corr"] = Stat("mean", correlation)
    return {f"training/{name}": stat for name, stat in stats.items()}


def _ess(d: Tensor, mask: Tensor) -> Stat:
    """Of the unmasked tokens, at least one; d: the clamped gap [N]."""
    w = torch.where(mask, d.exp(), 0.0)
    return Stat("mean", float(w.sum().square() / (float(mask.sum()) * w.square().sum())))


def _stats_of_age(gap: Tensor, inside: Tensor, live: Tensor, cut: Tensor, how: Correction) -> Stats:
    """How far the policy moved since these tokens [N] were generated, and with a weight how many of these are cut."""
    stats = {
        "rollout_corr/ess": _ess(gap.clamp(-LIMIT, LIMIT), inside),
        "rollout_corr/log_prob_gap_mean": Stat("mean", float(gap[inside].abs().sum()), float(inside.sum())),
    }
    if how.level is not None:
        counted = inside & live
        stats["rollout_corr/share_cut"] = Stat("mean", float((counted & cut).sum()), float(counted.sum()))
    return stats


def _gap(batch: Batch, mask: Tensor) -> Tensor:
    """d [N] float64, 0 at masked places."""
    names = ("old_log_probs", "rollout_log_probs")
    for name in names:
        if name not in batch.columns:
            raise ValueError(f"algorithm.rollout_correction needs the column {name}, which this batch has not")
    require_finite({name: batch.columns[name] for name in names}, mask, batch.segment_ids)
    old, rollout = (clean(batch.columns[name].detach(), mask).double() for name in names)
    return old - rollout


def _ratio(level: str, gap: Tensor, mask: Tensor, segment_ids: Tensor, num_sequences: int) -> Tensor:
    """rho [N] of that level; for the sequence levels it is equal on all tokens of a sequence."""
    if level == "sequence":
        gap = segment_sum(gap, segment_ids, num_sequences)[segment_ids]
    elif level == "geometric":
        gap = segment_mean(gap, mask, segment_ids, num_sequences)[segment_ids]
    return gap.clamp(-LIMIT, LIMIT).exp()


def _cut(rho: Tensor, how: Correction) -> Tensor:
    """w [N]: truncated, masked, or rho itself."""
    if how.truncate is not None:
        return rho.clamp(max=how.truncate)
    if how.mask_low is None or how.mask_high is None:
        return rho
    return torch.where((how.mask_low <= rho) & (rho <= how.mask_high), rho, 0.0)


def _stays(gap: Tensor, mask: Tensor, segment_ids: Tensor, num_sequences: int, how: Correction) -> Tensor:
    """[N] bool: not rejected."""
    if how.reject_by is None:
        return torch.ones_like(mask)
    if how.reject_by == "ratio":
        score = _ratio(how.reject_level, gap, mask, segment_ids, num_sequences)
    else:
        d = gap.clamp(-LIMIT, LIMIT)
        score = {"k1": -d, "k2": 0.5 * d.square(), "k3": d.expm1() - d}[how.reject_by]
        if how.reject_level == "sequence":
            score = segment_mean(score, mask, segment_ids, num_sequences)[segment_ids]
    low = -math.inf if how.reject_low is None else how.reject_low
    high = math.inf if how.reject_high is None else how.reject_high
    return (low <= score) & (score <= high)
