"""Reads prompts and examples from rows: the supported data set formats.

{"prompt": "12+34=", "ground_truth": "46", "data_source": "arithmetic"}      a string, used as it is
{"prompt": [{"role": "user", "content": "..."}], ...}                        chat messages; their "tools" beside them
{"messages": [...], "ground_truth": "46"}                                    the same with the common key
{"question": "...", "answer": "... #### 42"}                                 GSM8K; the key may be named
{"prompt": [...], "reward_model": {"ground_truth": "42"}}                    the parquet rows of verl's examples
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.data.readers import Record
from megarl.data.template import Tools
from megarl.io.terminal import printable

Messages = list[dict[str, Any]]

# What a row may hold besides text.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
ASSISTANT = "assistant"
ANSWERS = ("all", "last")  # which of a row's answers are learnt
# Names under which data say 0 or false of what is not learnt.
_WEIGHTS = ("weight", "train", "training", "loss", "step_loss_mask")
_SOLUTION = re.compile(r"####[ \t*]*[-+]?[ \t]?[$€£]?\.?\d[^\n#]*\s*\Z")  # the end of one of GSM8K
_TRLS_RESPONSE = "completion"
_CALL = '{"function": {"name": string, "arguments": object}}'
_TOOL = '{"type": "function", "function": {...}}'


@dataclass(frozen=True)
class Question:
    """A row with the fields that the reward needs, not tokenised yet."""

    where: str
    text: str | Messages
    ground_truth: Any  # as the row has it; None: it has none
    data_source: str
    extra: dict[str, Any]  # all other fields
    tools: Tools = ()  # that the chat template gets


@dataclass(frozen=True)
class Example:
    """A prompt, and what follows it: messages, of which those with `is_learnt` are; behind a string one of text."""

    where: str
    text: str | Messages
    behind: Messages
    tools: Tools = ()


def question_of(row: Record, *, prompt_key: str, ground_truth_key: str, has_chat_template: bool) -> Question:
    """A row for reinforcement learning.  Raises ValueError that starts with file:line."""
    _check_is_text(row.where, row.fields)
    fields = dict(row.fields)
    if fields.get(prompt_key) is not None:
        text = _text(row, prompt_key, fields.pop(prompt_key))
    elif fields.get("messages") is not None:
        text = _text(row, "messages", fields.pop("messages"))
    elif isinstance(fields.get("question"), str):
        text = _as_user(fields.pop("question"), has_chat_template)
    else:
        raise ValueError(_no_prompt(row, prompt_key))
    if isinstance(text, list) and text[-1]["role"] == ASSISTANT:
        raise ValueError(
            f"{row.where}: the last message is the assistant's; expected a prompt that ends with a question"
        )
    ground_truth = _ground_truth(row.where, fields, ground_truth_key, "question" in row.fields)
    data_source = fields.pop("data_source", None)
    if printable(name := str(data_source)) != name or "\n" in name:
        raise ValueError(f"{row.where}: data_source={data_source!r}; expected printable characters, as in a name")
    tools = () if isinstance(text, str) else _tools(row) or ()  # what else is called so is a field for the reward
    return Question(row.where, text, ground_truth, "" if data_source is None else str(data_source), fields, tools)


def example_of(
    row: Record, *, prompt_key: str, response_key: str, has_chat_template: bool, answers: str = "all"
) -> Example:
    """A row for SFT: prompt and response, messages that end with an answer, or GSM8K's question and answer.

    `answers`: one of ANSWERS, which of a row's answers are learnt.  A response may be messages, too.
    Raises ValueError that starts with file:line.
    """
    assert answers in ANSWERS, f"answers is one of {ANSWERS}, not {answers!r}"
    _check_is_text(row.where, row.fields)
    fields = row.fields
    if fields.get(response_key) is not None and fields.get(prompt_key) is not None:
        text = _text(row, prompt_key, fields[prompt_key])
        behind = _response(row, response_key, is_chat=isinstance(text, list))
    elif fields.get("messages") is not None:
        messages = _text(row, "messages", fields["messages"])
        if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != ASSISTANT:
            raise ValueError(f"{row.where}: expected messages of at least two turns, the last by the assistant")
        # An answer with nothing before it has no prompt.
        first = next(at for at, message in enumerate(messages) if at and message["role"] == ASSISTANT)
        text, behind = messages[:first], messages[first:]
    elif isinstance(fields.get("question"), str) and fields.get("answer") is not None:
        text, behind = _as_user(fields["question"], has_chat_template), _response(row, "answer", is_chat=False)
    else:
        taken = f"; sft.response_key={_TRLS_RESPONSE} takes it" if _TRLS_RESPONSE in fields else ""
        raise ValueError(
            f"{row.where}: expected the keys {prompt_key!r} and {response_key!r}, 'messages', or 'question' and "
            f"'answer'; the row has {_keys(fields)}{taken}"
        )
    if answers == "last" and isinstance(text, list):
        text, behind = [*text, *behind[:-1]], behind[-1:]
    _check_weights(row.where, behind)
    if not any(map(is_learnt, behind)):
        raise ValueError(f"{row.where}: no answer is learnt; expected one without a weight of 0")
    tools = _tools(row)
    if tools is None:
        raise ValueError(f"{row.where}: tools is no list of {_TOOL}")
    if tools and isinstance(text, str):
        raise ValueError(f"{row.where}: tools beside a prompt that is a string; expected chat messages, or no tools")
    return Example(row.where, text, behind, tools)


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether the message is an answer that its row does not keep from being learnt."""
    return message["role"] == ASSISTANT and all(message.get(name, 1) in (1, "1") for name in _WEIGHTS)


