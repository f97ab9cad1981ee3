"""Classes with tools: what the model is shown, what it gets back, and what the reward is."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_endpoint import Scripted, endpoint_of
from pools import until

from megarl.agents.chat import Chat
from megarl.agents.load import load_episode
from megarl.plugins.load import user_function
from megarl.samples.sample import Prompt

CLASS = '''
import asyncio, sys

def in_loop():
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return 0.0
    return 1.0

class Tools:
    def __init__(self, start: int = 0) -> None:
        self.sum, self.loops = start, in_loop()

    def reset(self, ground_truth: str, level: int) -> str:
        self.wanted, self.loops = int(ground_truth), self.loops + in_loop()
        return f" (level {level})"

    def add(self, a: int, b: int = 1) -> int:
        """Adds both to the sum.

        Args:
            a: The first.
            b: The second.
        """
        self.sum += a + b
        return self.sum

    async def fail(self) -> str:
        """Fails."""
        raise OSError("no luck")

    def leave(self) -> None:
        """Leaves."""
        sys.exit(3)

    async def leave_too(self) -> None:
        """Leaves."""
        sys.exit(4)

    @staticmethod
    def twice(function: str) -> str:
        """Twice.

        Args:
            function: What is said twice.
        """
        return function * 2

    @classmethod
    def whose(cls, name: str) -> str:
        """Whose it is.

        Args:
            name: Of the thing.
        """
        return f"{name} of {cls.__name__}"

    def _hidden(self) -> None: ...

    REWARD
'''


ALL = "add, fail, leave, leave_too, twice, whose"


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def episode_of(reward: str, texts: list[str], **arguments: Any) -> tuple[Any, list[str]]:
    """The reward of an episode in which the model writes `texts`, and the prompts that its server got."""
    Path("mine.py").write_text(CLASS.replace("REWARD", reward))
    function = load_episode("tools:mine.py:Tools", arguments)
    assert function.way == "chat"
    async with endpoint_of(Scripted("qwen2_5", texts), style="qwen2_5") as (endpoint, (bodies,)):
        session = endpoint.open("0-0/0")
        chat = Chat(session, [{"role": "user", "content": "Add!"}])
        found = await function.call(chat=chat, prompt=Prompt("0-0", [1], "Add!", "15", extra={"level": 3}))
        return found, [session.policy.text(body["input_ids"]) for body in bodies]


@pytest.mark.parametrize(
    "reward",
    [
        "@property\n    def reward(self): return float(self.sum == self.wanted)",
        "def reward(self): return float(self.sum == self.wanted)",
        "async def reward(self, answer): return float(self.sum == self.wanted and answer == 'Done.')",
    ],
    ids=["property", "method", "of_the_answer"],
)
async def test_the_model_calls_methods_until_it_answers(reward: str) -> None:
    found, prompts = await episode_of(reward, [call("add", a=4, b=5) + call("add", a=3), "Done."], start=2)
    assert found == 1.0
    assert "Add! (level 3)" in prompts[0]
    assert '"name": "add"' in prompts[0] and "Adds both to the sum." in prompts[0] and "_hidden" not in prompts[0]
    assert prompts[1].count("<tool_response>") == 2 and "\n11\n" in prompts[1] and "\n15\n" in prompts[1]


async def test_a_class_without_reward_leaves_it_to_the_reward_function() -> None:
    assert (await episode_of("", ["15"]))[0] is None


async def test_errors_are_answers_that_the_model_sees() -> None:
    """Also of a tool that leaves the program: it ends nothing."""
    texts = [call("fail"), call("subtract", a=1), call("add", c=1), call("_hidden"), call("leave"), call("leave_too")]
    found, prompts = await episode_of("reward = 0.5", [*texts, "Oh."])
    assert found == 0.5
    for error in (
        "OSError: no luck",
        f"there is no tool subtract; there are {ALL}",
        f"there is no tool _hidden; there are {ALL}",
        "SystemExit: 4",
    ):
        assert f'{{"error": "{error}"}}' in prompts[-1]
    assert "unexpected keyword argument 'c'" in prompts[-1]
    assert '{"error": "RuntimeError: SystemExit: 3 (' in prompts[-1]


ODD = '''
import dataclasses, datetime, decimal
import numpy as np

@dataclasses.dataclass
class Point:
    x: int

class Loop:
    def __str__(self): return "a loop"

class Broken:
    def __str__(self): raise KeyError("no text")

held = [Loop()]
held.append(held)
VALUES = [
    np.int64(3), np.arange(2), decimal.Decimal("1.5"), {7}, b"abc", Point(5), datetime.date(2026, 1, 2), "x\\ud800y",
    {(1, 2): 3}, {"a": {np.float32(0.5)}}, None, held, float("nan"),
    Broken(), {"a": Broken()},
]

class Tools:
    reward = 0.25

    def get(self, at: int) -> str:
        """Gets.

        Args:
            at: Where.
        """
        return VALUES[at]
'''
SHOWN = [
    "3",
    "[0, 1]",
    '"1.5"',
    "[7]",
    '"abc"',
    '{"x": 5}',
    '"2026-01-02"',
    "x?y",
    "{(1, 2): 3}",
    '{"a": [0.5]}',
    "null",
]


async def test_a_tool_may_return_anything() -> None:
    Path("mine.py").write_text(ODD)
    function = load_episode("tools:mine.py:Tools", {})
    server = Scripted("qwen2_5", [*(call("get", at=at) for at in range(len(SHOWN) + 4)), "Done."])
    async with endpoint_of(server, style="qwen2_5") as (endpoint, (bodies,)):
        session = endpoint.open("0-0/0")
        chat = Chat(session, [{"role": "user", "content": "?"}])
        assert await function.call(chat=chat, prompt=Prompt("0-0", [1], "?")) == 0.25
        responses = session.policy.text(bodies[-1]["input_ids"]).split("<tool_response>\n")[1:]
    seen = [response.split("\n</tool_response>")[0] for response in responses]
    assert seen[: len(SHOWN)] == SHOWN
    holds_itself, no_number, broken, holds_broken = seen[len(SHOWN) :]
    assert holds_itself.startswith("[<") and no_number == "NaN"
    assert broken == "a Broken that cannot be shown as text (KeyError)" and holds_broken.startswith("{'a': <")


async def test_a_call_that_cannot_be_read_is_answered_with_an_error() -> None:
    broken = '<tool_call>{"name": "add", "arguments": "x"}</tool_call>'
    found, prompts = await episode_of("reward = 0.5", [broken, call("add", a=4) + broken, "Done."])
    error = '{"error": "a tool call could not be read; expected a JSON object with name and arguments"}'
    assert (found, len(prompts)) == (0.5, 3)
    assert f"<|im_start|>user\n{error}<|im_end|>" in prompts[1]
    assert f"<tool_response>\n5\n{error}\n</tool_response>" in prompts[2]


async def test_methods_without_self_and_parameters_of_any_name_are_tools() -> None:
    _, prompts = await episode_of("reward = 0.5", [call("twice", function="ho"), call("whose", name="pen"), "Oh."])
    assert '"function": {"type": "string", "description": "What is said twice."}' in prompts[0]
    assert "\nhoho\n" in prompts[-1] and "\npen of Tools\n" in prompts[-1]


async def test_what_is_not_async_runs_in_threads() -> None:
    """The event loop goes on while an object is made, is reset, and counts its reward."""
    reward = "@property\n    def reward(self): return self.loops + in_loop()"
    assert (await episode_of(reward, ["Oh."]))[0] == 0.0


HUNG = '''
import threading

left, go = [], threading.Event()

class Tools:
    reward = 1.0

    def hang(self):
        """Hangs."""
        go.wait(60)
        left.append(1)

    def work(self):
        """Works."""
'''


async def test_calls_that_hang_keep_neither_other_episodes_nor_the_end_waiting() -> None:
    Path("mine.py").write_text(HUNG)
    function = load_episode("tools:mine.py:Tools", {})
    mine = sys.modules[user_function("test", "mine.py:Tools").__module__]

    num = min(32, (os.cpu_count() or 1) + 4) + 1  # one more than asyncio's own threads
    server = Scripted("qwen2_5", [call("hang")] * num + [call("work"), "Done."])
    async with endpoint_of(server, style="qwen2_5") as (endpoint, (bodies,)):

        def begun(name: str) -> asyncio.Task[Any]:
            chat = Chat(endpoint.open(name), [{"role": "user", "content": "?"}])
            return asyncio.ensure_future(function.call(chat=chat, prompt=Prompt("0-0", [1], "?")))

        hung = [begun(f"0-0/{at}") for at in range(num)]
        try:
            await until(lambda: len(bodies) >= num)
            assert await asyncio.wait_for(begun("0-1/0"), 30) == 1.0
            for task in hung:
                task.cancel()
            await asyncio.wait(hung)
            assert mine.left == [], "nothing has waited for them"
        finally:
            mine.go.set()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class Tools:\n    def reset(self): ...", "no public method besides reset and reward"),
        ("class Tools:\n    def add(self, a: int): ...", "the tool add: Cannot generate JSON schema for add"),
        ("class Tools:\n    def __init__(self): 1 / 0", "calling it failed with ZeroDivisionError"),
        ("", "has no function 'Tools'"),
    ],
    ids=["no_tools", "no_docstring", "no_object", "no_class"],
)
def test_a_class_of_another_form_is_refused(source: str, said: str) -> None:
    Path("mine.py").write_text(source)
    with pytest.raises(ValueError, match=r"^agent\.fn=tools:mine\.py:Tools: ") as error:
        load_episode("tools:mine.py:Tools", {})
    assert said in str(error.value)
