"""Checks the parallel layout of every role before a process starts.

Each invalid combination gives one sentence.  If another layout would work, the sentence names the nearest, found by a
search with the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from math import log2
from typing import NamedTuple

from megarl.arch.layout import KEYS, Layout, ModelNumbers, misfits, numbers_of, rank_misfits, training_misfits
from megarl.config.names import SUPERVISED
from megarl.config.resolve import layout_of
from megarl.config.schema import Config
from megarl.config.settings import show
from megarl.config.validate import models

ROLES = ("actor", "critic", "ref")
LEARNERS = ("actor", "critic")
NUM_NAMED = 3  # layouts that an error names
NUM_TRIED = 24  # layouts valid for this role that the search tries, looking for ones valid for the other roles too

# The words of a command line -> the roles whose layout would be invalid.
Trial = Callable[[list[str]], set[str]]


@dataclass(frozen=True)
class Seat:
    """A role, its layout, and the numbers that the layout must fit."""

    role: str
    layout: Layout
    num_ranks: int
    numbers: ModelNumbers
    trains: bool
    strategy: str
    step_key: str  # the key with the smallest number of prompts (sft: sequences) that the role processes at a time
    step_size: int  # its value
    sequences_each: int  # sequences per unit of step_size
    recompute_unit: int | None  # layers that are recomputed together

    @property
    def sequences(self) -> int:
        return self.step_size * self.sequences_each


class Problem(NamedTuple):
    """An error of a seat, and a hint for the sentence."""

    seat: Seat
    sentence: str
    hint: str = ""


def used_roles(config: Config, command: str) -> tuple[str, ...]:
    """The roles that a command distributes over ranks."""
    if command not in ("train", "config", *SUPERVISED):
        return ()
    used = {
        "actor": True,
        "critic": config.uses_critic and command not in SUPERVISED,
        "ref": (config.uses_reference or config.scores_on_ranks) and command not in SUPERVISED,
    }
    teachers = config.teachers_on_ranks if command not in SUPERVISED else ()
    return (*(role for role in ROLES if used[role]), *teachers)


def layout_faults(config: Config, command: str, trial: Trial) -> Iterator[str]:
    """One sentence for each error in roles and ranks.

    The first error of a role's layout is reported, with the nearest valid layouts.  The next role's is reported only if
    none of these layouts mends it as well.
    """
    roles = used_roles(config, command)
    faults = [sentence for role in roles for sentence in _ranks(config, role)]
    for role in models.with_own_models(config, roles):
        faults += models.contradictions(config, role)
    if faults:
        yield from faults
        return
    failing, told = failing_roles(config, command), set[str]()
    for problem in problems(config, command):
        if problem.seat.role in told:
            continue
        told.add(problem.seat.role)
        nearest = _nearest(problem.seat, trial, failing)
        yield f"{problem.sentence}{problem.hint}{nearest.hint}"
        if nearest.mends_all:
            return


def failing_roles(config: Config, command: str) -> set[str]:
    """The roles whose layout is invalid."""
    return {problem.seat.role for problem in problems(config, command)}


def problems(config: Config, command: str) -> Iterator[Problem]:
    """All errors in the layouts of the used roles."""
    for role in used_roles(config, command):
        seat = seat_of(config, role, command)
        if role != "ref" or config.uses_reference:
            yield from (Problem(seat, *found) for found in _wrong(seat))
        if role == "ref" and config.scores_on_ranks:
            path = config.reward.model.path
            seat = replace(seat, numbers=numbers_of(models.config_of_folder(path)))
            which = f"; ref.* lays out reward.model.path={path}"
            yield from (Problem(seat, sentence, which + hint) for sentence, hint in _wrong(seat))


def seat_of(config: Config, role: str, command: str) -> Seat:
    """The seat of a role in this configuration."""
    node = config.role(role)
    trains = role in LEARNERS
    step = ("data.train_batch_size", config.data.train_batch_size, config.rollout.n)
    if trains:
        step = (f"{role}.ppo_mini_batch_size", node.ppo_mini_batch_size, config.rollout.n)
    if command in SUPERVISED:
        step = ("sft.batch_size", config.sft.batch_size, 1)
    megatron = node.megatron
    return Seat(
        role=role,
        layout=layout_of(megatron),
        num_ranks=node.num_ranks,
        numbers=models.model_numbers(config, role),
        trains=trains,
        strategy=node.strategy,
        step_key=step[0],
        step_size=step[1],
        sequences_each=step[2],
        recompute_unit=megatron.recompute_num_layers if megatron.recompute_method == "uniform" else None,
    )


def _ranks(config: Config, role: str) -> Iterator[str]:
    node, ranks = config.role(role), config.trainer.num_ranks
    there = f"the trainer has {ranks} ranks"
    if node.first_rank >= ranks:
        yield f"{role}.first_rank={node.first_rank}: {there}; expected at most {ranks - 1}"
    elif node.first_rank + node.num_ranks > ranks:
        left = ranks - node.first_rank
        yield (
            f"{role}.num_ranks={node.num_ranks}: from rank {node.first_rank} on {there}, {left} of them; expected "
            f"{left}"
        )


def _wrong(seat: Seat) -> Iterator[tuple[str, str]]:
    """Errors of a seat, each with a hint."""
    group, layout = f"{seat.role}.megatron", seat.layout
    model = list(misfits(seat.numbers, layout))
    for misfit in model:
        yield f"{group}.{misfit.sentence}", ""
    if any(size is not None and size < 1 for size in vars(layout).values() if not isinstance(size, bool)):
        return
    for misfit in rank_misfits(layout, seat.num_ranks):
        size = getattr(layout, misfit.field)
        yield f"{group}.{KEYS[misfit.field]}={size}: {misfit.sentence} of the {seat.role}", ""
    if not list(rank_misfits(layout, seat.num_ranks)):
        yield from _batches(seat)
    if seat.trains and seat.numbers.num_experts and layout.tp > 1 and not layout.sequence_parallel:
        with_experts = f"a model with experts is trained over {KEYS['tp']}={layout.tp} in no other way; expected true"
        yield f"{group}.sequence_parallel=false: {with_experts}", ""
    if seat.strategy == "fsdp" and seat.trains:
        yield from _fsdp(seat)
    if not model:
        if seat.trains:
            yield from ((f"{group}.{misfit.sentence}", "") for misfit in training_misfits(seat.numbers, layout))
        yield from _recomputing(seat)


def _batches(seat: Seat) -> Iterator[tuple[str, str]]:
    copies = seat.num_ranks // seat.layout.model_size
    if seat.sequences < copies:
        these = f"{seat.sequences} sequences cannot keep {copies} data-parallel ranks of the {seat.role} busy"
        yield f"{seat.step_key}={seat.step_size}: {these}", f"; expected at least {-(-copies // seat.sequences_each)}"


def _fsdp(seat: Seat) -> Iterator[tuple[str, str]]:
    layout, role = seat.layout, seat.role
    if layout.pp > 1:
        yield f"{role}.megatron.{KEYS['pp']}={layout.pp}: {role}.strategy=fsdp has no pipeline; expected 1", ""
    copies = seat.num_ranks // (layout.tp * layout.pp)  # with fewer than two it runs as megatron: see strategies.py
    if copies > 1 and seat.numbers.num_experts and seat.num_ranks < 2 * layout.ep * layout.expert_tp * layout.pp:
        key = f"{role}.megatron.{KEYS['ep']}={layout.ep}"
        yield f"{key}: {role}.strategy=fsdp needs two ranks that share each expert", ""


def _recomputing(seat: Seat) -> Iterator[tuple[str, str]]:
    """With recompute_method=uniform the group size must divide the layers of each stage, else Megatron overruns it."""
    unit, layers = seat.recompute_unit, seat.numbers.num_hidden_layers
    if unit is None or layers is None or not seat.trains:
        return
    for each in sorted(set(seat.layout.layers_per_chunk(layers))):
        if each % unit:
            key = f"{seat.role}.megatron.recompute_num_layers={unit}"
            wanted = " or ".join(str(size) for size in nearest_numbers(unit, divisors(each)))
            yield f"{key}: recompute_method=uniform cuts the {each} layers of a stage", f"; expected {wanted}"
            return


class Nearest(NamedTuple):
    """What the sentence about a layout ends with: "; nearest: a=1, or b=2 c=3", or "" if no other layout helps."""

    hint: str
    mends_all: bool  # with these no role fails any more


def _nearest(seat: Seat, trial: Trial, failing: set[str]) -> Nearest:
    def fits(layout: Layout) -> bool:
        return next(_wrong(replace(seat, layout=layout)), None) is None

    named: list[str] = []
    for_this_role: list[str] = []  # layouts where only roles fail that failed before
    for layout in islice(nearest_layouts(seat.layout, seat.numbers, seat.num_ranks, fits), NUM_TRIED):
        words = words_of(seat, layout)
        still_failing = trial(words)
        if not still_failing:
            named.append(" ".join(words))
        elif still_failing <= failing - {seat.role}:
            for_this_role.append(" ".join(words))
        if len(named) == NUM_NAMED:
            break
    near = named or for_this_role[:NUM_NAMED]
    return Nearest(f"; nearest: {', or '.join(near)}" if near else "", bool(named))


def words_of(seat: Seat, layout: Layout) -> list[str]:
    """The words to type for another layout.  Example: ["actor.megatron.tensor_model_parallel_size=4"]."""
    return [
        f"{seat.role}.megatron.{key}={show(getattr(layout, field))}"
        for field, key in KEYS.items()
        if getattr(layout, field) != getattr(seat.layout, field)
    ]


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
    even = (layers or 0) / max(1, layout.pp)
    return {
        "tp": sizes,
        "pp": [size for size in sizes if layers is None or size <= layers],
        "cp": sizes,
        "ep": sizes,
        "etp": [None, *sizes],
        "vpp": [size for size in (divisors(layers) if layers else [1]) if size <= max(layout.vpp, 8)],
        "first_stage_layers": [None, *_starts(numbers, even)],
        "last_stage_layers": [
            None,
            *_last_stages(layout, layers),
            *((layers or 0) - start for start in _starts(numbers, (layers or 0) - even)),
        ],
        "sequence_parallel": [False, True],
    }


def _starts(numbers: ModelNumbers, near: float) -> list[int]:
    """Of a model some of whose layers cannot begin a stage: the two nearest to layer `near`, from 0, that can."""
    if not numbers.layers_that_share:
        return []
    can = set(range(1, numbers.num_hidden_layers or 0)).difference(numbers.layers_that_share)
    return sorted(can, key=lambda layer: (abs(layer - near), layer))[:2]


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
