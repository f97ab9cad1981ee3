"""Classes with tools: what the model is shown, what it gets back, and what the reward is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from agent_endpoint import Scripted, endpoint_of

from megarl.agents.chat import Chat
from megarl.agents.load import load_episode
from megarl.sample import Prompt

CLASS = '''
class Tools:
    def __init__(self, start: int = 0) -> None:
        self.sum, self.seen = start, []

    def reset(self, ground_truth: str, level: int) -> str:
        self.wanted = int(ground_truth)
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

    def _hidden(self) -> None: ...

    REWARD
'''


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def episode_of(reward: str, texts: list[str], **arguments: Any) -> tuple[Any, list[str]]:
    """The reward of an episode in which the model writes `texts`, and the prompts that its server got."""
    Path("mine.py").write_text(CLASS.replace("REWARD", reward))
    function = load_episode("tools:mine.py:Tools", arguments)
    assert function.way == "chat"

    async def run() -> Any:
        async with endpoint_of(Scripted("qwen2_5", texts), style="qwen2_5") as (endpoint, (bodies,)):
            session = endpoint.open("0-0/0")
            chat = Chat(session, [{"role": "user", "content": "Add!"}])
            found = await function.call(chat=chat, prompt=Prompt("0-0", [1], "Add!", "15", extra={"level": 3}))
            return found, [session.policy.text(body["input_ids"]) for body in bodies]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "reward",
    [
        "@property\n    def reward(self): return float(self.sum == self.wanted)",
        "def reward(self): return float(self.sum == self.wanted)",
        "async def reward(self, answer): return float(self.sum == self.wanted and answer == 'Done.')",
    ],
    ids=["property", "method", "of_the_answer"],
)
def test_the_model_calls_methods_until_it_answers(reward: str) -> None:
    found, prompts = episode_of(reward, [call("add", a=4, b=5) + call("add", a=3), "Done."], start=2)
    assert found == 1.0
    assert "Add! (level 3)" in prompts[0]
    assert '"name": "add"' in prompts[0] and "Adds both to the sum." in prompts[0] and "_hidden" not in prompts[0]
    assert prompts[1].count("<tool_response>") == 2 and "\n11\n" in prompts[1] and "\n15\n" in prompts[1]


def test_a_class_without_reward_leaves_it_to_the_reward_function() -> None:
    assert episode_of("", ["15"])[0] is None


def test_errors_are_answers_that_the_model_sees() -> None:
    texts = [call("fail"), call("subtract", a=1), call("add", c=1), call("_hidden"), "Oh."]
    found, prompts = episode_of("reward = 0.5", texts)
    assert found == 0.5
    last = prompts[-1]
    assert '{"error": "OSError: no luck"}' in last
    assert '{"error": "there is no tool subtract; there are add, fail"}' in last
    assert "unexpected keyword argument 'c'" in last
    assert '{"error": "there is no tool _hidden; there are add, fail"}' in last


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
