"""Every value that a row of a data set can hold comes back equal, of the same type, through a file of JSON."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.exact_json import KIND, check_writable, from_json, to_json

text = st.text(max_size=4) | st.just(KIND)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
times = st.datetimes() | st.datetimes(timezones=st.just(UTC)) | st.times()
others = times.map(lambda t: t.replace(fold=0))  # no file of data says which of the two hours at the end of summer
others |= st.binary(max_size=6) | st.dates() | st.timedeltas() | st.decimals(allow_nan=False)
keys = text | st.integers() | st.dates()


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(inner, max_size=3)
    return few | few.map(tuple) | st.dictionaries(keys, inner, max_size=3)


def same(one: Any, other: Any) -> bool:
    """Equal with all types: 1, 1.0 and True are three values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return repr(one) == repr(other)


@given(st.recursive(plain | others, containers, max_leaves=8))
def test_any_value_comes_back(value: Any) -> None:
    assert same(from_json(json.loads(json.dumps(to_json(value)))), value)


@given(st.recursive(plain | others | st.just({1, 2}) | st.just(1j), containers, max_leaves=8))
def test_what_cannot_be_written_is_known_without_writing_it(value: Any) -> None:
    told = []
    for function in (to_json, check_writable):
        try:
            function(value)
            told.append(None)
        except TypeError as error:
            told.append(str(error))
    assert told[0] == told[1]


def test_what_json_has_is_written_as_it_is() -> None:
    value = {"a": [1, 2.5, "x", None, True], "b": {"c": []}}
    assert to_json(value) == value


def test_other_kinds_by_hand() -> None:
    assert to_json({"when": date(2025, 1, 31)}) == {"when": {KIND: ["date", "2025-01-31"]}}
    assert to_json((b"\x00\x01", Decimal("1.10"))) == {
        KIND: ["tuple", [{KIND: ["bytes", "AAE="]}, {KIND: ["decimal", "1.10"]}]]
    }
    assert to_json({1: "a"}) == {KIND: ["pairs", [[1, "a"]]]}
    assert to_json({KIND: 3}) == {KIND: ["pairs", [[KIND, 3]]]}
    assert to_json(timedelta(1, 2, 3)) == {KIND: ["timedelta", [1, 2, 3]]}
    assert to_json([time(1, 2), datetime(2025, 1, 31, 1)]) == [
        {KIND: ["time", "01:02:00"]},
        {KIND: ["datetime", "2025-01-31T01:00:00"]},
    ]


def test_a_type_that_no_row_has_is_named() -> None:
    with pytest.raises(TypeError, match="^a complex; expected text, numbers"):
        to_json({"a": [1j]})
