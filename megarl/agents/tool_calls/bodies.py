"""What a call holds: JSON, or tags with keys and values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megarl.agents.tool_calls.call import Body, ToolCall, Tools, call_of

_DECODER = json.JSONDecoder()
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # Qwen3-Coder's template writes these
_KINDS = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
_ANY = set().union(*_KINDS.values())


def in_json(head: str = "", tail: str = "") -> Body:
    """A JSON value between two patterns: the arguments, if `head` has a group that matches the name; else whole calls.

    Marks inside its strings are text.
    """
    head_pattern, tail_pattern = re.compile(head), re.compile(tail)

    def body(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        if (begin := head_pattern.match(text, at)) is None:
            raise ValueError("no name")
        value, at = _decoded(text, begin.end())
        if (end := tail_pattern.match(text, at)) is None:
            raise ValueError("no end")
        name = begin[1] if begin.re.groups else None
        if name is not None:
            return [call_of(name, value or {})], end.end()
        calls = [_whole(each) for each in (value if isinstance(value, list) and value else [value])]
        return calls, end.end()

    return body


def in_tags(head: str, pair: str, closing: str, end: str, *, inner: str = "", behind: str = "") -> Body:
    """A name in `head`, then arguments, each `pair` and `closing`, then `inner` and the literal `end`.

    `pair` has the groups key and value, and may have `is_string`; without it the tool's schema says what a text is.
    `behind`: what may follow the end.
    """
    head_pattern, behind_pattern = re.compile(head), re.compile(behind)
    pair_pattern = re.compile(pair, re.DOTALL)

    def body(text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        stop = text.index(end, at)
        if (begin := head_pattern.match(text, at, stop)) is None:
            raise ValueError("no name")
        *pairs, rest = text[begin.end() : stop].split(closing)
        if rest.strip() != inner:
            raise ValueError("not only arguments")
        schemas = _schemas(begin[1], tools)
        arguments: dict[str, Any] = {}
        for each in pairs:
            if (found := pair_pattern.fullmatch(each)) is None:
                raise ValueError("no argument")
            groups = found.groupdict()
            kinds = _kinds(schemas.get(groups["key"]))
            if "is_string" in groups:
                kinds = {"string"} if groups["is_string"] == "true" else _ANY
            arguments[groups["key"]] = _valued(groups["value"], kinds)
        behind_it = behind_pattern.match(text, stop + len(end))
        return [call_of(begin[1], arguments)], behind_it.end() if behind_it else stop + len(end)

    return body


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins there, and where it ends.

    It is searched in growing windows: an error counts the lines in front of it, which takes time.
    """
    size = 4096
    while True:
        window = text[at : at + size]
        try:
            value, end = _DECODER.raw_decode(window)
            return value, at + end
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated") or error.pos > size - len("\\uXXXX\\uXXXX")
            if not cut or len(window) < size:
                raise
            size *= 4


def _whole(value: Any) -> ToolCall:
    """A call of {"name": ..., "arguments": {...}}."""
    given = [value.get(key) for key in ("arguments", "parameters")]  # the second: Llama's
    arguments, *others = [each for each in given if each not in (None, "", {})] or [{}]
    if others and others != [arguments]:
        raise TypeError("a call has one object of arguments")
    if isinstance(arguments, str):  # encoded twice
        arguments = json.loads(arguments)
    return call_of(value["name"], arguments)


def _schemas(name: str, tools: Tools) -> Mapping[str, Any]:
    """The schemas of a tool's parameters, by name."""
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _kinds(schema: Any) -> set[str]:
    """The types that a JSON schema allows; all if it does not say."""
    if not isinstance(schema, Mapping):
        return _ANY
    if of := schema.get("type"):
        return {of} if isinstance(of, str) else set(of)
    if "enum" in schema:
        return set().union(*(_KINDS[type(each)] for each in schema["enum"]))
    parts = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or ()]
    return set().union(*map(_kinds, parts)) or _ANY


def _valued(text: str, kinds: set[str]) -> Any:
    """An argument that was written without quotes: JSON of a type that is allowed, or the text itself."""
    if kinds == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = json.loads(_PYTHON.get(stripped, stripped))
    except (ValueError, RecursionError):
        return text
    return value if not isinstance(value, str) and _KINDS[type(value)] & kinds else text
