"""OpenAI's chat completions and completions: requests and replies, whole or as server-sent events."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from megarl.agents.refusals import Refused, expect, expect_count, shown, text_of
from megarl.agents.session import ChatReply, ChatRequest, Policy, versions_json, without_stop

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MAX_ANSWERS = 64
_MAX_STOPS = 64
_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}  # as byte-level tokenizers write bytes


def read(body: Mapping[str, Any], _: Mapping[str, Any] = {}) -> ChatRequest:
    """Raises Refused for a request of another form."""
    messages = [
        _message(message, at) for at, message in enumerate(expect(body, "messages", list, "a list of messages"))
    ]
    tools, said = read_tools(body, "function", _chat_name)
    functions = [_function(tool["function"]) for tool in tools]
    return ChatRequest(
        messages,
        [{"type": "function", "function": function} for function in functions],
        num=read_num(body),
        max_tokens=expect_count(body, "max_completion_tokens") or expect_count(body, "max_tokens"),
        read_calls=read_tool_choice(body.get("tool_choice")),
        one_call=not expect(body, "parallel_tool_calls", bool, "true or false", True),
        stop=read_stop(body, "stop"),
        said=said,
    )


def _chat_name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys in one order, as clients have several and the prompt shows it.  `strict`, which asks for a grammar, goes."""
    order = ("name", "description", "parameters", *given)
    return {key: given[key] for key in order if key in given and key != "strict"}


def read_num(body: Mapping[str, Any]) -> int:
    num = expect_count(body, "n") or 1
    if num > _MAX_ANSWERS:
        raise Refused(400, f"n={num}: expected at most {_MAX_ANSWERS}")
    return num


def read_stop(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    stop = expect(body, name, (str, list), "a text, or a list of texts", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(text, str) for text in texts):
        raise Refused(400, f"{name}={shown(stop)}: expected a text, or a list of texts")
    check_stops(texts, name)
    return tuple(filter(None, texts))


def check_stops(stops: Sequence[Any], name: str) -> None:
    """Each is looked for in each answer."""
    if len(stops) > _MAX_STOPS:
        raise Refused(400, f"{name} has {len(stops)} entries: expected at most {_MAX_STOPS}")


def read_tools(
    body: Mapping[str, Any], own: str, name_of: Callable[[Mapping[str, Any]], Any]
) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """The tools of the agent, which are of the type `own`, and what is to be said of others: they run at a provider.

    `name_of`: the name of a tool of this type; no text for one of another form.
    """
    tools: list[Mapping[str, Any]] = []
    others = set()
    for tool in expect(body, "tools", list, "a list of tools", []):
        kind = (tool.get("type") or own) if isinstance(tool, Mapping) else None
        if not isinstance(kind, str) or (kind == own and not isinstance(name_of(tool), str)):
            raise Refused(400, f"tools has {shown(tool)}: expected a tool of the type {own!r} with a name")
        if kind == own:
            tools.append(tool)
        else:
            others.add(kind)
    left_out = f"tools of the types {sorted(others)}: they run at a provider, and are left out"
    return tools, {"tools": left_out} if others else {}


def read_tool_choice(choice: Any) -> bool:
    """Whether calls are read; that there is one is not enforced, because a grammar changes what is sampled."""
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if not (choice in (None, "auto", "none", "required") or (isinstance(choice, Mapping) and isinstance(kind, str))):
        raise Refused(400, f"tool_choice={shown(choice)}: expected 'auto', 'none', 'required', or a tool")
    return bool(kind != "none")


def _message(message: Any, at: int) -> dict[str, Any]:
    where = f"messages[{at}]"
    if not isinstance(message, Mapping) or message.get("role") not in list(_ROLES):  # a list has no hash
        role = message.get("role") if isinstance(message, Mapping) else message
        raise Refused(400, f"{where} has the role {shown(role)}: expected one of {sorted(_ROLES)}")
    out: dict[str, Any] = {"role": _ROLES[message["role"]], "content": text_of(message.get("content"), where)}
    if calls := expect(message, "tool_calls", list, "a list of tool calls", None):
        out["tool_calls"] = [_call(call, where) for call in calls]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if isinstance(message.get(name), str):
            out[name] = message[name]
    return out


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not {"name", "arguments"} <= function.keys():
        raise Refused(400, f"{where} has the tool call {shown(call)}: expected a function with name and arguments")
    return {"id": call.get("id") or "", "type": "function", "function": {k: function[k] for k in ("name", "arguments")}}


# ---- replies


def write(policy: Policy, body: Mapping[str, Any], replies: Sequence[ChatReply], _: Any = None) -> dict[str, Any]:
    choices = []
    for index, answer in enumerate(replies):
        choice = {"index": index, "message": answer.message, "finish_reason": finish_reason(answer), "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": _log_probs(policy, answer)}
        choices.append(choice | _ids(body, answer))
    return _reply(policy, body, replies, "chatcmpl-", "chat.completion", choices)


def text_reply(policy: Policy, body: Mapping[str, Any], replies: Sequence[ChatReply]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": answer.answer.content,
            "finish_reason": finish_reason(answer),
            "logprobs": None,
            **_ids(body, answer),
        }
        for index, answer in enumerate(replies)
    ]
    return _reply(policy, body, replies, "cmpl-", "text_completion", choices)


