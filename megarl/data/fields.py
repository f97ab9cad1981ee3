"""Reads prompts and examples from rows: the supported data set formats.

{"prompt": "12+34=", "ground_truth": "46", "data_source": "arithmetic"}      a string, used as it is
{"prompt": [{"role": "user", "content": "..."}], ...}                        chat messages
{"messages": [...], "ground_truth": "46"}                                    the same with the common key
{"question": "...", "answer": "... #### 42"}                                 GSM8K
{"prompt": [...], "reward_model": {"ground_truth": "42"}}                    the parquet rows of verl's examples
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.data.readers import Record

Messages = list[dict[str, str]]

# What a row or a part of a message may hold besides text.
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio")


@dataclass(frozen=True)
class Question:
    """A row with the fields that the reward needs, not tokenised yet."""

    where: str
    text: str | Messages
    ground_truth: str | None
    data_source: str
    extra: dict[str, Any]  # all other fields


@dataclass(frozen=True)
class Example:
    """A prompt and the answer to learn."""

    where: str
    text: str | Messages
    response: str


def question_of(row: Record, *, prompt_key: str, ground_truth_key: str, has_chat_template: bool) -> Question:
    """A row for reinforcement learning.  Raises ValueError that starts with file:line."""
    _check_is_text(row)
    fields = dict(row.fields)
    if fields.get(prompt_key) is not None:
        text = _text(row.where, prompt_key, fields.pop(prompt_key))
    elif fields.get("messages") is not None:
        text = _text(row.where, "messages", fields.pop("messages"))
    elif isinstance(fields.get("question"), str):
        text = _as_user(fields.pop("question"), has_chat_template)
    else:
        raise ValueError(_no_prompt(row, prompt_key))
    if isinstance(text, list) and text[-1]["role"] == "assistant":
        raise ValueError(
            f"{row.where}: the last message is the assistant's; expected a prompt that ends with a question"
        )
    ground_truth = _ground_truth(row.where, fields, ground_truth_key, "question" in row.fields)
    data_source = fields.pop("data_source", None)
    return Question(row.where, text, ground_truth, "" if data_source is None else str(data_source), fields)


def example_of(row: Record, *, prompt_key: str, response_key: str, has_chat_template: bool) -> Example:
    """A row for SFT: prompt and response, messages that end with an answer, or GSM8K's question and answer.

    Raises ValueError that starts with file:line.
    """
    _check_is_text(row)
    fields = row.fields
    if fields.get(response_key) is not None and fields.get(prompt_key) is not None:
        return Example(row.where, _text(row.where, prompt_key, fields[prompt_key]), _response(row, response_key))
    if fields.get("messages") is not None:
        messages = _text(row.where, "messages", fields["messages"])
        if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise ValueError(f"{row.where}: expected messages of at least two turns, the last by the assistant")
        return Example(row.where, messages[:-1], messages[-1]["content"])
    if isinstance(fields.get("question"), str) and fields.get("answer") is not None:
        return Example(row.where, _as_user(fields["question"], has_chat_template), _response(row, "answer"))
    raise ValueError(
        f"{row.where}: expected the keys {prompt_key!r} and {response_key!r}, 'messages', or 'question' and 'answer'; "
        f"the row has {_keys(fields)}"
    )


def gsm8k_answer(answer: str) -> str | None:
    """The number after the last `####`, without thousands separators; None without a mark.

    >>> gsm8k_answer("She has 1,000 + 5 = 1005. #### 1,005")
    '1005'
    """
    head, mark, number = answer.rpartition("####")
    return number.strip().replace(",", "") if mark else None


def _check_is_text(row: Record) -> None:
    """Raises ValueError for a row with images, videos or sounds: trained without them, it would ask for a guess."""
    for name in _MEDIA:
        if row.fields.get(name) not in (None, "", [], {}):
            raise ValueError(f"{row.where}: the field {name!r} is more than text; expected rows of text alone")


def _text(where: str, key: str, value: Any) -> str | Messages:
    """A prompt string, or checked chat messages."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: {key} is a {type(value).__name__}; expected a string or a list of chat messages")
    messages: Messages = []
    for number, message in enumerate(value):
        fields = message if isinstance(message, dict) else {}
        _check_parts(where, f"{key}[{number}].content", fields.get("content"))
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            raise ValueError(f'{where}: {key}[{number}] is not {{"role": string, "content": string}}')
        messages.append({"role": fields["role"], "content": fields["content"]})
    return messages


def _check_parts(where: str, field: str, content: Any) -> None:
    """Raises ValueError for a part of a message that is no text."""
    for number, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _PARTS:
            raise ValueError(f"{where}: {field}[{number}] has the type {kind!r}; expected messages of text alone")


def _ground_truth(where: str, fields: dict[str, Any], key: str, is_question: bool) -> str | None:
    """The expected answer, removed from `fields` if it has its own key; None if the row has none."""
    value = fields.pop(key, None)
    if value is None and isinstance(fields.get("reward_model"), dict):
        value = fields["reward_model"].get("ground_truth")
    if value is None and is_question and isinstance(fields.get("answer"), str):
        value = gsm8k_answer(fields["answer"])
        if value is None:
            raise ValueError(f"{where}: the answer has no '####' before its number; expected that, or the key {key!r}")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{where}: {key} is a {type(value).__name__}; expected a string or a number")


def _response(row: Record, key: str) -> str:
    value = row.fields[key]
    if not isinstance(value, str):
        raise ValueError(f"{row.where}: {key} is a {type(value).__name__}; expected a string")
    return value


def _as_user(question: str, has_chat_template: bool) -> str | Messages:
    return [{"role": "user", "content": question}] if has_chat_template else question


def _no_prompt(row: Record, prompt_key: str) -> str:
    return f"{row.where}: no prompt; expected the key {prompt_key!r}, 'messages' or 'question', the row has " + _keys(
        row.fields
    )


def _keys(fields: dict[str, Any]) -> str:
    return ", ".join(repr(key) for key in fields) or "no keys"
