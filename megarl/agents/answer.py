"""Reads a generated text: reasoning, content, and tool calls.  The record of a session never depends on it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megarl.data.template import CLOSE, OPEN


class ToolCall(NamedTuple):
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Answer:
    """Example, of "<think>so</think>Yes.": reasoning "so", content "Yes."."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: int = 0  # they stay in the content


def hermes(text: str) -> tuple[str, list[ToolCall], int]:
    """Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3.

    Returns the text without them, the calls, and the number of malformed ones.
    """
    calls: list[ToolCall] = []
    malformed = 0

    def take(match: re.Match[str]) -> str:
        nonlocal malformed
        try:
            call = json.loads(match.group(1))
            name = call["name"]
            given = [call.get(key) for key in ("arguments", "parameters")]  # the second: Llama's
            arguments, *others = [each for each in given if each not in (None, "", {})] or [{}]
            if others and others != [arguments]:
                raise TypeError("a call has one object of arguments")
            if isinstance(arguments, str):  # encoded twice
                arguments = json.loads(arguments)
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise TypeError("a call is a name and an object")
            arguments = json.dumps(arguments, ensure_ascii=False)
            (name + arguments).encode()  # half a surrogate pair is no text
        except (ValueError, TypeError, KeyError, RecursionError):
            malformed += 1
            return match.group(0)
        calls.append(ToolCall(name, arguments))
        return ""

    # What follows the last end is not searched: each beginning there would be followed to the end of the text.
    closed, end, open_end = text.rpartition("</tool_call>")
    rest = re.sub(r"<tool_call>(.*?)</tool_call>", take, closed + end, flags=re.DOTALL) + open_end
    cut_off = max(0, rest.count("<tool_call>") - rest.count("</tool_call>"))
    return rest, calls, malformed + cut_off


def none(text: str) -> tuple[str, list[ToolCall], int]:
    """No calls: the agent reads the text itself."""
    return text, [], 0


ToolParser = Callable[[str], tuple[str, list[ToolCall], int]]
TOOL_PARSERS: dict[str, ToolParser] = {"hermes": hermes, "none": none}


def read_answer(text: str, *, opened: bool, parser: ToolParser | None) -> Answer:
    """`opened`: the prompt has opened the reasoning.  `parser`: None where the agent gave no tools."""
    reasoning = ""
    if opened or text.lstrip().startswith(OPEN) or CLOSE in text:
        reasoning, _, text = text.partition(CLOSE)
        reasoning, text = reasoning.replace(OPEN, "", 1).strip(), text.lstrip("\n")
    if parser is None:
        return Answer(text, reasoning)
    rest, calls, malformed = parser(text)
    return Answer(rest.strip() if calls else text, reasoning, tuple(calls), malformed)
