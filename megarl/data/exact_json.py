"""JSON of the values in a row of a data set that comes back equal: also bytes, times, tuples and keys that are no text.

Everything that JSON has is written as it is; the other kinds are objects with the one key `KIND`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

KIND = "megarl:kind"

# A type (subclasses first) -> its name in the file, to a JSON value, and back.
_KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda value: b64encode(value).decode(), b64decode),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
    timedelta: ("timedelta", lambda d: [d.days, d.seconds, d.microseconds], lambda parts: timedelta(*parts)),
    Decimal: ("decimal", str, Decimal),
    tuple: ("tuple", lambda value: [to_json(x) for x in value], lambda items: tuple(from_json(x) for x in items)),
    dict: (
        "pairs",
        lambda value: [[to_json(x) for x in pair] for pair in value.items()],
        lambda pairs: {from_json(key): from_json(x) for key, x in pairs},
    ),
}
_BY_NAME = {name: decode for name, _, decode in _KINDS.values()}


def to_json(value: Any) -> Any:
    """A value that `json` can write.  Raises TypeError for a type that is not among those above."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [to_json(x) for x in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and KIND not in value:
        return {key: to_json(x) for key, x in value.items()}
    for kind, (name, encode, _) in _KINDS.items():
        if isinstance(value, kind):
            return {KIND: [name, encode(value)]}
    raise _unknown(value)


def check_writable(value: Any) -> None:
    """Raises the TypeError that `to_json` would raise, without its work."""
    if isinstance(value, dict):
        for pair in value.items():
            check_writable(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_writable(item)
    elif value is not None and not isinstance(value, (bool, int, float, str, *_KINDS)):
        raise _unknown(value)


def _unknown(value: Any) -> TypeError:
    return TypeError(f"a {type(value).__name__}; expected text, numbers, bytes, times, or lists and objects of these")


def from_json(value: Any) -> Any:
    """The value that `to_json` got."""
    if isinstance(value, list):
        return [from_json(x) for x in value]
    if not isinstance(value, dict):
        return value
    if KIND in value:
        name, inner = value[KIND]
        return _BY_NAME[name](inner)
    return {key: from_json(x) for key, x in value.items()}
