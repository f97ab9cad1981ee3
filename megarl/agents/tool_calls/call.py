"""A tool call, and what a form of tool calls is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megarl.data.template import CLOSE, OPEN

Tools = Sequence[Mapping[str, Any]]


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON


# Gets a text, where the inside of a call begins, and the tools; returns the calls there and where they end.
# Raises one of UNREADABLE.
Body = Callable[[str, int, Tools], tuple[list[ToolCall], int]]
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def call_of(name: Any, arguments: Any) -> ToolCall:
    """Raises one of UNREADABLE for what is not a name and an object."""
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("a call is a name and an object")
    call = ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    "".join(call).encode()  # half a surrogate pair is no text
    return call


def split_tags(*tags: tuple[str, str]) -> Callable[[str, bool], tuple[str, str]]:
    """Splits a text with reasoning between one of these pairs of tags."""

    def split(text: str, opened: bool) -> tuple[str, str]:
        for begin, end in tags:
            if (opened and begin == OPEN) or text.lstrip().startswith(begin) or end in text:
                reasoning, _, text = text.partition(end)
                return reasoning.replace(begin, "", 1).strip(), text.lstrip("\n")
        return "", text

    return split


@dataclass(frozen=True)
class Form:
    """How a family writes calls."""

    begin: re.Pattern[str]
    body: Body
    end: str = ""  # of a malformed call; "": what begins it is all of it
    # Reasoning and the rest of an answer; the flag: the prompt has opened the reasoning.
    split: Callable[[str, bool], tuple[str, str]] = split_tags((OPEN, CLOSE))
    call_id: str = "call{number:05x}"  # as templates write it: nine letters and digits for Mistral's

    def read(self, text: str, tools: Tools = ()) -> tuple[str, list[ToolCall], int]:
        """The text without its calls, the calls, and the number of malformed ones, which stay in the text.

        Takes linear time.
        """
        kept: list[str] = []
        calls: list[ToolCall] = []
        malformed = at = 0
        while begin := self.begin.search(text, at):
            kept.append(text[at : begin.start()])
            try:
                found, at = self.body(text, begin.end(), tools)
                calls += found
            except UNREADABLE:
                malformed += 1
                end = text.find(self.end, max(begin.end(), begin.start() + 1))
                at = len(text) if end < 0 else end + len(self.end)
                kept.append(text[begin.start() : at])
        return "".join((*kept, text[at:])), calls, malformed
