"""Anthropic's messages: requests become messages of chat completions; replies, whole or as server-sent events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.agents.chat_completions import sse
from megarl.agents.refusals import Refused, expect, expect_count, text_of
from megarl.agents.session import ChatReply, ChatRequest, Policy

FIELDS = frozenset(("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stream"))
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Raises Refused for a request of another form."""
    messages: list[dict[str, Any]] = []
    if system := text_of(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for at, message in enumerate(expect(body, "messages", list, "a list of messages")):
        role = message.get("role") if isinstance(message, Mapping) else message
        if role not in ("user", "assistant"):
            raise Refused(400, f"messages[{at}] has the role {role!r}: expected user or assistant")
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        messages += (_user if role == "user" else _assistant)(blocks, f"messages[{at}]")
    choice = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, Mapping) or choice.get("type") not in ("auto", "none"):
        raise Refused(400, f"tool_choice={choice!r}: a forced call changes what is sampled; expected type auto or none")
    return ChatRequest(
        messages,
        _tools(body),
        max_tokens=expect_count(body, "max_tokens"),
        read_calls=choice["type"] != "none",
    )


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = []
    for tool in expect(body, "tools", list, "a list of tools", []):
        if not isinstance(tool, Mapping) or "input_schema" not in tool or tool.get("type", "custom") != "custom":
            raise Refused(400, f"tools has {tool!r}: expected tools of the agent, with name and input_schema")
        described = {"description": tool["description"]} if tool.get("description") else {}
        function = {"name": tool.get("name"), **described, "parameters": tool["input_schema"]}
        tools.append({"type": "function", "function": function})
    return tools


def _user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Results of tools first, as Anthropic's API wants them; then the text."""
    results, texts = [], []
    for block in blocks:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            content = text_of(block.get("content"), where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            texts.append(text_of(block, where))
    return results + ([{"role": "user", "content": "".join(texts)}] if texts else [])


def _assistant(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            function = {
                "name": block.get("name"),
                "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False),
            }
            message.setdefault("tool_calls", []).append(
                {"id": block.get("id"), "type": "function", "function": function}
            )
        elif kind not in ("thinking", "redacted_thinking"):  # the session has it
            message["content"] += text_of(block, where)
    return [message]


def write(policy: Policy, _: Mapping[str, Any], replies: Sequence[ChatReply]) -> dict[str, Any]:
    (reply,) = replies
    content: list[dict[str, Any]] = []
    if reply.answer.reasoning:
        content.append({"type": "thinking", "thinking": reply.answer.reasoning, "signature": ""})
    if reply.answer.content:
        content.append({"type": "text", "text": reply.answer.content})
    for call in reply.message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    ended = "tool_use" if reply.answer.tool_calls else "end_turn"
    return {
        "id": "msg_" + secrets.token_hex(12),
        "type": "message",
        "role": "assistant",
        "model": policy.name,
        "content": content,
        "stop_reason": "max_tokens" if reply.completion.finish_reason == "length" else ended,
        "stop_sequence": None,
        "usage": {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.completion.token_ids)},
    }


def events(reply: Mapping[str, Any], _: Mapping[str, Any]) -> Iterator[bytes]:
    """Each block as one delta."""
    for event, value in _events(reply):
        yield sse({"type": event, **value}, event)


_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def _events(reply: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    usage = {**reply["usage"], "output_tokens": 0}
    yield "message_start", {"message": {**reply, "content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(reply["content"]):
        yield "content_block_start", {"index": index, "content_block": {**block, **_EMPTY[block["type"]]}}
        if block["type"] == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        else:
            delta = {"type": f"{block['type']}_delta", block["type"]: block[block["type"]]}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ended = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
    yield "message_delta", {"delta": ended, "usage": {"output_tokens": reply["usage"]["output_tokens"]}}
    yield "message_stop", {}


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
