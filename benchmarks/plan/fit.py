"""The planner's constants from published rows: a plain search, one constant after the other, held near first guesses.

What is made small is a sum over the fitted rows of |log(predicted / published)|, rounded at the bottom so that a row
which fits pulls no more, and for each constant of its distance from the guess.  The constants of a push are fitted on
pushes alone and before the others, so that a long push cannot make up for a short training.  A row that is far off for
reasons of its own (another system's packing, say) pulls with the same force as one that is a little off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.plan.rows import Row
from megarl.plan.constants import CONSTANTS, Constants

ROUNDING = 0.1  # log error below which a row pulls less and less
WEIGHT = 0.15  # of the distance from the guesses
STEPS = (1.3, 1.1, 1.03, 1.01)  # factors that a constant is tried up and down by
ROUNDS = 40
DIGITS = 3  # of a fitted value


@dataclass(frozen=True)
class Guess:
    """What a constant should be by its meaning, and the factor by which we would not be surprised."""

    value: float
    factor: float
    most: float = math.inf  # the search goes no further: shares of a ceiling below 1, times that costs of a run explain

    def surprise(self, value: float) -> float:
        return (math.log(value / self.value) / math.log(self.factor)) ** 2


# The fitted constants.  All others stay as megarl/plan/constants.py has them.
GUESSES = {
    "matmul": Guess(0.70, 1.1, 0.85),
    "experts": Guess(0.45, 1.3, 0.8),
    "expert_layer_s": Guess(450e-6, 2.0, 1.5e-3),
    "all_to_all": Guess(0.50, 1.5, 1.0),
    "fp8": Guess(1.55, 1.1, 2.0),
    "decode_memory": Guess(0.70, 1.15, 0.95),
    "decode_step_s": Guess(2e-3, 2.0, 5e-3),
    "all_reduce_nic_s": Guess(40e-6, 2.0),
    "tail": Guess(2.2, 1.3),
    "push_nic": Guess(0.45, 1.3, 0.95),
    "gather": Guess(0.30, 1.5, 0.95),
    "broadcast": Guess(0.60, 1.3, 0.95),
    "push_s": Guess(0.5, 2.0),
    "push_tensor_s": Guess(0.1e-3, 3.0),
    "sequence_s": Guess(1e-3, 4.0, 3e-3),
}

OF_PUSHES = ("push_nic", "gather", "broadcast", "push_s", "push_tensor_s")
OF_STEPS = tuple(name for name in GUESSES if name not in OF_PUSHES)


def guessed(constants: Constants = CONSTANTS) -> Constants:
    """Where the search begins."""
    return replace(constants, **{name: guess.value for name, guess in GUESSES.items()})


def at_bound(constants: Constants = CONSTANTS) -> list[str]:
    """Those that the rows would push further than the guess lets them go."""
    least = min(STEPS) ** 2  # digits are rounded
    return [name for name, guess in GUESSES.items() if getattr(constants, name) * least > guess.most]


def parts_of(rows: Sequence[Row]) -> list[tuple[tuple[str, ...], list[Row]]]:
    """What is fitted on what, in this order: names of constants, and the rows that see them."""
    pushes = [row for row in rows if row.kind == "push"]
    return [(OF_PUSHES, pushes), (OF_STEPS, [row for row in rows if row.kind != "push"])]


def cost(rows: Sequence[Row], constants: Constants, names: Sequence[str] = tuple(GUESSES)) -> float:
    """What the search makes small."""
    return sum(pull(row.error(constants)) for row in rows) + surprise(constants, names)


def pull(error: float) -> float:
    return math.hypot(error, ROUNDING) - ROUNDING


def surprise(constants: Constants, names: Sequence[str] = tuple(GUESSES)) -> float:
    return WEIGHT * sum(GUESSES[name].surprise(getattr(constants, name)) for name in names)


def fit(rows: Sequence[Row], start: Constants | None = None, told: Callable[[str], None] = lambda _: None) -> Constants:
    """The constants at which no step of a single one makes the cost of its part smaller."""
    constants = start or guessed()
    for names, seen in parts_of(rows):
        search = _Search(seen, constants, names)
        for factor in STEPS:
            for turn in range(ROUNDS):
                if not search.round(factor):
                    break
                told(f"steps of {factor:g}, round {turn + 1}: {search.cost:.3f}")
        constants = search.rounded()
    return constants


class _Search:
    """Where it stands: the constants, and each row's pull with them."""

    def __init__(self, rows: Sequence[Row], start: Constants, names: Sequence[str]) -> None:
        self.rows, self.at, self.names = rows, start, names
        self.pulls = [pull(row.error(start)) for row in rows]
        # Rows that a constant moves at all: most move a few, and nothing else is worth predicting again.
        self.moved = {name: self._moved_by(name) for name in names}

    @property
    def cost(self) -> float:
        return sum(self.pulls) + surprise(self.at, self.names)

    def round(self, factor: float) -> bool:
        """Each constant once up or down; whether any of it helped."""
        helped = [self._try(name, factor) or self._try(name, 1 / factor) for name in self.names]
        return any(helped)

    def rounded(self) -> Constants:
        return replace(self.at, **{name: float(f"{getattr(self.at, name):.{DIGITS}g}") for name in self.names})

    def _try(self, name: str, factor: float) -> bool:
        value = getattr(self.at, name) * factor
        if value > GUESSES[name].most:
            return False
        there, pulls = replace(self.at, **{name: value}), list(self.pulls)
        for index in self.moved[name]:
            pulls[index] = pull(self.rows[index].error(there))
        if sum(pulls) + surprise(there, self.names) > self.cost - 1e-6:
            return False
        self.at, self.pulls = there, pulls
        return True

    def _moved_by(self, name: str) -> list[int]:
        found = set()
        for factor in (0.25, 4.0):
            there = replace(self.at, **{name: getattr(self.at, name) * factor})
            found |= {i for i, row in enumerate(self.rows) if pull(row.error(there)) != self.pulls[i]}
        return sorted(found)