def _reply(
    policy: Policy, body: Mapping[str, Any], replies: Sequence[ChatReply], prefix: str, kind: str, choices: list[Any]
) -> dict[str, Any]:
    num_prompt = len(replies[0].prompt_ids)
    num_new = sum(len(each.completion.token_ids) for each in replies)
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
    reply = {
        "id": prefix + secrets.token_hex(12),
        "object": kind,
        "created": int(time.time()),
        "model": policy.name,
        "choices": choices,
        "usage": usage,
    }
    return reply | ({"prompt_token_ids": replies[0].prompt_ids} if body.get("return_token_ids") else {})


def finish_reason(reply: ChatReply) -> str:
    reason = reply.completion.finish_reason if reply.answer.stopped_at is None else "stop"
    return "tool_calls" if reason == "stop" and reply.answer.tool_calls else reason


def _ids(body: Mapping[str, Any], reply: ChatReply) -> dict[str, Any]:
    if not body.get("return_token_ids"):
        return {}
    return {"token_ids": reply.completion.token_ids, "weight_versions": versions_json(reply.completion)}


def _log_probs(policy: Policy, reply: ChatReply) -> list[dict[str, Any]]:
    """Log-probs of the text's tokens, without the stop token."""
    out = []
    for at, (token_id, value) in enumerate(
        zip(without_stop(reply.completion), reply.completion.log_probs, strict=False)
    ):
        token, piece = policy.text([token_id]), str(policy.tokenizer.convert_ids_to_tokens(token_id))
        spaces = len(piece) - len(piece.lstrip("\u2581"))  # SentencePiece's
        if at and spaces:  # decoded alone, it has one less
            token = " " * spaces + token.lstrip(" ")
        written = list(_bytes(piece, token))
        out.append({"token": token, "logprob": value, "bytes": written, "top_logprobs": []})
    return out


def _bytes(piece: str, text: str) -> bytes:
    """The bytes of a token, also of one that is a part of a character; `piece`: as its tokenizer writes it."""
    if "\ufffd" not in text:
        return text.encode()
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(byte[1])
    return bytes(_OF_LETTER[letter] for letter in piece) if _OF_LETTER.keys() >= set(piece) else text.encode()


# ---- the same as events


def events(reply: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[bytes]:
    """The role, the reasoning, the text and the calls of each answer as one chunk each, and how it ended."""
    for choice in reply["choices"]:
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
        rest = {name: value for name, value in choice.items() if name not in ("message", "finish_reason", "logprobs")}
        for delta in deltas:
            piece = {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": None}
            yield _chunk(reply, "chat.completion.chunk", [piece])
        last = {**rest, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": choice["logprobs"]}
        yield _chunk(reply, "chat.completion.chunk", [last], **_prompt_ids(reply, choice))
    yield from _ending(reply, body, "chat.completion.chunk")


def text_events(reply: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[bytes]:
    for choice in reply["choices"]:
        yield _chunk(reply, "text_completion", [choice], **_prompt_ids(reply, choice))
    yield from _ending(reply, body, "text_completion")


def _prompt_ids(reply: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """They are the same for all answers, and come with the ids of the first one."""
    name = "prompt_token_ids"
    return {name: reply[name]} if name in reply and choice["index"] == 0 else {}


def _ending(reply: Mapping[str, Any], body: Mapping[str, Any], kind: str) -> Iterator[bytes]:
    options = body.get("stream_options") or {}
    if isinstance(options, Mapping) and options.get("include_usage"):
        yield _chunk(reply, kind, [], usage=reply["usage"])
    yield b"data: [DONE]\n\n"


def _chunk(reply: Mapping[str, Any], kind: str, choices: list[Any], **more: Any) -> bytes:
    head = {name: reply[name] for name in ("id", "created", "model")}
    return sse({**head, "object": kind, "choices": choices, **more})


def sse(value: Mapping[str, Any], event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(value)}\n\n".encode()
