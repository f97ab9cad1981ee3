"""What a curve looks like: pure functions of the last values of one metric or of several, oldest first.

Each says yes or no to a shape that advice.py gives a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev


def above(limit: float) -> Callable[..., bool]:
    """Every value is above the limit."""
    return lambda values: min(values) > limit


def often(share: float) -> Callable[..., bool]:
    """At least this share of the values is above 0."""
    return lambda values: sum(value > 0 for value in values) >= share * len(values)


def spikes(times: float, at_least: float, how_often: int = 1) -> Callable[..., bool]:
    """The last value, and `how_often` in all, are so many times the median size and at least so large."""

    def holds(values: Sequence[float]) -> bool:
        sizes = [abs(value) for value in values]
        limit = max(times * median(sizes), at_least)
        return sizes[-1] > limit and sum(size > limit for size in sizes) >= how_often

    return holds


def runs_away(to: float, times: float) -> Callable[..., bool]:
    """The values have grown, from the first fifth of the window to the last, so many times and beyond `to`."""

    def holds(values: Sequence[float]) -> bool:
        first, last = ends(values)
        return last > to and last > times * max(first, 0.0)

    return holds


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last fifth."""
    n = max(len(values) // 5, 1)
    return fmean(values[:n]), fmean(values[-n:])


def rise(values: Sequence[float]) -> tuple[float, float]:
    """How far the mean of the second half is above that of the first, and the standard error of that number."""
    middle = len(values) // 2
    first, second = values[:middle], values[middle:]
    error = math.sqrt(stdev(first) ** 2 / len(first) + stdev(second) ** 2 / len(second))
    return fmean(second) - fmean(first), error


def rises(values: Sequence[float], by: float = 0.0) -> bool:
    """By more than chance (three standard errors), and by more than `by`."""
    change, error = rise(values)
    return change > max(3 * error, by)


def falls(values: Sequence[float], by: float = 0.0) -> bool:
    """The same downwards."""
    return rises([-value for value in values], by)


def not_falling(values: Sequence[float]) -> bool:
    """The second half has at least nine tenths of the mean of the first."""
    middle = len(values) // 2
    return fmean(values[middle:]) >= 0.9 * fmean(values[:middle])


def solved(mean: Sequence[float], best: Sequence[float], worst: Sequence[float]) -> bool:
    """The mean score is near the top of the scores that were seen."""
    return ends(mean)[1] > min(worst) + 0.9 * (max(best) - min(worst))


def policy_loss_rises(loss: Sequence[float], spread: Sequence[float], score: Sequence[float]) -> bool:
    """A loss is as large as its advantages are, so it is measured by their spread; alone it says nothing."""
    return rises(loss, by=0.02 * fmean(spread)) and falls(score)


def drifts_against_advantages(
    loss: Sequence[float], level: Sequence[float], good: Sequence[float], bad: Sequence[float]
) -> bool:
    """In every step the ratio fell where A > 0 and rose where A < 0, and the loss says the same: it is above its level.

    -mean(A r) is its level, -mean(A), less both drifts.  The level follows the lengths of answers, nothing else.
    """
    return max(*good, *bad) < 0 and fmean(loss) > fmean(level)


def loss_contradicts_ratio(
    loss: Sequence[float], level: Sequence[float], good: Sequence[float], bad: Sequence[float]
) -> bool:
    """The same drift, and the loss says that it goes the other way."""
    return max(*good, *bad) < 0 and fmean(loss) < fmean(level)


def score_falls(score: Sequence[float], best: Sequence[float], worst: Sequence[float]) -> bool:
    """By a tenth of the range of the scores."""
    return falls(score, by=0.1 * (max(best) - min(worst)))


def ratio_explodes(mean: Sequence[float], std: Sequence[float]) -> bool:
    """The ratio varies by half, or is off 1 on average."""
    return min(std) > 0.5 or min(abs(value - 1) for value in mean) > 0.2


def entropy_collapses(
    entropy: Sequence[float], score: Sequence[float], best: Sequence[float], worst: Sequence[float]
) -> bool:
    """Falling entropy is how a policy learns; it is a fault where much is left to learn and nothing more is learnt."""
    first, last = ends(entropy)
    stuck = not rises(score[len(score) // 2 :]) and not solved(score, best, worst)
    return last < 0.2 * first and stuck


def entropy_explodes(entropy: Sequence[float]) -> bool:
    """Twice as large, and a nat more."""
    first, last = ends(entropy)
    return last > first + 1 and last > 2 * first


def nothing_moves(kl: Sequence[float], score: Sequence[float]) -> bool:
    """The policy is where it was, and so is the score."""
    return max(kl) < 1e-4 and not rises(score)


def value_loss_flat(loss: Sequence[float], explained: Sequence[float], spread: Sequence[float]) -> bool:
    """The values are hardly better or worse than a constant, and there is something to explain."""
    late = explained[len(explained) // 2 :]
    return not_falling(loss) and abs(fmean(late)) < 0.2 and min(spread) > 1e-4


def values_mislead(loss: Sequence[float], explained: Sequence[float], spread: Sequence[float]) -> bool:
    """The values are worse than a constant, and their error is more than all there ever was to explain."""
    return max(explained) < -0.5 and 2 * fmean(loss) > max(spread) ** 2


def gap_without_lag(gap: Sequence[float], lag: Sequence[float]) -> bool:
    """Log-probs differ though the weights are the newest."""
    return min(gap) > 0.05 and max(lag) == 0


def few_count(ess: Sequence[float], lag: Sequence[float]) -> bool:
    """Few tokens count though the weights are the newest."""
    return max(ess) < 0.7 and max(lag) == 0


def too_old(ess: Sequence[float], lag: Sequence[float]) -> bool:
    """Few tokens count, and the weights were old."""
    return max(ess) < 0.7 and min(lag) > 0


def all_equal(highest: Sequence[float], lowest: Sequence[float]) -> bool:
    """In every step the highest is the lowest."""
    return all(high == low for high, low in zip(highest, lowest, strict=True))


def away_from_0(by: float) -> Callable[..., bool]:
    """Every value is at least so far from 0, on either side."""
    return lambda values: min(abs(value) for value in values) > by
