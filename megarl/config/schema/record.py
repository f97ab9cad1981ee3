"""What the schema says of a key: its default, its help, its values, and when it acts.

    kl_coef: NotNegative = key(0.001, "weight of the KL penalty", If(".type == adaptive"), BASIC)

The type of a field is an alias of this file where only some values of a Python type are valid.  Where the type allows
null, null is valid: it has a meaning of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from math import isfinite
from typing import Annotated, Any, TypeVar

from omegaconf import II

from megarl.arch import projections
from megarl.config.names import SUPERVISED
from megarl.io.sockets import port_range
from megarl_sandbox import layers


class If(tuple[str, ...]):
    """The key acts only if each of these conditions holds, as effect.py reads them."""

    def __new__(cls, *conditions: str) -> If:
        return super().__new__(cls, conditions)


class Commands(tuple[str, ...]):
    """The commands that read the key; without this mark those that read its group."""

    def __new__(cls, *names: str) -> Commands:
        return super().__new__(cls, names)


@dataclass(frozen=True)
class Choices:
    """The only names that the key may have; a plug-in may add more if `is_open`."""

    names: tuple[str, ...]
    is_open: bool = False


class Level(str):
    """For whom the key is."""


class Own:
    """A critic, reference or teacher does not follow the actor's value."""


ALL = Commands("train", *SUPERVISED, "evaluate")  # other commands refuse no key that has no effect
RL, SFT, DPO, OF_ROWS = Commands("train"), Commands("sft"), Commands("dpo"), Commands(*SUPERVISED)
RL_SFT, RL_EVALUATE = Commands("train", *SUPERVISED), Commands("train", "evaluate")
BASIC, ADVANCED, EXPERT = Level("basic"), Level("advanced"), Level("expert")
OWN = Own()


Mark = If | Commands | Choices | Level | Own
_RECORD = "record"
T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """What a field says of its key, or of all keys of its group."""

    help: str
    choices: Choices = Choices(())
    only_if: If = If()
    commands: Commands = Commands()
    level: Level = ADVANCED
    follows: bool = True  # a critic, reference or teacher has the actor's value unless the key is set


def key(default: Any, help: str, *marks: Mark) -> Any:  # noqa: A002
    """The field of a key, or of a group of keys if `default` makes a dataclass."""
    record = Record(
        help,
        _mark(Choices, marks) or Choices(()),
        _mark(If, marks) or If(),
        _mark(Commands, marks) or Commands(),
        _mark(Level, marks) or ADVANCED,
        OWN not in marks,
    )
    metadata = {_RECORD: record}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _mark(kind: type[T], marks: tuple[Mark, ...]) -> T | None:
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def record_of(item: Any) -> Record:
    """The record of a dataclass's field."""
    return item.metadata[_RECORD]


def follow(source: str, leader: type[T]) -> T:
    """The dataclass `leader` with references to the group of keys `source` in place of its defaults."""
    own = {item.name: II(f"{source}.{item.name}") for item in fields(leader) if record_of(item).follows}  # type: ignore[arg-type]
    return leader(**own)


def follows(source: str, leader: type) -> Callable[[type[T]], type[T]]:
    """Decorates a class of keys: those that it inherits and `leader` has too follow the group of keys `source`."""
    shared = {item.name for item in fields(leader)}

    def decorate(cls: type[T]) -> type[T]:
        inherited = {item.name: item for base in cls.__mro__[:0:-1] if is_dataclass(base) for item in fields(base)}
        for name, item in inherited.items():
            if name not in shared or name in vars(cls) or not record_of(item).follows:
                continue
            default: dict[str, Any] = {"default": II(f"{source}.{name}")}
            if is_dataclass(kind := item.default_factory):
                default = {"default_factory": partial(follow, f"{source}.{name}", kind)}
            cls.__annotations__[name] = item.type
            setattr(cls, name, field(**default, metadata=item.metadata))
        return cls

    return decorate


@dataclass(frozen=True)
class Range:
    """The values for which `test` is true."""

    test: Callable[[Any], bool]
    wanted: str  # in sentences, after "expected"


def _are_finite(weights: dict[str, float]) -> bool:
    return all(isfinite(weight) for weight in weights.values())


NOT_NEGATIVE = Range(lambda v: v >= 0, "a number of at least 0")
_AT_LEAST_1 = Range(lambda v: v >= 1, "at least 1")
_ABOVE_0 = Range(lambda v: 0 < v < float("inf"), "a number above 0")

Natural = Annotated[int, NOT_NEGATIVE]
Count = Annotated[int, _AT_LEAST_1]
Period = Annotated[int, Range(lambda v: v == -1 or v >= 1, "-1 (never) or at least 1")]
Seed = Annotated[int, Range(lambda v: 0 <= v < 2**31, "an integer from 0 to 2147483647")]
Port = Annotated[int, Range(lambda v: 1 <= v <= 65535, "1 to 65535")]
TopK = Annotated[int, Range(lambda v: v == -1 or v >= 1, "-1 (all tokens) or at least 1")]
AtLeast2 = Annotated[int, Range(lambda v: v >= 2, "at least 2")]

NotNegative = Annotated[float, NOT_NEGATIVE]
AtLeast1 = Annotated[float, _AT_LEAST_1]
Positive = Annotated[float, _ABOVE_0]
Finite = Annotated[float, Range(isfinite, "a finite number")]
Unit = Annotated[float, Range(lambda v: 0 <= v <= 1, "a number from 0 to 1")]
InsideUnit = Annotated[float, Range(lambda v: 0 < v < 1, "a number between 0 and 1, both excluded")]
Below1 = Annotated[float, Range(lambda v: 0 <= v < 1, "a number from 0 to below 1")]
UpToHalf = Annotated[float, Range(lambda v: 0 <= v < 0.5, "a number from 0 to below 0.5")]
Share = Annotated[float, Range(lambda v: 0 < v <= 1, "a number above 0 and at most 1")]
Factor = Annotated[float, Range(lambda v: v >= 1, "a number of at least 1")]
Bound = Annotated[float, Range(lambda v: 1 <= v < float("inf"), "null or a number of at least 1")]
AtLeast10 = Annotated[float, Range(lambda v: v >= 10, "at least 10")]
Temperature = Annotated[
    float, Range(_ABOVE_0.test, "a number above 0, because greedy completions give a policy nothing to learn")
]
DualClip = Annotated[
    float | str | None,
    Range(lambda v: v == "off" or (not isinstance(v, str) and v > 1), "a number above 1, null or off"),
]

Ports = Annotated[str, Range(lambda v: bool(port_range(v)), "two ports from 1024 on, such as 41000-41999")]
Sandbox = Annotated[str, Range(layers.is_known, layers.WANTED)]
Rewards = Annotated[list[str], Range(bool, "at least one reward")]
Targets = Annotated[
    list[str],
    Range(
        lambda v: v == [projections.ALL] or (v and set(v) <= set(projections.TARGETS)),
        f"[{projections.ALL}], or some of {', '.join(projections.TARGETS)}",
    ),
]
Steps = Annotated[list[int], Range(lambda v: all(step >= 1 for step in v), "steps, counted from 1")]
Ranks = Annotated[list[int], Range(lambda v: v and all(rank >= 0 for rank in v), "ranks, counted from 0")]
Betas = Annotated[
    list[float], Range(lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two numbers from 0 to below 1")
]
Weights = Annotated[dict[str, float], Range(_are_finite, "finite numbers")]
SomeWeights = Annotated[
    dict[str, float],
    Range(lambda v: not v or (_are_finite(v) and any(v.values())), "finite numbers that are not all 0"),
]
