"""A tokenizer's chat template, as conversations of several turns need it: the whole prompt, and what follows an answer.

Templates do not only append.  Some remove the reasoning of earlier answers, move the system prompt, or write other
spaces than the model did, so a conversation that is rendered again is often not the one that the model saw.  `bridge`
renders only what follows an answer: the end of the answer's turn, the new messages, and the header of the next answer.
It renders them behind a short stand-in for the conversation whose answer holds a marker, and cuts behind the marker.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

OPEN, CLOSE = "<think>", "</think>"  # around the reasoning in an answer
CHARS_OF_TOKEN = 16  # a text of so many characters for each token is probably too long
MARKERS = ("zqmarkerzq", "qxothermarkxq")  # letters only: they merge with no neighbour that a template writes
_QUESTION: Message = {"role": "user", "content": "x"}
PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    },
)


class Bridge(NamedTuple):
    """What follows an answer.  Example, ChatML: <|im_end|>, and the ids of "\\n<|im_start|>user\\nhi<|im_end|>..."."""

    end_id: int  # the special token between the answer and `ids`
    ids: list[int]
    end_is_header: bool  # the end token begins the next message (GLM), so an answer that ended otherwise needs it too

    def after(self, last_id: int, *, ended: bool) -> list[int]:
        """The ids behind an answer whose last token is `last_id`; `ended`: it is a stop token, not the length limit.

        A stop token of the model stands in the place of the template's end token, also where the two differ.
        """
        has_end = last_id == self.end_id or (ended and not self.end_is_header)
        return self.ids if has_end else [self.end_id, *self.ids]


class ChatTemplate:
    """Example: ChatTemplate(tokenizer).whole([{"role": "user", "content": "hi"}]).

    Args:
        stop_ids: tokens that end an answer, besides the tokenizer's end-of-text token (GLM ends at a role's token).
        settings: further variables of the template, such as enable_thinking=False.
    Raises ValueError if the tokenizer has no chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Iterable[int] = (), settings: Mapping[str, Any] = {}
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"model.tokenizer_path={tokenizer.name_or_path}: the tokenizer has no chat template, which "
                "conversations need; expected a tokenizer with one"
            )
        self._tokenizer, self.settings = tokenizer, dict(settings)
        self.stop_ids = frozenset(stop_ids) | {tokenizer.eos_token_id}
        self.special_ids = self.stop_ids | frozenset(tokenizer.all_special_ids)
        self._arguments: Callable[[Any], Any] = self._arguments_form()
        self._reasons: dict[tuple[tuple[str, ...], bool], str | None] = {}
        self._left_out: dict[tuple[Any, ...], str | None] = {}

    # ---- rendering

    def whole(self, messages: Sequence[Message], tools: Tools = (), enough: int | None = None) -> list[int]:
        """Ids of all messages and the header of the next answer; `enough`: see `ids`.

        Raises ValueError if the template refuses them.
        """
        return self.ids(self.text(messages, tools, answer_follows=True), enough)

    def text(self, messages: Sequence[Message], tools: Tools = (), *, answer_follows: bool) -> str:
        """The messages as the template writes them, and with `answer_follows` the header of the next answer.

        Raises ValueError if the template refuses them.
        """
        prepared = [self._prepared(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                prepared,
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=answer_follows,
                tokenize=False,
                **self.settings,
            )
        except Exception as error:  # a template is a program, and raises errors of many types
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the chat template refuses these messages: {reason}") from error
        return str(text)

    def check_written(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises ValueError if the template refuses the messages, or leaves out a message, their tools, or a call.

        What it leaves out depends on roles and fields, so messages of the same shape are rendered once.
        """
        shape = (bool(tools), *(_shape(message) for message in messages))
        if shape not in self._left_out:
            self._left_out[shape] = self._what_is_left_out(messages, tools)
        if (what := self._left_out[shape]) is not None:
            raise ValueError(
                f"the chat template leaves out {what}; expected a template that writes it, or rows without"
            )

    def bridge(
        self, answer: Message, tail: Sequence[Message], tools: Tools = (), enough: int | None = None
    ) -> Bridge | None:
        """What follows `answer`, of which only the tool calls count: the messages `tail` and the next answer's header.

        `enough`: see `ids`.  None if the template does not allow it; `why_no_bridge` then has the reason.
        """
        if self.why_no_bridge(tail, with_tools=bool(tools)) is not None:
            return None
        try:
            return self._bridge(answer, tail, tools, MARKERS[0], enough)
        except ValueError:
            return None

    def why_no_bridge(self, tail: Sequence[Message], *, with_tools: bool) -> str | None:
        """A sentence on why messages with these roles cannot be appended to an answer; None if they can."""
        shape = tuple(message["role"] for message in tail), with_tools
        if shape not in self._reasons:
            self._reasons[shape] = self._probe(*shape)
        return self._reasons[shape]

    def check(self, *, with_tools: bool) -> str | None:
        """A sentence on why a user's message, or with tools a tool's response, has no bridge; None if both have one."""
        reasons = [
            self.why_no_bridge([{"role": role}], with_tools=with_tools) for role in ("user", "tool")[: 1 + with_tools]
        ]
        return next((reason for reason in reasons if reason is not None), None)

    def written_call(self, call_id: str) -> str:
        """What an answer that calls `look` of PROBE_TOOLS with a marker says; "" if the template does not write it."""
        call = {"tool_calls": [_call(call_id, "look", {})]}
        try:
            said, called = (
                self.text([_QUESTION, _marked(answer, MARKERS[0])], PROBE_TOOLS, answer_follows=False)
                for answer in ({}, call)
            )
        except ValueError:
            return ""
        return called[len(os.path.commonprefix([said, called])) :] if MARKERS[0] in called else ""

    # ---- inside

    def _what_is_left_out(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """What the template does not write, of messages whose texts and calls are markers; None if it writes all."""
        if tools and self.text(messages, tools, answer_follows=False) == self.text(messages, answer_follows=False):
            return "the tools"
        marked: list[Message] = []
        given: dict[str, str] = {}  # what each marker stands for
        for at, message in enumerate(messages):
            role, calls = message["role"], message.get("tool_calls") or ()
            marks = [f"{MARKERS[0]}{at}x{number}{MARKERS[1]}" for number in range(len(calls) + 1)]
            out = dict(message)
            if message.get("content"):
                out["content"] = marks[-1]
                given[marks[-1]] = f"the text of the message of role {role!r}{' with calls' * bool(calls)}"
            if calls:
                out["tool_calls"] = [
                    {**call, "function": {"name": mark, "arguments": {"at": mark}}}
                    for call, mark in zip(calls, marks, strict=False)
                ]
                given |= dict.fromkeys(marks[:-1], f"a call of the message of role {role!r}")
            marked.append(out)
        text = self.text(marked, tools, answer_follows=False)
        return next((what for mark, what in given.items() if mark not in text), None)

    def _bridge(
        self, answer: Message, tail: Sequence[Message], tools: Tools, marker: str, enough: int | None = None
    ) -> Bridge:
        """Raises ValueError if the end of the answer is not where a marker ends, at a special token."""
        stand_in = [_QUESTION, _marked(answer, marker)]
        alone = self.text(stand_in, tools, answer_follows=False)
        num_markers = alone.count(marker)
        followed = self.text([*stand_in, *tail], tools, answer_follows=True)
        if not num_markers or followed.count(marker) < num_markers:
            raise ValueError("the template leaves out an answer, or a part of it")
        # Special tokens are atomic: behind one, this text has the same tokens as in the whole conversation.
        end = self.ids(alone.split(marker, num_markers)[-1])
        behind = self.ids(followed.split(marker, num_markers)[-1], enough)
        at = _common(end, behind)
        for kind in (self.stop_ids, self.special_ids):
            inside = [i for i in range(at) if behind[i] in kind]
            if inside[1:] and inside[-1] == at - 1 < len(end) - 1:  # it begins a header that is always written
                inside.pop()
            if inside:
                return Bridge(behind[inside[-1]], behind[inside[-1] + 1 :], end_is_header=False)
            if at < len(behind) and behind[at] in kind:
                return Bridge(behind[at], behind[at + 1 :], end_is_header=at == len(end))
        raise ValueError("no special token ends an answer")

    def _probe(self, roles: tuple[str, ...], with_tools: bool) -> str | None:
        tools = PROBE_TOOLS if with_tools else ()
        num_calls = next((i for i, role in enumerate(roles) if role != "tool"), len(roles))
        calls = [_call(f"call0000{i}", "look", {"at": "here"}) for i in range(num_calls)]
        answer = {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}
        tail = [_probe_message(role, i) for i, role in enumerate(roles)]
        named = f"the chat template cannot append ({', '.join(roles)}) to an answer{' with tools' * with_tools}"
        try:
            first, second = (self._bridge(answer, tail, tools, marker) for marker in MARKERS)
        except ValueError as error:
            return f"{named}: {error}"
        if first != second:
            return f"{named}: what follows an answer depends on its text"
        text, at = str(self._tokenizer.decode(first.ids)), 0
        for message in tail:
            at = text.find(message["content"], at)
            if at < 0:
                return f"{named}: the message of role {message['role']} is left out"
        return None

    def _arguments_form(self) -> Callable[[Any], Any]:
        """Templates take a call's arguments as an object, as transformers documents it; some only as JSON text."""
        probe = [
            _QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [_call("call00000", "look", {"at": "x"})]},
        ]
        self._arguments = _as_object
        try:
            self.text(probe, PROBE_TOOLS, answer_follows=False)
        except ValueError:
            return _as_text
        return _as_object

    def _prepared(self, message: Message) -> dict[str, Any]:
        """A message with the arguments of its tool calls in the form that the template takes."""
        out = dict(message)
        if calls := message.get("tool_calls"):
            out["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": self._arguments(call["function"]["arguments"])}}
                for call in calls
            ]
        return out

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def ids(self, text: str, enough: int | None = None) -> list[int]:
        """Ids of a text that was rendered; `enough`: of one that has many more, only the first, more than these."""
        if enough is not None:
            text = front(self._tokenizer, text, enough, self._longest_token)
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