def _check_weights(where: str, answers: Messages) -> None:
    """Raises ValueError for a weight between or beyond 0 and 1: an answer is learnt, or not."""
    for answer in answers:
        for name in _WEIGHTS:
            if answer.get(name, 1) not in (0, 1, "0", "1"):
                raise ValueError(
                    f"{where}: an answer has {name}={answer[name]!r}; expected 1 or true to learn it, else 0 or false"
                )


def gsm8k_answer(answer: str) -> str | None:
    """The number after the last `####`, without thousands separators; None without a mark.

    >>> gsm8k_answer("She has 1,000 + 5 = 1005. #### 1,005")
    '1005'
    """
    head, mark, number = answer.rpartition("####")
    return number.strip().replace(",", "") if mark else None


def _check_is_text(where: str, fields: Mapping[str, Any]) -> None:
    """Raises ValueError for images, videos or sounds in a row or a message: without them it would ask for a guess."""
    for name in _MEDIA:
        if fields.get(name) not in (None, "", [], {}):
            raise ValueError(f"{where}: the field {name!r} is more than text; expected rows of text alone")


def _text(row: Record, key: str, value: Any) -> str | Messages:
    """A prompt string, or checked chat messages."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{row.where}: {key} is a {type(value).__name__}; expected a string or a list of chat messages"
        )
    return [_message(f"{row.where}: {key}[{at}]", _without_gaps(row, message)) for at, message in enumerate(value)]


def _message(where: str, value: Any) -> dict[str, Any]:
    """A message with the fields that chat templates read: texts, numbers, and calls of tools."""
    fields = {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else {}
    content = _content(f"{where}.content", fields.pop("content", None))
    role, calls = fields.pop("role", None), fields.pop("tool_calls", None) or []
    if not isinstance(role, str) or not (isinstance(content, str) or (content is None and calls)):
        raise ValueError(f'{where} is not {{"role": string, "content": string}}')
    _check_is_text(where, fields)
    if "function_call" in fields:
        raise ValueError(f"{where} has a function_call; expected tool_calls: {_CALL}")
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls is a {type(calls).__name__}; expected a list of {_CALL}")
    message: dict[str, Any] = {"role": role, "content": content}
    message |= {name: part for name, part in fields.items() if isinstance(part, (str, bool, int, float))}
    if calls:
        message["tool_calls"] = [_call(f"{where}.tool_calls[{at}]", call) for at, call in enumerate(calls)]
    return message


def _content(where: str, content: Any) -> Any:
    """The content; parts that are all text as one string.  Raises ValueError for another part."""
    if not isinstance(content, list):
        return content
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"{where}[{number}] has the type {kind!r}; expected messages of text alone")
    return "".join(part["text"] for part in content)


def _call(where: str, call: Any) -> dict[str, Any]:
    """A call of a tool, its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") or {} if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise ValueError(f"{where} is not {_CALL}")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(row: Record) -> Tools | None:
    """The functions of a row's field `tools`, which may be JSON text; None if it is no list of them.

    Names of tools are no functions, and the row has none.  Hermes' form becomes OpenAI's.
    """
    tools = row.fields.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return None
    if not tools or (isinstance(tools, list) and all(isinstance(tool, str) for tool in tools)):
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return None
    tools = [_without_gaps(row, tool) for tool in tools]
    wrapped = [
        {"type": "function", "function": tool} if {"name", "parameters"} <= tool.keys() else tool for tool in tools
    ]
    return wrapped if all(isinstance(tool.get("function"), dict) for tool in wrapped) else None


