"""Anthropic's messages: requests become messages of chat completions; replies, whole or as server-sent events."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.agents.chat_completions import read_stop, read_tools, sse
from megarl.agents.refusals import Refused, expect, expect_count, shown, text_of
from megarl.agents.session import ChatReply, ChatRequest, Policy

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def read(body: Mapping[str, Any], _: Mapping[str, Any] = {}) -> ChatRequest:
    """Raises Refused for a request of another form."""
    tools, said = read_tools(body, "custom", lambda tool: tool.get("name") if "input_schema" in tool else None)
    shown_now = [_function(tool) for tool in tools if not tool.get("defer_loading")]
    deferred = [_function(tool) for tool in tools if tool.get("defer_loading")]
    functions = {each["function"]["name"]: each for each in [*shown_now, *deferred]}
    messages: list[dict[str, Any]] = []
    if system := text_of(body.get("system"), "system"):
        messages.append({"role": "system", "content": system})
    for at, message in enumerate(expect(body, "messages", list, "a list of messages")):
        role = message.get("role") if isinstance(message, Mapping) else message
        content = message.get("content") if isinstance(message, Mapping) else None
        blocks = content if isinstance(content, list) else [content]
        if role == "system":
            messages.append({"role": "system", "content": text_of(content, f"messages[{at}]")})
        elif role == "user":
            messages += _user(blocks, f"messages[{at}]", functions)
        elif role == "assistant":
            messages += _assistant(blocks, f"messages[{at}]")
        else:
            raise Refused(400, f"messages[{at}] has the role {shown(role)}: expected user, assistant or system")
    choice = expect(body, "tool_choice", Mapping, "an object with a type", {"type": "auto"})
    if choice.get("type") not in ("auto", "any", "tool", "none"):
        raise Refused(400, f"tool_choice={shown(choice)}: expected the type auto, any, tool or none")
    return ChatRequest(
        messages,
        shown_now,
        deferred=deferred,
        max_tokens=expect_count(body, "max_tokens"),
        read_calls=choice["type"] != "none",
        one_call=bool(choice.get("disable_parallel_tool_use")),
        stop=read_stop(body, "stop_sequences"),
        said=said,
    )


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool["name"], **described, "parameters": tool["input_schema"]}}


def _user(blocks: list[Any], where: str, functions: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of tools first, as Anthropic's API wants them; then the text."""
    results, texts = [], []
    for block in blocks:
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            content = block.get("content")
            parts = [_found(part, where, functions) for part in content] if isinstance(content, list) else content
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text_of(parts, where)})
        else:
            texts.append(text_of(block, where))
    return results + ([{"role": "user", "content": "".join(texts)}] if texts else [])


def _found(part: Any, where: str, functions: Mapping[str, Any]) -> Any:
    """The tool that a part of a result names, from where on the model knows it; other parts as they are."""
    if not isinstance(part, Mapping) or part.get("type") != "tool_reference":
        return part
    name = part.get("tool_name")
    if not isinstance(name, str) or name not in functions:
        raise Refused(400, f"{where} refers to the tool {shown(name)}: expected one of {sorted(functions)}")
    return {"text": json.dumps(functions[name], ensure_ascii=False) + "\n"}


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


def write(policy: Policy, body: Mapping[str, Any], replies: Sequence[ChatReply], _: Any = None) -> dict[str, Any]:  # noqa: ARG001
    (reply,) = replies
    content: list[dict[str, Any]] = []
    if reply.answer.reasoning:
        # Clients send a thought without signature back as text.
        content.append({"type": "thinking", "thinking": reply.answer.reasoning, "signature": f"turn-{reply.turn}"})
    if reply.answer.content:
        content.append({"type": "text", "text": reply.answer.content})
    for call in reply.message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    ended = "tool_use" if reply.answer.tool_calls else "end_turn"
    if reply.answer.stopped_at is not None:
        ended = ended if reply.answer.tool_calls else "stop_sequence"
    elif reply.completion.finish_reason == "length":
        ended = "max_tokens"
    return {
        "id": "msg_" + secrets.token_hex(12),
        "type": "message",
        "role": "assistant",
        "model": policy.name,
        "content": content,
        "stop_reason": ended,
        "stop_sequence": reply.answer.stopped_at if ended == "stop_sequence" else None,
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
        if block["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": block["signature"]}
            yield "content_block_delta", {"index": index, "delta": signature}
        yield "content_block_stop", {"index": index}
    ended = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
    yield "message_delta", {"delta": ended, "usage": {"output_tokens": reply["usage"]["output_tokens"]}}
    yield "message_stop", {}


def error_body(status: int, message: str, code: str | None) -> dict[str, Any]:
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": code}} if code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}