def front(tokenizer: PreTrainedTokenizerBase, text: str, enough: int, unsure: int) -> str:
    """A text, or so much of it that has certainly more than `enough` tokens.

    `unsure`: the last characters of a part, which may be within a longer token of the whole text.
    """
    part = text[: CHARS_OF_TOKEN * enough + unsure]
    if len(part) == len(text):
        return text
    ids = tokenizer.encode(part, add_special_tokens=False, verbose=False)
    return part if len(ids) > enough + unsure else text


def _marked(answer: Message, marker: str) -> dict[str, Any]:
    """The answer with the marker where its text ends: in the arguments of its calls if it has any."""
    calls = answer.get("tool_calls") or []
    if not calls:
        return {"role": "assistant", "content": marker}
    marked = [
        _call(call.get("id") or f"call0000{i}", call["function"]["name"], {"at": marker})
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": marked}


def _shape(message: Message) -> tuple[Any, ...]:
    """What decides whether a template writes a message: its role, its fields, and which parts it has."""
    return message["role"], frozenset(message), bool(message.get("content")), len(message.get("tool_calls") or ())


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _probe_message(role: str, at: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": f"probe{at}text"}
    return message | ({"tool_call_id": f"call0000{at}", "name": "look"} if role == "tool" else {})


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):  # a model's own malformed call, sent back as it is
        return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