def _without_gaps(row: Record, value: Any) -> Any:
    """The value without the fields that only other rows have, if its file fills these with nulls."""
    if isinstance(value, dict) and row.has_gaps:
        return {name: _without_gaps(row, part) for name, part in value.items() if part is not None}
    if isinstance(value, list) and row.has_gaps:
        return [_without_gaps(row, part) for part in value]
    return value


def _ground_truth(where: str, fields: dict[str, Any], key: str, is_question: bool) -> Any:
    """The expected answer as it is, removed from `fields` if it has its own key; None if the row has none, or NaN.

    If it is a solution that ends with `####` and a number, the number is returned; the solution stays in `fields`.
    """
    value = fields.pop(key, None)
    if isinstance(value, str) and _SOLUTION.search(value):
        fields[key] = value
    if value is None and isinstance(fields.get("reward_model"), dict):
        value = fields["reward_model"].get("ground_truth")
    if isinstance(value, str) and _SOLUTION.search(value):
        value = gsm8k_answer(value)
    if value is None and is_question and isinstance(fields.get("answer"), str):
        value = gsm8k_answer(fields["answer"])
        if value is None:
            raise ValueError(f"{where}: the answer has no '####' before its number; expected that, or the key {key!r}")
    return None if isinstance(value, float) and math.isnan(value) else value


def _response(row: Record, key: str, *, is_chat: bool) -> Messages:
    """The answer as messages, the last of them by the assistant; behind a chat prompt it may be written as these."""
    value = row.fields[key]
    if isinstance(value, str):
        return [{"role": ASSISTANT, "content": value}]
    messages = _text(row, key, value) if is_chat and isinstance(value, list) and value else ""
    if isinstance(messages, str) or messages[-1]["role"] != ASSISTANT:
        more = ", or messages of which the last is the assistant's" * is_chat
        raise ValueError(f"{row.where}: {key} is a {type(value).__name__}; expected a string{more}")
    return messages


def _as_user(question: str, has_chat_template: bool) -> str | Messages:
    return [{"role": "user", "content": question}] if has_chat_template else question


def _no_prompt(row: Record, prompt_key: str) -> str:
    return f"{row.where}: no prompt; expected the key {prompt_key!r}, 'messages' or 'question', the row has " + _keys(
        row.fields
    )


def _keys(fields: dict[str, Any]) -> str:
    return ", ".join(repr(key) for key in fields) or "no keys"
