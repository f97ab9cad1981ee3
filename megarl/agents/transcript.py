"""What was said in an episode, for readers: shortened, and in one form for all APIs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from megarl.data.template import Message

# These messages of a long episode are kept, and the first FIRST_MESSAGES calls of a message.
FIRST_MESSAGES, LAST_MESSAGES = 8, 24
MAX_TEXT = 2000  # characters of a text; the middle is left out


def transcript(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """An episode's messages for readers: [{"role", "text"}], with "reasoning" and "calls" [{"name", "arguments"}].

    Messages out of the middle of a long episode are one of the role "left out".
    """
    if (num_left_out := len(messages) - FIRST_MESSAGES - LAST_MESSAGES) <= 0:
        return [_shown(message) for message in messages]
    gap = {"role": "left out", "text": f"{num_left_out} messages"}
    return [*map(_shown, messages[:FIRST_MESSAGES]), gap, *map(_shown, messages[-LAST_MESSAGES:])]


def _shown(message: Message) -> dict[str, Any]:
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    shown: dict[str, Any] = {"role": str(message["role"]), "text": _text(message.get("content"))}
    if reasoning := message.get("reasoning_content"):
        shown["reasoning"] = _text(reasoning)
    if calls:
        names = ("name", "arguments")
        shown["calls"] = [{name: _text(call.get(name)) for name in names} for call in calls[:FIRST_MESSAGES]]
    return shown


def _text(content: object) -> str:
    """A content, which may be a list of parts as OpenAI's clients send them, as one short text."""
    if isinstance(content, Iterable) and not isinstance(content, str | dict):
        content = "\n".join(part["text"] if _is_text(part) else _json(part) for part in content)
    text = "" if content is None else content if isinstance(content, str) else _json(content)
    half = MAX_TEXT // 2
    return (
        text if len(text) <= MAX_TEXT else f"{text[:half]}\n[... {len(text) - MAX_TEXT} characters ...]\n{text[-half:]}"
    )


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
