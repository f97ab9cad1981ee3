"""OpenAI's responses: requests become messages of chat completions; replies, whole or as server-sent events."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.agents.chat_completions import read_tool_choice, read_tools, sse
from megarl.agents.refusals import Refused, expect, expect_count, text_of
from megarl.agents.session import ChatReply, ChatRequest, Policy


def read(body: Mapping[str, Any], known: Mapping[str, Sequence[Any]] = {}) -> ChatRequest:
    """`known`: Session.items.  Raises Refused for a request of another form."""
    messages: list[dict[str, Any]] = []
    if instructions := expect(body, "instructions", str, "text", ""):
        messages.append({"role": "system", "content": instructions})
    for at, item in enumerate(_input(body, known)):
        _add(messages, item, f"input[{at}]")
    tools, said = read_tools({"tools": _unfolded(body)[0]}, "function", lambda tool: tool.get("name"))
    functions = [
        {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name)} for tool in tools
    ]
    return ChatRequest(
        messages,
        [{"type": "function", "function": function} for function in functions],
        max_tokens=expect_count(body, "max_output_tokens"),
        read_calls=read_tool_choice(body.get("tool_choice")),
        one_call=not expect(body, "parallel_tool_calls", bool, "true or false", True),
        said=said,
    )


def _unfolded(body: Mapping[str, Any]) -> tuple[list[Any], dict[str, dict[str, str]]]:
    """The tools of a request, those of a namespace (Codex: of MCP) as NAMESPACE__NAME, and how calls name these."""
    tools: list[Any] = []
    names = {}
    for tool in expect(body, "tools", list, "a list of tools", []):
        space = tool.get("name") if isinstance(tool, Mapping) and tool.get("type") == "namespace" else None
        if not isinstance(space, str):
            tools.append(tool)
            continue
        for each in expect(tool, "tools", list, "a list of tools", []):
            unfolded = each
            if isinstance(each, Mapping) and isinstance(each.get("name"), str):
                unfolded = {**each, "name": _long_name(each["name"], space)}
                names[unfolded["name"]] = {"name": each["name"], "namespace": space}
            tools.append(unfolded)
    return tools, names


def _long_name(name: Any, space: Any) -> Any:
    return f"{space}__{name}" if isinstance(space, str) else name


def _input(body: Mapping[str, Any], known: Mapping[str, Sequence[Any]]) -> list[Any]:
    """The items of a conversation, with those that the request names by their ids."""
    given = body.get("input")
    own = (
        [{"role": "user", "content": given}]
        if isinstance(given, str)
        else expect(body, "input", list, "text or a list")
    )
    items: list[Any] = []
    if (previous := expect(body, "previous_response_id", str, "the id of a response", None)) is not None:
        items += _found(known, previous, "previous_response_id", "previous_response_not_found")
    for at, item in enumerate(own):
        is_reference = isinstance(item, Mapping) and isinstance(item.get("id"), str) and item.keys() <= {"id", "type"}
        items += _found(known, item["id"], f"input[{at}]") if is_reference else [item]
    return items


def _found(known: Mapping[str, Sequence[Any]], name: str, where: str, code: str | None = None) -> Sequence[Any]:
    if name not in known:
        raise Refused(400, f"{where} refers to {name!r}: expected the id of an answer of this episode", code)
    return known[name]


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """An answer comes as several items, its text and its calls: they are one message."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else type(item).__name__
    if kind == "message" and item.get("role") in ("user", "system", "developer"):
        role = "user" if item["role"] == "user" else "system"
        messages.append({"role": role, "content": text_of(item.get("content"), where)})
    elif kind == "message" and item.get("role") == "assistant":
        answer(messages)["content"] += text_of(item.get("content"), where)
    elif kind == "function_call":
        name = _long_name(item.get("name"), item.get("namespace"))
        function = {"name": name, "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        answer(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = text_of(item.get("output"), where)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":  # the session has it
        raise Refused(400, f"{where} is of type {kind!r}: expected messages, function calls and their outputs")


def answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message if it is the assistant's, else a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def write(
    policy: Policy, body: Mapping[str, Any], replies: Sequence[ChatReply], known: dict[str, list[Any]]
) -> dict[str, Any]:
    """`known`: Session.items, which gets those of the reply."""
    (reply,) = replies
    cut = reply.completion.finish_reason == "length"
    num_prompt, num_generated = len(reply.prompt_ids), len(reply.completion.token_ids)
    response_id, items = _new("resp"), _items(reply, body, "incomplete" if cut else "completed")
    said = [_once(known, item) for item in (*_input(body, known), *items)]
    known |= {response_id: said, **{item["id"]: [item] for item in items}}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": policy.name,
        "output": items,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": policy.params.temperature,
        "top_p": policy.params.top_p,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_generated,
        },
    }


def _once(known: dict[str, list[Any]], item: Any) -> Any:
    """The item as it is known: most agents send all of a conversation again in each request, and it is kept once."""
    return known.setdefault(hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest(), [item])[0]


def _items(reply: ChatReply, body: Mapping[str, Any], status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reply.answer.reasoning:
        thought = [{"type": "reasoning_text", "text": reply.answer.reasoning}]
        items.append({"id": _new("rs"), "type": "reasoning", "summary": [], "content": thought, "status": status})
    if reply.answer.content or not reply.answer.tool_calls:
        part = {"type": "output_text", "text": reply.answer.content, "annotations": [], "logprobs": []}
        item = {"id": _new("msg"), "type": "message", "role": "assistant", "content": [part], "status": status}
        items.append(item)
    names = _unfolded(body)[1]
    for call in reply.message.get("tool_calls", ()):
        function = {"call_id": call["id"], **call["function"], **names.get(call["function"]["name"], {})}
        items.append({"id": _new("fc"), "type": "function_call", "status": status, **function})
    return items


def _new(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def events(reply: Mapping[str, Any], _: Mapping[str, Any]) -> Iterator[bytes]:
    """Each item as one delta."""
    for number, (event, value) in enumerate(_events(reply)):
        yield sse({"type": event, "sequence_number": number, **value}, event)


def _events(reply: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = {"response": {**reply, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}}
    yield "response.created", begun
    yield "response.in_progress", begun
    for at, item in enumerate(reply["output"]):
        where = {"item_id": item["id"], "output_index": at}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        added = {"output_index": at, "item": {**item, **empty, "status": "in_progress"}}
        yield "response.output_item.added", added
        if item["type"] == "function_call":
            text = item["arguments"]
            yield "response.function_call_arguments.delta", {**where, "delta": text}
            yield "response.function_call_arguments.done", {**where, "name": item["name"], "arguments": text}
        else:
            (part,) = item["content"]
            where["content_index"], name = 0, part["type"]
            more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
            yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
            yield f"response.{name}.delta", {**where, "delta": part["text"], **more}
            yield f"response.{name}.done", {**where, "text": part["text"], **more}
            yield "response.content_part.done", {**where, "part": part}
        yield "response.output_item.done", {"output_index": at, "item": item}
    yield f"response.{reply['status']}", {"response": reply}
