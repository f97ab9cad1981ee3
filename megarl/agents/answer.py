"""Reads a generated text: reasoning, content, and tool calls.  The record of a session never depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.agents.tool_calls.call import Form, ToolCall, Tools


@dataclass(frozen=True)
class Answer:
    """Example, of "<think>so</think>Yes.": reasoning "so", content "Yes."."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_calls: int = 0  # they stay in the content


def read_answer(text: str, form: Form, *, opened: bool, tools: Tools) -> Answer:
    """`opened`: the prompt has opened the reasoning.  `tools`: those of the request; without any, no call is read."""
    reasoning, text = form.split(text, opened)
    if not tools:
        return Answer(text, reasoning)
    rest, calls, malformed = form.read(text, tools)
    return Answer(rest.strip() if calls else text, reasoning, tuple(calls), malformed)
