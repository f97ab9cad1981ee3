"""What an episode calls to get the model's answers: `answer = await chat(messages, tools=TOOLS)`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from megarl.agents.chat_completions import finish_reason, read
from megarl.agents.refusals import OverLimit, Refused
from megarl.agents.session import Session, closed
from megarl.data.template import Message, Tools
from megarl.samples.float32 import EXPECTED, is_finite

__all__ = ["Chat", "ChatAnswer", "OverLimit", "ToolRequest"]


@dataclass(frozen=True)
class ToolRequest:
    """The model wants this function called.  Example: messages.append(call.response(add(**call.arguments)))."""

    id: str
    name: str
    arguments: dict[str, Any]

    def response(self, content: Any) -> dict[str, Any]:
        """The message that answers the call; a value that is no text becomes JSON, or the text of `str`."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": shown(content)}


def shown(value: Any) -> str:
    """A value that a tool returned, as text; half a character, which no tokenizer accepts, becomes "?"."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    except Exception:  # keys that are no text, a value that holds itself, or one whose own code fails
        try:
            text = str(value)
        except Exception as error:
            text = f"a {type(value).__name__} that cannot be shown as text ({type(error).__name__})"
    return text.encode(errors="replace").decode()


def _plain(value: Any) -> Any:
    """A value that JSON does not know as one that it does."""
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if hasattr(value, "tolist"):  # arrays and numbers of numpy and torch
        return value.tolist()
    return str(value)


@dataclass(frozen=True)
class ChatAnswer:
    """Example, of "<think>so</think>Yes.": text "Yes.", reasoning "so", finish_reason "stop"."""

    text: str  # without reasoning and tool calls
    reasoning: str
    tool_calls: tuple[ToolRequest, ...]
    finish_reason: str  # stop | tool_calls | length
    message: dict[str, Any]  # append it to the messages of the next request
    turn: int  # its number in the episode
    malformed_calls: int = 0  # that the text holds still


class Chat:
    """The model in one episode.

    Example:

        async def episode(chat, prompt):
            messages = chat.messages
            while True:
                answer = await chat(messages, tools=TOOLS)
                messages.append(answer.message)
                if not answer.tool_calls:
                    return float(answer.text == prompt.ground_truth)
                messages += [call.response(run(call.name, call.arguments)) for call in answer.tool_calls]

    Calls may run at the same time, and may begin other conversations, as sub-agents do: everything that the model
    generated in the episode is learnt.
    """

    def __init__(self, session: Session, messages: Sequence[Message]) -> None:
        self._session, self._messages = session, [dict(message) for message in messages]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as messages, with data.system_prompt: a new list at every call."""
        return [dict(message) for message in self._messages]

    async def __call__(
        self, messages: Sequence[Message], *, tools: Tools = (), max_tokens: int | None = None
    ) -> ChatAnswer:
        """The model's answer to the messages.  `tools`: as in OpenAI's chat completions; `max_tokens`: of this answer.

        Raises OverLimit if the episode has no turn or token left; it is then scored as it stands, whether this is
        caught or not.  Raises ValueError if the chat template refuses the messages, Refused for ones of another form.
        """
        await asyncio.sleep(0)  # an agent that only asks again when it is refused stops no other episode
        body = {"messages": list(messages), "tools": list(tools), "max_tokens": max_tokens}
        with self._session.noted():
            request = read(body)
            if request.said:
                raise Refused(400, "tools has some that run at a provider: expected functions alone")
            size = sum(len(message["content"]) for message in request.messages)
            (reply,) = await self._session.chat(request, size)
        calls = tuple(
            ToolRequest(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in reply.message.get("tool_calls", ())
        )
        answer = reply.answer
        return ChatAnswer(
            answer.content,
            answer.reasoning,
            calls,
            finish_reason(reply),
            dict(reply.message),
            reply.turn,
            answer.malformed_calls,
        )

    def reward(self, value: float, answer: ChatAnswer | None = None) -> None:
        """Give a turn a reward of its own: that of `answer`, or the latest one.  Several rewards of a turn add up.

        Raises Refused when the episode is over.
        """
        if self._session.closed:
            raise closed(self._session.name)
        if isinstance(value, bool) or not is_finite(value):
            raise ValueError(f"chat.reward({value!r}): {EXPECTED}")
        turn = len(self._session.conversation.turns) - 1 if answer is None else answer.turn
        if turn < 0:
            raise ValueError(f"chat.reward({value!r}): the model has not answered yet")
        self._session.turn_rewards[turn] += float(value)
