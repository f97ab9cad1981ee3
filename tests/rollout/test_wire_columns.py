"""Columns of a reply: any name, dtype and shape, and an entry for each token of request and completion."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from wire import column_on_the_wire, reply_item

from megarl.rollout.protocol import SamplingParams, generate_body, parse_completions
from megarl.rollout.wire_columns import COLUMN_DTYPES, column_to_json, read_columns


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 3, 2), (5, 0)])
@pytest.mark.parametrize("dtype", sorted(COLUMN_DTYPES))
def test_a_column_arrives_as_it_was_sent(dtype: str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    sent = (np.arange(size) * 37 % 251).reshape(shape).astype(dtype)
    found = read_columns({"columns": {"some": column_on_the_wire(sent)}}, 3, 2)["some"]
    assert (found.dtype, found.shape, found.flags.writeable) == (np.dtype(dtype), shape, True)
    assert np.array_equal(found, sent)


def test_the_format_by_hand() -> None:
    """258 = 0x0102 as uint16, the low byte first."""
    data = b64encode(bytes([2, 1, 0, 0, 255, 255])).decode()
    found = read_columns({"columns": {"some": {"dtype": "uint16", "shape": [3], "data": data}}}, 2, 1)
    assert found["some"].tolist() == [258, 0, 65535]


def test_entries_that_the_caller_knows_may_be_left_out_and_are_zeros_then() -> None:
    whole = np.arange(1, 11, dtype=np.uint16).reshape(5, 2)
    sent = column_to_json(whole, start=2)
    assert sent == column_on_the_wire(whole[2:]) | {"start": 2}
    found = read_columns({"columns": {"some": sent}}, 3, 2, num_known=2)["some"]
    assert (found.dtype, found.tolist()) == (np.dtype("uint16"), [[0, 0], [0, 0], *whole[2:].tolist()])


@pytest.mark.parametrize("start", [3, -1, "2", True, None])
def test_entries_that_the_caller_does_not_know_are_not_left_out(start: Any) -> None:
    sent = column_on_the_wire(np.ones((2, 2))) | {"start": start}
    with pytest.raises(ValueError, match="^column some .* starts at .*: expected a start of at most 2, the tokens"):
        read_columns({"columns": {"some": sent}}, 3, 2, num_known=2)


def test_a_completion_has_the_columns_of_its_reply() -> None:
    routes = np.arange(10, dtype=np.uint8).reshape(5, 2)
    sent = [reply_item([4, 6], [-0.5, -1.0], [(3, 0, 2)], {"routes": routes + i}) for i in range(2)]
    first, second = parse_completions(sent, 2, num_asked=3)
    assert np.array_equal(first.columns["routes"], routes)
    assert np.array_equal(second.columns["routes"], routes + 1)


def test_most_replies_have_no_columns() -> None:
    assert read_columns({}, None, 2) == read_columns({"columns": {}}, None, 2) == {}
    assert read_columns({"columns": None}, 3, 2) == {}


def test_a_caller_that_gets_columns_says_how_long_its_request_was() -> None:
    with pytest.raises(AssertionError, match="how many tokens it asked with"):
        read_columns({"columns": {"some": column_on_the_wire(np.zeros(5))}}, None, 2)


GOOD = column_on_the_wire(np.zeros((5, 2), np.uint8))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (GOOD | {"shape": [2, 5]}, r"has the shape \[2, 5\]: expected 5 entries, for 3 tokens of the request and 2 of"),
        (GOOD | {"shape": []}, "has 10 bytes: expected uint8 of shape"),
        (column_on_the_wire(np.zeros((4, 2))), r"has the shape \[4, 2\]"),
        (column_on_the_wire(np.array(1.0)), r"has the shape \[\]: expected 5 entries"),
        (GOOD | {"shape": [5, 3]}, r"has 10 bytes: expected uint8 of shape \[5, 3\]"),
        (GOOD | {"shape": [5, -2]}, "has 10 bytes"),
        (GOOD | {"shape": [-5, -2]}, "has 10 bytes"),
        (GOOD | {"shape": ["5", 2]}, "has 10 bytes"),
        (GOOD | {"shape": 5}, "cannot be read: TypeError"),
        (GOOD | {"dtype": "uint16"}, "has 10 bytes: expected uint16"),
        (GOOD | {"dtype": "object"}, "has dtype object: expected one of bool, float16"),
        (GOOD | {"dtype": ["uint8"]}, "has dtype .'uint8'.: expected one of"),
        (GOOD | {"data": "no base64!"}, "cannot be read: Error"),
        (GOOD | {"data": 7}, "cannot be read: TypeError"),
        ({"dtype": "uint8", "shape": [5, 2]}, "cannot be read: KeyError"),
        (GOOD | {"start": 1}, "starts at 1: expected a start of at most 0"),
        ([1, 2], "cannot be read: AttributeError"),
        (None, "cannot be read: AttributeError"),
    ],
)
def test_a_bad_column_is_one_sentence_with_its_name(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^column some of a completion .*{words}") as error:
        read_columns({"columns": {"some": value}}, 3, 2)
    assert "\n" not in str(error.value)


def test_columns_that_are_no_object_are_refused() -> None:
    with pytest.raises(ValueError, match="^the columns of a completion are a list: expected an object$"):
        read_columns({"columns": [1]}, 3, 2)


class Doubled:
    """A column that an engine reports in a field of its own, for new tokens only; none of its numbers is above 30."""

    name = "ours"

    def is_of(self, temperature: float, top_p: float, top_k: int) -> bool:  # noqa: ARG002
        return True

    def request(self, num_known: int) -> dict[str, Any]:
        return {"wants_doubled_from": num_known}

    def read(self, meta: Mapping[str, Any], num_asked: int, num_new: int, num_known: int) -> np.ndarray:  # noqa: ARG002
        return np.array([0] * num_asked + [2 * number for number in meta["their_field"]])

    def check(self, column: np.ndarray, num_known: int) -> None:
        if column[num_known:].max() > 30:
            raise ValueError("a number above 30")


def test_an_engines_own_field_becomes_a_column() -> None:
    meta = {"their_field": [7, 8], "columns": {"some": GOOD}}
    found = read_columns(meta, 3, 2, [Doubled()])
    assert found["ours"].tolist() == [0, 0, 0, 14, 16]
    assert sorted(found) == ["ours", "some"]
    with pytest.raises(ValueError, match=r"column ours of a completion has the shape \[6\]: expected 5 entries"):
        read_columns({"their_field": [1] * 3}, 3, 2, [Doubled()])
    with pytest.raises(ValueError, match="^a number above 30$"):
        read_columns({"their_field": [15, 16]}, 3, 2, [Doubled()])
    assert read_columns({"their_field": [16, 7]}, 3, 2, [Doubled()], num_known=4)["ours"].tolist() == [0, 0, 0, 32, 14]


@pytest.mark.parametrize("num_entries", [0, 4])
def test_a_column_of_another_length_is_refused_before_its_entries_are_read(num_entries: int) -> None:
    sent = {"ours": column_on_the_wire(np.zeros(num_entries))}
    with pytest.raises(ValueError, match=rf"^column ours .* has the shape \[{num_entries}\]: expected 5 entries"):
        read_columns({"columns": sent}, 3, 2, [Doubled()], num_known=5)


def test_a_field_is_read_only_if_it_is_wanted_and_the_column_is_not_there_already() -> None:
    assert read_columns({"their_field": [7, 8]}, 3, 2) == {}
    sent = {"ours": column_on_the_wire(np.arange(5))}
    assert read_columns({"columns": sent, "their_field": [7, 8]}, 3, 2, [Doubled()])["ours"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        read_columns({}, 3, 2, [Doubled()])
    assert read_columns({}, 3, 0, [Doubled()]) == {}, "a completion without a token has no columns"


def test_a_request_asks_for_the_columns_that_its_caller_lacks() -> None:
    body = generate_body([5, 6, 7], 1, SamplingParams(), "r", columns=[Doubled()], num_known=2)
    assert body["wants_doubled_from"] == 2
    assert generate_body([5, 6, 7], 1, SamplingParams(), "r").keys() == body.keys() - {"wants_doubled_from"}


@pytest.mark.parametrize("dtype", sorted(COLUMN_DTYPES))
def test_a_column_is_written_as_it_is_read(dtype: str) -> None:
    sent = np.arange(10).reshape(5, 2).astype(dtype)
    assert column_to_json(sent) == column_on_the_wire(sent)
