"""Which settings meet which split: the factors of a case, and a list of cases in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from megarl.algo import AGG_MODES, KL_ESTIMATORS, POLICY_LOSSES
from megarl.layout import Layout

Row = dict[str, Any]  # factor -> the name of its value

DOCUMENTED, VALUE = "documented", "value"  # a user's loss of the documented form; the critic's


@dataclass(frozen=True)
class Split:
    """How one optimizer step is cut: over how many ranks, laid out how, in how many micro-batches on each."""

    ranks: int
    micros: int
    layout: Layout = Layout()


@dataclass(frozen=True)
class Case:
    """One optimizer step: what is computed, of which data, cut how."""

    loss: str
    mode: str
    split: str
    kl: str = "off"  # a kl_loss_type, or "importance"
    correction: str = "off"  # a name of loss_cases.CORRECTIONS
    entropy: str = "0"  # entropy_coeff
    data: str = "mild"  # a name of loss_cases.make_data
    inside: bool = False  # the step's columns are made inside each micro-batch, as they must not be


def _unique(table: Mapping[str, object]) -> tuple[str, ...]:
    """Names without the aliases, which stand for the same function."""
    seen: dict[object, str] = {}
    for name, function in table.items():
        seen.setdefault(function, name)
    return tuple(seen.values())


SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
SPLITS = {  # one split at a time, then several at once
    "micro2": Split(1, 2),
    "micro4": Split(1, 4),
    "dp2": Split(2, 1),
    "dp4": Split(4, 1),
    "cp2": Split(2, 1, Layout(cp=2)),
    "tp2": Split(2, 1, Layout(tp=2)),
    "tp2+sp": Split(2, 2, Layout(**SP)),
    "pp2": Split(2, 4, Layout(pp=2)),
    "dp2 cp2": Split(4, 2, Layout(cp=2)),
    "dp2 pp2": Split(4, 4, Layout(pp=2)),
    "tp2+sp cp2": Split(4, 2, Layout(**SP, cp=2)),
    "tp2 pp2": Split(4, 1, Layout(tp=2, pp=2)),
}
MORE_SPLITS = {
    "dp2 micro4": Split(2, 4),
    "dp4 micro2": Split(4, 2),
    "dp4 micro4": Split(4, 4),
    "cp2 micro4": Split(2, 4, Layout(cp=2)),
    "tp2 micro4": Split(2, 4, Layout(tp=2)),
    "tp2+sp whole": Split(2, 1, Layout(**SP)),
    "pp2 whole": Split(2, 1, Layout(pp=2)),
    "dp2 tp2": Split(4, 2, Layout(tp=2)),
    "dp2 tp2+sp": Split(4, 4, Layout(**SP)),
    "tp2+sp pp2": Split(4, 4, Layout(**SP, pp=2)),
    "cp2 pp2": Split(4, 2, Layout(cp=2, pp=2)),
    "tp2 cp2": Split(4, 4, Layout(tp=2, cp=2)),
}
ONE = "one"  # one rank, one micro-batch: what every split is compared with
ALL_SPLITS = {ONE: Split(1, 1)} | SPLITS | MORE_SPLITS

LOSSES = (*_unique(POLICY_LOSSES), DOCUMENTED, VALUE)
MODES = _unique(AGG_MODES)
KLS = ("off", "importance", *(f"{name}{plus}" for name in (*_unique(KL_ESTIMATORS), "full") for plus in ("", "+")))
FACTORS: dict[str, Sequence[str]] = {
    "loss": LOSSES,
    "mode": MODES,
    "kl": KLS,
    "correction": ("off", "token", "icepop", "sequence", "geometric", "bypass"),
    "entropy": ("0", "0.05"),
    "data": ("mild", "hard", "scored"),
}
OF_ACTORS = ("kl", "correction", "entropy")  # the first value is the one that leaves it out


def has_meaning(row: Row) -> bool:
    """A critic has weights, and nothing of what else an actor's loss has."""
    return row.get("loss") != VALUE or all(row.get(name) in (None, FACTORS[name][0]) for name in OF_ACTORS)


def cover(splits: Sequence[str]) -> list[Case]:
    """Cases in which every pair of values of two factors occurs that has a meaning, the split being one factor."""
    return [Case(**row) for row in pairwise({**FACTORS, "split": splits}, has_meaning)]


def pairwise(factors: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Few rows in which every allowed pair of values of two factors occurs.

    Greedy: a row begins with a pair that has not occurred and takes, factor after factor, the allowed value that brings
    most new pairs with what the row has; of equals the one that was used least.
    """
    missing = dict.fromkeys(pair for pair in pairs(factors) if allowed(dict(pair)))
    used = {(name, value): 0 for name, values in factors.items() for value in values}
    rows: list[Row] = []
    while missing:
        row: Row = dict(next(iter(missing)))
        for name in sorted(set(factors) - set(row), key=lambda name: (-len(factors[name]), name)):
            choices = [value for value in factors[name] if allowed({**row, name: value})]

            def worth(value: str, name: str = name, row: Row = row) -> tuple[int, int]:
                new = sum(_pair((name, value), other) in missing for other in row.items())
                return new, -used[name, value]

            row[name] = max(choices, key=worth)
        rows.append(row)
        for item in row.items():
            used[item] += 1
        for pair in combinations(row.items(), 2):
            missing.pop(_pair(*pair), None)
    return rows


def pairs(factors: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Every pair of values of two different factors."""
    for a, b in combinations(factors, 2):
        yield from (_pair((a, x), (b, y)) for x, y in product(factors[a], factors[b]))


def _pair(a: tuple[str, str], b: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
    return (a, b) if a[0] < b[0] else (b, a)
