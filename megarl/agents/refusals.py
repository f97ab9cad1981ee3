"""Refuses requests that cannot be served; fields.py has the rules of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import Repr
from typing import Any

GOES_ON = "thread_unsupported_request"  # the code on which Anthropic's client asks again without a thread
_MAX_SHOWN = 300  # characters
_REPR = Repr()
_REPR.maxlevel, _REPR.maxdict, _REPR.maxlist, _REPR.maxstring, _REPR.maxother = 4, 20, 20, 200, 200


def shown(value: Any) -> str:
    """A value in a sentence; a large one is not written as a whole."""
    text = _REPR.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class Refused(Exception):
    """A request that is not served: an HTTP status, a sentence, and OpenAI's `code`."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class OverLimit(Refused):
    """The episode has used up its turns or its tokens: it is over, and is scored as it stands."""

    def __init__(self, message: str) -> None:
        # OpenAI's clients try 429 and 5xx again; agents know this code as the end of what they can say, and those whose
        # client shows the text alone know these words.
        super().__init__(400, f"prompt is too long: {message}", "context_length_exceeded")


def expect(body: Mapping[str, Any], name: str, kind: Any, wanted: str, default: Any = ...) -> Any:
    """A field of the request; without a default it is required.  Raises Refused for another type."""
    value = body.get(name)
    if value is None and default is not ...:
        return default
    if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or value < 1)):
        raise Refused(400, f"{name}={shown(value)}: expected {wanted}")
    return value


def expect_count(body: Mapping[str, Any], name: str, default: int | None = None) -> int | None:
    """A field that is a whole number of at least 1, or absent."""
    number: int | None = expect(body, name, int, "a whole number >= 1", default)
    return number


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, or parts of type text.  Raises Refused for images and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refused(400, f"{where} has a part of type {kind!r}: expected text")
    return "".join(part["text"] for part in parts)
