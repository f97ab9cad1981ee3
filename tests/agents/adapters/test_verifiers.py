"""Tasks of the package `verifiers`, in an environment of its own, against our endpoint."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_endpoint import Scripted, endpoint_of

from megarl.agents.adapters.verifiers import WORKER, load
from megarl.data.examples.tiny import tiny_tokenizer
from megarl.data.prompts import Prompts, RowSettings
from megarl.samples.sample import Prompt

TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    truth: str = ""

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace) -> float:
        print("this is no reply")
        return float(trace.last_reply == self.data.truth)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return float(len(trace.last_reply) < 5)

class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a, b in ((12, 34), (1, 2), (7, 7)):
            yield SumTask(SumData(prompt=f"{a}+{b}?", truth=str(a + b)), self.config.task)

__all__ = ["Sums"]
"""


@pytest.fixture
def python() -> str:
    Path("my_sums.py").write_text(TASKSET)
    return os.environ["MEGARL_VERIFIERS_PYTHON"]


def prompt_of(task: dict[str, Any]) -> Prompt:
    return Prompt("0-0", [1], task["prompt"], extra={"task": task})


@pytest.mark.agents
async def test_a_task_is_asked_and_scored_there_and_recorded_here(python: str) -> None:
    function, prompt = load("my_sums", {"python": python}), prompt_of({"prompt": "12+34?", "truth": "46"})
    async with endpoint_of(Scripted("qwen2_5", ["46", "47"]), style="qwen2_5") as (endpoint, _):
        for name, is_right in (("0-0/0", 1.0), ("0-0/1", 0.0)):
            session = endpoint.open(name)
            reward = await function(endpoint.url_of(session) + "/v1", prompt)
            assert reward == {"right": is_right, "brief": 0.5, "score": is_right + 0.5}
            (row,) = session.conversation.rows()
            text = session.policy.text(row.token_ids)
            assert "12+34?" in text and ("46" if is_right else "47") in text
        with pytest.raises(RuntimeError, match="there is no session|is of no session"):
            await function(endpoint.url + "/s/other/v1", prompt)


GAME = TASKSET.replace(
    '__all__ = ["Sums"]',
    """
class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[GameConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            first = await interaction.turn()
            second = await interaction.turn("sure?")
        interaction.trace.record_reward("game", float(first.last_reply + second.last_reply == "onetwo"), 1.0)

__all__ = ["Sums", "Game"]
""",
)
HARNESS = """
import verifiers.v1 as vf
from openai import AsyncOpenAI

class Twice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                messages = [{"role": "user", "content": data.prompt}]
                await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Twice"]
"""


@pytest.mark.agents
async def test_roles_of_any_name_and_harnesses_of_ones_own_are_served(python: str) -> None:
    Path("my_game.py").write_text(GAME)
    Path("my_twice.py").write_text(HARNESS)
    prompt = prompt_of({"prompt": "12+34?", "truth": "46"})
    async with endpoint_of(Scripted("qwen2_5", ["one", "two"]), style="qwen2_5") as (endpoint, _):
        for taskset, settings, rows, wanted in (
            ("my_game", {"player": {"max_turns": 5}, "taskset": {}}, [2], 1.0),
            ("my_sums", {"agent": {"harness": {"id": "my_twice"}}}, [1, 1], None),
        ):
            session = endpoint.open(taskset)
            reward = await load(taskset, {"python": python, **settings})(endpoint.url_of(session) + "/v1", prompt)
            assert wanted is None or reward["game"] == wanted
            assert [len(row.learnt) for row in session.conversation.rows()] == rows


@pytest.mark.agents
async def test_settings_that_are_none_of_the_taskset_are_named(python: str) -> None:
    function = load("my_sums", {"python": python, "player": {"max_turns": 5}})
    with pytest.raises(
        RuntimeError, match=r"exit code 1; .*: error: settings of my_sums: player: Extra inputs are not"
    ):
        await function(NOBODY, prompt_of({"prompt": "x"}))


@pytest.mark.agents
def test_rows_of_data_are_written_for_a_taskset(python: str) -> None:
    command = [python, "-P", str(WORKER), "my_sums", "--rows", "2"]
    Path("tasks.jsonl").write_bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    first, second = Prompts("tasks.jsonl", tiny_tokenizer(), RowSettings(64, shuffle=False)).all()
    assert (first.text, second.text) == ("12+34?", "1+2?")
    assert second.extra["task"] == {"idx": 1, "prompt": "1+2?", "truth": "3"}


def test_an_interpreter_that_is_missing_is_refused_before_a_run() -> None:
    with pytest.raises(ValueError, match=r"agent\.fn=verifiers:x: /.*/no/python is no Python"):
        load("x", {"python": "no/python"})


NOBODY = "http://127.0.0.1:1/v1"


def program(command: str) -> str:
    """Takes the place of a Python."""
    Path("python").write_text(f"#!/bin/sh\n{command}\n")
    Path("python").chmod(0o700)
    return "python"


FAKE = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    reply = json.dumps({"id": request["id"], "rewards": {}, "reward": 1.0})
    print({"good": reply, "cut": reply[:9], "other": "[]", "long": "x" * (1 << 18)}
        [request["task"]], flush=True)
"""


@pytest.mark.parametrize(
    ("wrong", "said"), [("cut", "JSONDecodeError"), ("other", "TypeError"), ("long", "ValueError")]
)
async def test_a_process_that_says_something_else_is_ended_and_the_next_episode_starts_one(
    wrong: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.agents.adapters.verifiers._LINE_BYTES", 1 << 16)
    Path("fake.py").write_text(FAKE)
    function = load("x", {"python": program(f'exec "{sys.executable}" "{Path("fake.py").absolute()}"')})

    async def scored(task: str) -> Any:
        return await asyncio.wait_for(function(NOBODY, Prompt("0-0", [1], "?", extra={"task": task})), 30)

    with pytest.raises(RuntimeError, match=f"said something else than a reply: {said}"):
        await scored(wrong)
    assert await scored("good") == {"score": 1.0}


async def test_a_process_that_ends_fails_its_episodes_and_a_row_needs_a_task() -> None:
    function = load("x", {"python": program("echo first >&2; echo no luck >&2; exit 3")})
    with pytest.raises(RuntimeError, match="the worker ended with exit code 3; the last that it said: no luck"):
        await function(NOBODY, prompt_of({"prompt": "x"}))
    with pytest.raises(ValueError, match="prompt 0-0 has no field `task`"):
        await function(NOBODY, Prompt("0-0", [1], "x"))
