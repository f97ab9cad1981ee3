"""The valid layouts nearest to an invalid one, found by search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from math import log2

from megarl.layout import Layout, ModelNumbers

# If two changes cost the same, the change of the earlier field comes first.
_FIELDS = ("tp", "pp", "cp", "ep", "etp", "vpp", "first_stage_layers", "last_stage_layers", "sequence_parallel")


def nearest_layouts(
    layout: Layout, numbers: ModelNumbers, num_ranks: int, fits: Callable[[Layout], bool]
) -> Iterator[Layout]:
    """Valid layouts, nearest first: those that differ in one field, else in two, else plain tp, pp and cp layouts."""
    options = _options(layout, numbers, num_ranks)
    for count in (1, 2):
        found = {_with(layout, dict(zip(fields, values, strict=True)))
                 for fields in combinations(_FIELDS, count)
                 for values in product(*(options[field] for field in fields))}  # fmt: skip
        fitting = [other for other in found if other != layout and fits(other)]
        if fitting:
            yield from sorted(fitting, key=lambda other: _distance(layout, other))
            return
    plain = replace(layout, ep=1, etp=None, vpp=1, first_stage_layers=None, last_stage_layers=None)
    found = {_with(plain, {"tp": tp, "pp": pp, "cp": cp})
             for tp, pp, cp in product(options["tp"], options["pp"], options["cp"])}  # fmt: skip
    yield from sorted(filter(fits, found), key=lambda other: _distance(layout, other))


def nearest_numbers(value: int, candidates: Iterator[int] | list[int], count: int = 2) -> list[int]:
    """The candidates nearest to a number by ratio.  Example: nearest_numbers(100, [1, 64, 128]) -> [128, 64]."""
    return sorted(candidates, key=lambda other: (abs(log2(other / value)), other))[:count]


def divisors(number: int) -> list[int]:
    """Example: divisors(12) -> [1, 2, 3, 4, 6, 12]."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _with(layout: Layout, changes: dict[str, int | bool | None]) -> Layout:
    """The layout with these changes; with one tensor-parallel rank, sequence parallelism is switched off."""
    changed = replace(layout, **changes)  # type: ignore[arg-type]
    return replace(changed, sequence_parallel=False) if changed.tp == 1 else changed


def _options(layout: Layout, numbers: ModelNumbers, num_ranks: int) -> dict[str, list[int] | list[bool] | list]:
    sizes = divisors(num_ranks)
    layers = numbers.num_hidden_layers
    return {
        "tp": sizes,
        "pp": [size for size in sizes if layers is None or size <= layers],
        "cp": sizes,
        "ep": sizes,
        "etp": [None, *sizes],
        "vpp": [size for size in (divisors(layers) if layers else [1]) if size <= max(layout.vpp, 8)],
        "first_stage_layers": [None],
        "last_stage_layers": [None, *_last_stages(layout, layers)],
        "sequence_parallel": [False, True],
    }


def _last_stages(layout: Layout, layers: int | None) -> list[int]:
    """Possible numbers of layers of the last pipeline rank, if all middle ranks have the same number."""
    if layers is None or layout.pp < 2:
        return []
    left = layers - (layout.first_stage_layers or 0)
    others = layout.pp - 1 - (layout.first_stage_layers is not None)
    if others < 1:
        return [left] if left > 0 else []
    lasts = {left - others * each for each in (left // (others + 1), left // (others + 1) + 1)}
    return sorted(last for last in lasts if last > 0)


def _distance(a: Layout, b: Layout) -> tuple[float, tuple[int, ...], str]:
    """The distance of b from a as a sort key, with tie-breakers.

    Each changed field costs 1, and a changed size 1 more for each factor of two.  Unequal stages cost more, as a last
    resort; sequence parallelism costs nothing.
    """
    changed = [field for field in _FIELDS if getattr(a, field) != getattr(b, field)]
    cost = 0.0
    for field in changed:
        if field.endswith("_stage_layers"):
            cost += 2.5
        elif field != "sequence_parallel":
            cost += 1 + abs(log2((getattr(b, field) or b.tp) / max(1, getattr(a, field) or a.tp)))
    return cost, tuple(_FIELDS.index(field) for field in changed), repr(b)
