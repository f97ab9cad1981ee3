"""Reads a generated text: reasoning, content, and tool calls.  The record of a session never depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.agents.tool_calls.call import Form, ToolCall, Tools


@dataclass(frozen=True)
class Answer:
    """Example, of "<think>so</think>Yes.": reasoning "so", content "Yes."."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: int = 0  # they stay in the content
    stopped_at: str | None = None  # the text of the agent's own at which the answer ends for it


def read_answer(text: str, form: Form, *, opened: bool, tools: Tools, stop: Sequence[str] = ()) -> Answer:
    """`opened`: the prompt has opened the reasoning.  `tools`: those of the request; without any, no call is read.

    `stop`: texts at which the answer ends for the agent, but for its reasoning.
    """
    reasoning, text = form.split(text, opened)
    text, stopped_at = cut(text, stop)
    if not tools:
        return Answer(text, reasoning, stopped_at=stopped_at)
    rest, calls, malformed = form.read(text, tools)
    return Answer(rest.strip() if calls else text, reasoning, tuple(calls), malformed, stopped_at)


def cut(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text up to the first of `stop`, and which one that is."""
    found = [(at, each) for each in stop if (at := text.find(each)) >= 0]
    at, stopped_at = min(found, default=(len(text), None))
    return text[:at], stopped_at
