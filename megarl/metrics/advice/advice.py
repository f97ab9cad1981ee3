"""Advice during a run: suggests changes to the settings from the metrics.

A rule (rules.py) reads the last values of a few metrics. If they show a known problem, it names in one sentence the key
to change; it changes nothing itself.

A problem must persist for some steps, so that a single noisy step gives no advice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

History = Mapping[str, Sequence[tuple[int, float]]]  # metric -> (step, value), oldest first


STEPS = "{steps}"  # in an advice: the number of values that were looked at
_FEWEST = 10


@dataclass(frozen=True)
class Rule:
    """Example: Rule("clipped_often", ("actor/pg_clipfrac",), 5, signals.above(0.3), "lower actor.optim.lr")."""

    name: str
    looks_at: tuple[str, ...]
    window: int  # number of last values of each metric
    holds: Callable[..., bool]  # of one list of `window` numbers for each metric, oldest first
    advice: str
    applies: Callable[[Mapping[str, Any]], bool] = lambda _: True  # to a run with this configuration

    def within(self, steps: int | None) -> Rule:
        """The same for a run of so many steps: it looks at half of them at most, but at 10 at least."""
        window = self.window if steps is None else min(self.window, max(_FEWEST, steps // 2))
        return replace(self, window=window, advice=self.advice.replace(STEPS, str(window)))

    def speaks(self, history: History) -> bool:
        """Does the problem exist?  False before the window is full or if the last step lacks a metric."""
        tails = [list(history.get(name, ()))[-self.window :] for name in self.looks_at]
        if any(len(tail) < self.window for tail in tails) or len({tail[-1][0] for tail in tails}) > 1:
            return False
        return self.holds(*([value for _, value in tail] for tail in tails))


class Advisor:
    """Applies the rules during a run, each at most once in `every` steps; keeps only the longest window of values.

    `steps`: of the whole run; in a short one rules look at fewer values.  `config`: of the run; rules for other
    schedules, or for a policy loss without advantages, do not apply.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        every: int = 100,
        *,
        config: Mapping[str, Any] | None = None,
        steps: int | None = None,
    ) -> None:
        self._rules = tuple(rule.within(steps) for rule in rules if rule.applies(config or {}))
        self._every = every
        longest = max((rule.window for rule in self._rules), default=0)
        names = {name for rule in self._rules for name in rule.looks_at}
        self._history = {name: deque[tuple[int, float]](maxlen=longest) for name in names}
        self._said: dict[str, int] = {}  # rule -> step

    def advise(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Add the metrics of a step; returns the new advice as "rule: sentence".

        The metrics of a step may be passed in several calls; each rule is checked in the call that has its metrics.
        """
        for name, past in self._history.items():
            if math.isfinite(metrics.get(name, math.nan)):
                past.append((step, metrics[name]))
        new = [rule for rule in self._rules if self._may_speak(rule, step, metrics) and rule.speaks(self._history)]
        self._said |= {rule.name: step for rule in new}
        return [f"{rule.name}: {rule.advice}" for rule in new]

    def _may_speak(self, rule: Rule, step: int, metrics: Mapping[str, float]) -> bool:
        rested = rule.name not in self._said or step - self._said[rule.name] >= self._every
        return rested and all(name in metrics for name in rule.looks_at)
