"""`agent.fn=tools:my_tools.py:Class`: a class whose public methods are tools, in the shape of TRL's environments.

Each episode has an object of its own.  `reset(**row)` begins it; its text, if any, is appended to the prompt.  The
model then calls methods until it answers without a call.  Type hints and docstrings of the methods (Google's style,
every parameter described) become the JSON schemas that the model sees; an error of a method becomes the answer of the
call.  `reward`, a number, a property or a method, is the reward; a method may take the text of the last answer.
A class without `reward` leaves the last answer to reward.fn.  What is not `async` runs in threads.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from megarl.agents.chat import Chat, OverLimit, ToolRequest, shown
from megarl.plugins.load import describe, is_async, user_function
from megarl.samples.sample import Prompt

_NO_TOOLS = ("reset", "reward")
_MALFORMED = json.dumps({"error": "a tool call could not be read; expected a JSON object with name and arguments"})
Episode = Callable[[Chat, Prompt], Awaitable[Any]]


def load(address: str, arguments: Mapping[str, Any]) -> Episode:
    """The episode of the class at `address`, which is called with `arguments`.  Raises ValueError for a bad class."""
    setting = f"agent.fn=tools:{address}"
    make = partial(user_function(setting, address), **arguments)
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{setting}: calling it failed with {type(error).__name__}: {error}") from error
    methods = (name for name, _ in inspect.getmembers(type(made), _is_method) if not name.startswith("_"))
    names = [name for name in methods if name not in _NO_TOOLS]
    if not names:
        raise ValueError(f"{setting}: it has no public method besides reset and reward; expected one for each tool")
    schemas = [_schema(setting, made, name) for name in names]

    async def episode(chat: Chat, prompt: Prompt) -> Any:
        tools = await in_thread(make)
        messages = chat.messages
        text = ""
        begin = getattr(tools, "reset", None)
        row = {"prompt": prompt.text, "ground_truth": prompt.ground_truth, "data_source": prompt.data_source}
        if begin and (begun := await called(begin, **_taken(begin, {**row, **prompt.extra}))) is not None:
            messages[-1]["content"] += shown(begun)
        try:
            while True:
                answer = await chat(messages, tools=schemas)
                text = answer.text
                messages.append(answer.message)
                if not answer.tool_calls and not answer.malformed_calls:
                    break
                for call in answer.tool_calls:
                    messages.append(await _response(tools, names, call))
                if answer.malformed_calls:  # the model sees what was wrong: behind the responses, or in a question
                    messages += [] if answer.tool_calls else [{"role": "user", "content": ""}]
                    messages[-1]["content"] = f"{messages[-1]['content']}\n{_MALFORMED}".lstrip()
        except OverLimit:  # scored as it stands
            pass
        return await _reward(tools, text)

    return episode


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or inspect.ismethod(value)  # the second: of the class


def _schema(setting: str, made: Any, name: str) -> dict[str, Any]:
    try:
        return dict(get_json_schema(getattr(made, name)))
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(f"{setting}: the tool {name}: {' '.join(str(error).split())}") from error


def _taken(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values for which the function has parameters."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return values
    return {name: value for name, value in values.items() if name in parameters}


async def _response(tools: Any, names: list[str], call: ToolRequest) -> dict[str, Any]:
    """What the tool returns, or its error: the model sees what is wrong with its call."""
    if call.name not in names:
        return call.response({"error": f"there is no tool {call.name}; there are {', '.join(names)}"})
    try:
        return call.response(await called(getattr(tools, call.name), **call.arguments))
    except (Exception, SystemExit) as error:
        return call.response({"error": f"{type(error).__name__}: {error}"})


async def _reward(tools: Any, text: str) -> Any:
    reward = await in_thread(partial(getattr, tools, "reward", None))  # a property computes
    if not callable(reward):
        return reward
    return await called(reward, *[text] * bool(inspect.signature(reward).parameters))


async def called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result; an ordinary function runs in a thread, so that other episodes go on."""
    if is_async(function):
        return await function(*args, **kwargs)
    return await in_thread(partial(function, *args, **kwargs))


async def in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread of its own: one that hangs keeps no other waiting, nor the end of the process.

    Raises what it raises; what is no Exception, such as SystemExit, as a RuntimeError.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # cancelled
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            passes = isinstance(raised, Exception) and not isinstance(raised, StopIteration)  # futures refuse that
            error = raised if passes else RuntimeError(describe(raised))
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="tool", daemon=True).start()
    return await done
