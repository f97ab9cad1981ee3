"""Columns of a reply: those that were asked for, of any dtype and shape, an entry for each token of both."""

from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from wire import column_on_the_wire, reply_item

from megarl.rollout.protocol import parse_replies
from megarl.rollout.wire_columns import COLUMN_DTYPES, column_to_json, read_columns


class Wanted:
    """A column that a run asks for: any."""

    name, most_bytes = "some", 8

    def is_of(self, temperature: float, top_p: float, top_k: int) -> bool:  # noqa: ARG002
        return True

    def request(self, num_known: int) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def read(self, meta: Any, num_asked: int, num_new: int, num_known: int) -> Any:  # noqa: ARG002
        raise ValueError("the column some is not there")

    def check(self, column: Any, num_known: int) -> None:
        """It may be anything."""


SOME = (Wanted(),)


@pytest.mark.parametrize("shape", [(5,), (5, 2), (5, 3, 2), (5, 0)])
@pytest.mark.parametrize("dtype", sorted(COLUMN_DTYPES))
def test_a_column_arrives_as_it_was_sent(dtype: str, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    sent = (np.arange(size) * 37 % 251).reshape(shape).astype(dtype)
    found = read_columns({"columns": {"some": column_on_the_wire(sent)}}, 3, 2, SOME)["some"]
    assert (found.dtype, found.shape, found.flags.writeable) == (np.dtype(dtype), shape, True)
    assert np.array_equal(found, sent)
    assert column_to_json(sent) == column_on_the_wire(sent), "it is written as it is read"


def test_the_format_by_hand() -> None:
    """258 = 0x0102 as uint16, the low byte first."""
    data = b64encode(bytes([2, 1, 0, 0, 255, 255])).decode()
    found = read_columns({"columns": {"some": {"dtype": "uint16", "shape": [3], "data": data}}}, 2, 1, SOME)
    assert found["some"].tolist() == [258, 0, 65535]


def test_entries_that_the_caller_knows_may_be_left_out_and_are_zeros_then() -> None:
    whole = np.arange(1, 11, dtype=np.uint16).reshape(5, 2)
    sent = column_to_json(whole, start=2)
    assert sent == column_on_the_wire(whole[2:]) | {"start": 2}
    found = read_columns({"columns": {"some": sent}}, 3, 2, SOME, num_known=2)["some"]
    assert (found.dtype, found.tolist()) == (np.dtype("uint16"), [[0, 0], [0, 0], *whole[2:].tolist()])


@pytest.mark.parametrize("start", [3, -1, "2", True, None])
def test_entries_that_the_caller_does_not_know_are_not_left_out(start: Any) -> None:
    sent = column_on_the_wire(np.ones((2, 2))) | {"start": start}
    with pytest.raises(ValueError, match="^column some .* starts at .*: expected a start of at most 2, the tokens"):
        read_columns({"columns": {"some": sent}}, 3, 2, SOME, num_known=2)


def test_a_completion_has_the_columns_of_its_reply() -> None:
    routes = np.arange(10, dtype=np.uint8).reshape(5, 2)
    sent = [reply_item([4, 6], [-0.5, -1.0], [(3, 0, 2)], {"some": routes + i}) for i in range(2)]
    first, second = (reply.completion for reply in parse_replies(sent, 2, num_asked=3, columns=SOME))
    assert np.array_equal(first.columns["some"], routes)
    assert np.array_equal(second.columns["some"], routes + 1)


def test_most_replies_have_no_columns_and_who_gets_them_says_how_long_its_request_was() -> None:
    assert read_columns({}, None, 2) == read_columns({"columns": {}}, None, 2) == {}
    assert read_columns({"columns": None}, 3, 2) == {}
    with pytest.raises(AssertionError, match="how many tokens it asked with"):
        read_columns({"columns": {"some": column_on_the_wire(np.zeros(5))}}, None, 2, SOME)


@pytest.mark.parametrize("name", ["weird", "advantages", "keep", "tokens", "", "some"])
def test_a_column_for_which_nobody_asked_is_no_reply(name: str) -> None:
    """Also one that is called as the trainer's own: it would decide what is learnt."""
    sent = [reply_item([4, 6], [-0.5, -1.0], [(3, 0, 2)], {name: np.zeros(5)})]
    with pytest.raises(ValueError, match=f"^a completion has the column '{name}', which was not requested: expected"):
        parse_replies(sent, 1, num_asked=3)
    with pytest.raises(ValueError, match="the column some is not there|which was not requested: expected .'some'.$"):
        read_columns({"columns": {"other": sent}} if name == "some" else {}, 3, 2, SOME)


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
        read_columns({"columns": {"some": value}}, 3, 2, SOME)
    assert "\n" not in str(error.value)


def test_columns_that_are_no_object_are_refused() -> None:
    with pytest.raises(ValueError, match="^the columns of a completion are a list: expected an object$"):
        read_columns({"columns": [1]}, 3, 2)
