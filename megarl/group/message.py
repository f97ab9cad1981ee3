"""Calls as values: a driver makes one, it travels as plain JSON, and a rank gets an equal one."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from megarl.arch.layout import Layout

T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """A call of the ranks' method with the name of its class: LoadHeads calls load_heads.

    The fields of a subclass are what the method gets: plain values, dataclasses of such, tuples and dictionaries.
    """

    @classmethod
    def method(cls) -> str:
        return re.sub(r"\B[A-Z]", r"_\g<0>", cls.__name__).lower()

    @property
    def label(self) -> str:
        """Calls with equal labels do the same kind of work, and have one time limit."""
        return self.method()


@dataclass(frozen=True)
class Setup(Message):
    """The first call: the ranks meet and make the process groups of a layout."""

    layout: Layout
    device: str
    seed: int
    timeout_s: float  # of their collectives
    has_neighbours: bool = False  # see GroupSettings, here and in the next one
    is_mapped: bool = False


@dataclass(frozen=True)
class Place:
    """What a rank answers to Setup."""

    replica: int
    is_reporter: bool  # of this replica
    device_name: str = "cpu"  # of its GPU


def decoded(kind: type[T], plain: Any) -> T:
    """The value that `dataclasses.asdict` made plain, after its way as JSON.

    Raises ValueError for a dataclass of which a field is missing or unknown.
    """
    return cast(T, _decoded(kind, plain))


def _decoded(kind: Any, plain: Any) -> Any:
    if plain is None:
        return None
    if isinstance(kind, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        kind = next((each for each in kinds if _is_record(each) and _types(each).keys() == plain.keys()), kinds[0])
    if _is_record(kind):
        types = _types(kind)
        for name in sorted(types.keys() ^ plain.keys()):
            what = "missing" if name in types else "unknown"
            raise ValueError(f"{kind.__name__}: the field {name} is {what}; expected {', '.join(types)}")
        return kind(**{name: _decoded(types[name], value) for name, value in plain.items()})
    if get_origin(kind) is tuple:
        return tuple(_decoded(get_args(kind)[0], each) for each in plain)
    if get_origin(kind) is dict:
        return {name: _decoded(get_args(kind)[1], each) for name, each in plain.items()}
    return plain


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)


@cache
def _types(kind: Any) -> dict[str, Any]:
    """The type of each field."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}
