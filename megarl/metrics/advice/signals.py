"""Patterns in metrics: pure functions of the last values of one or several metrics, oldest first.

Each returns whether the values have a certain shape; advice.py interprets it.
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
    """The last value, and `how_often` in total, are above `times` the median size and above `at_least`."""

    def holds(values: Sequence[float]) -> bool:
        sizes = [abs(value) for value in values]
        limit = max(times * median(sizes), at_least)
        return sizes[-1] > limit and sum(size > limit for size in sizes) >= how_often

    return holds


def runs_away(to: float, times: float) -> Callable[..., bool]:
    """From the first fifth of the window to the last, the values grew by the factor `times` and beyond `to`."""

    def holds(values: Sequence[float]) -> bool:
        first, last = ends(values)
        return last > to and last > times * max(first, 0.0)

    return holds


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and the last fifth."""
    n = max(len(values) // 5, 1)
    return fmean(values[:n]), fmean(values[-n:])


def rise(values: Sequence[float]) -> tuple[float, float]:
    """The mean of the second half minus the mean of the first, and the standard error of this difference."""
    middle = len(values) // 2
    first, second = values[:middle], values[middle:]
    error = math.sqrt(stdev(first) ** 2 / len(first) + stdev(second) ** 2 / len(second))
    return fmean(second) - fmean(first), error


def rises(values: Sequence[float], by: float = 0.0) -> bool:
    """The values rise by more than three standard errors and by more than `by`."""
    change, error = rise(values)
    return change > max(3 * error, by)


def falls(values: Sequence[float], by: float = 0.0) -> bool:
    """The values fall by more than three standard errors and by more than `by`."""
    return rises([-value for value in values], by)


def not_falling(values: Sequence[float]) -> bool:
    """The mean of the second half is at least 0.9 of the mean of the first."""
    middle = len(values) // 2
    return fmean(values[middle:]) >= 0.9 * fmean(values[:middle])


def solved(mean: Sequence[float], best: Sequence[float], worst: Sequence[float]) -> bool:
    """The mean score is close to the highest observed score."""
    return ends(mean)[1] > min(worst) + 0.9 * (max(best) - min(worst))


def policy_loss_rises(loss: Sequence[float], spread: Sequence[float], score: Sequence[float]) -> bool:
    """The loss rises, relative to the std of the advantages, which set its scale, and the score falls."""
    return rises(loss, by=0.02 * fmean(spread)) and falls(score)


def drifts_against_advantages(
    loss: Sequence[float], level: Sequence[float], good: Sequence[float], bad: Sequence[float]
) -> bool:
    """In every step the ratio fell where A > 0 and rose where A < 0, and the loss agrees: it is above its level.

    -mean(A r) is the level, -mean(A), minus both drifts.  The level depends only on the lengths of answers.
    """
    return max(*good, *bad) < 0 and fmean(loss) > fmean(level)


def loss_contradicts_ratio(
    loss: Sequence[float], level: Sequence[float], good: Sequence[float], bad: Sequence[float]
) -> bool:
    """The same drift, but the loss indicates the opposite."""
    return max(*good, *bad) < 0 and fmean(loss) < fmean(level)


def score_falls(score: Sequence[float], best: Sequence[float], worst: Sequence[float]) -> bool:
    """The score falls by more than a tenth of the range of scores."""
    return falls(score, by=0.1 * (max(best) - min(worst)))


def ratio_explodes(mean: Sequence[float], std: Sequence[float]) -> bool:
    """In every step the ratio's std is above 0.5, or its mean is more than 0.2 away from 1."""
    return min(std) > 0.5 or min(abs(value - 1) for value in mean) > 0.2


def entropy_collapses(
    entropy: Sequence[float], score: Sequence[float], best: Sequence[float], worst: Sequence[float]
) -> bool:
    """The entropy fell below a fifth, and the score does not rise any more although the task is not solved.

    Falling entropy alone is normal.
    """
    first, last = ends(entropy)
    stuck = not rises(score[len(score) // 2 :]) and not solved(score, best, worst)
    return last < 0.2 * first and stuck


def entropy_explodes(entropy: Sequence[float]) -> bool:
    """The entropy has doubled and is at least a nat higher."""
    first, last = ends(entropy)
    return last > first + 1 and last > 2 * first


def nothing_moves(kl: Sequence[float], score: Sequence[float]) -> bool:
    """Neither the policy nor the score changes."""
    return max(kl) < 1e-4 and not rises(score)


def value_loss_flat(loss: Sequence[float], explained: Sequence[float], spread: Sequence[float]) -> bool:
    """The values are about as good as a constant, and the returns are not constant."""
    late = explained[len(explained) // 2 :]
    return not_falling(loss) and abs(fmean(late)) < 0.2 and min(spread) > 1e-4


def values_mislead(loss: Sequence[float], explained: Sequence[float], spread: Sequence[float]) -> bool:
    """The values are worse than a constant, and their squared error is above the largest variance of the returns."""
    return max(explained) < -0.5 and 2 * fmean(loss) > max(spread) ** 2


def gap_without_lag(gap: Sequence[float], lag: Sequence[float]) -> bool:
    """Log-probs differ although the weights are not stale."""
    return min(gap) > 0.05 and max(lag) == 0


def few_count(ess: Sequence[float], lag: Sequence[float]) -> bool:
    """The effective sample size is low although the weights are not stale."""
    return max(ess) < 0.7 and max(lag) == 0


def too_old(ess: Sequence[float], lag: Sequence[float]) -> bool:
    """The effective sample size is low, and the weights are stale."""
    return max(ess) < 0.7 and min(lag) > 0


def uncorrected(is_on: Sequence[float], ess: Sequence[float], lag: Sequence[float]) -> bool:
    """The weights are stale, the effective sample size is below 0.95, and no correction is set."""
    return max(is_on) == 0 and max(ess) < 0.95 and min(lag) > 0


def waits_for_rollout(idle: Sequence[float], waiting: Sequence[float], in_flight: Sequence[float]) -> bool:
    """The trainer waits although it runs ahead, and nothing finished is ever left over."""
    return min(idle) > 0.1 and max(waiting) == 0 and min(in_flight) > 0


def waits_for_rewards(reward_s: Sequence[float], step_s: Sequence[float]) -> bool:
    """The wait for rewards alone is over a tenth of each step."""
    return all(reward > 0.1 * step for reward, step in zip(reward_s, step_s, strict=True))


def waits_for_drain(idle: Sequence[float], in_flight: Sequence[float]) -> bool:
    """The trainer waits although an iteration is generated while it trains."""
    return min(idle) > 0.1 and min(in_flight) > 0


def episodes_fail(episodes: Sequence[float], errors: Sequence[float], timeouts: Sequence[float]) -> bool:
    """In every step more than a tenth of the episodes ends with an error, or late."""
    return all(bad + late > 0.1 * all_ for all_, bad, late in zip(episodes, errors, timeouts, strict=True))


def often_stale(requests: Sequence[float], share: Sequence[float]) -> bool:
    """In every step several requests met KV of older weights, and more than 5 % of the tokens are lost by that.

    A push overtakes single requests, those that it meets between their order and their first token: of the hundreds
    of a step that is a hundredth.  A server that does not separate its cache gives such KV to every prompt of which
    it has some, and each of them is asked again up to three times.
    """
    return min(requests) > 1 and min(share) > 0.05


def all_equal(highest: Sequence[float], lowest: Sequence[float]) -> bool:
    """In every step the highest value equals the lowest."""
    return all(high == low for high, low in zip(highest, lowest, strict=True))


def away_from_0(by: float) -> Callable[..., bool]:
    """Every value is more than `by` away from 0."""
    return lambda values: min(abs(value) for value in values) > by
