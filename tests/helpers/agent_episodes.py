"""Episodes in this process, over a server that writes given texts."""

import os
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from agent_endpoint import Scripted
from chat_templates import tokenizer_of
from pools import pool_of

from megarl.agents.episodes import AgentSettings, Episodes
from megarl.agents.process import AgentProgram
from megarl.rewards.result import RewardResult
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.samples.sample import Prompt

PARAMS = SamplingParams(max_new_tokens=256, sampling_seed=3)


# What the source of every agent begins with.
HTTP = """
import json
import urllib.request


def ask(base_url, path="/chat/completions", key="-", **body):
    request = urllib.request.Request(base_url + path, json.dumps(body).encode(), {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def say(base_url, text, key="-"):
    messages = [{"role": "user", "content": text}]
    return ask(base_url, key=key, model="policy", messages=messages)["choices"][0]["message"]["content"]


"""


class Scored:
    """The rewards of a run: the length of the text; `seen`: the texts."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, prompt: Prompt, completions: list[Any]) -> list[RewardResult]:
        self.seen += [completion.text for completion in completions]
        return [RewardResult(float(len(completion.text))) for completion in completions]


@dataclass
class Stage:
    episodes: Episodes
    pool: EnginePool
    server: Any
    url: str  # of the server
    bodies: list[Any]  # of the requests that it got
    scored: Scored

    async def group(self, n: int = 1, *, text: str = "12 + 3?", **how: Any) -> Any:
        return await self.episodes.group(Prompt("0-17", [5, 6], text, "15", "sums"), n, PARAMS, **how)


@asynccontextmanager
async def stage_of(
    agent: str | list[str], *texts: str, server: Callable[..., Any] | None = None, **settings: Any
) -> AsyncIterator[Stage]:
    """`agent`: the source of a function `episode`, for the working folder, or a command; `settings`: of episodes."""
    scored, arguments = Scored(), settings.pop("args", {})
    if isinstance(agent, str):
        file = Path("agent.py").absolute()
        file.write_text(HTTP + textwrap.dedent(agent))
        job = AgentProgram(f"{file}:episode", (), arguments)
    else:
        job = AgentProgram(None, tuple(agent))
    writer = server or Scripted("qwen3", texts)
    with patch.dict(os.environ):  # a collector keeps what episodes put there
        async with (
            pool_of(writer, timeout_s=60, rest_s=0.001, retries=1) as (pool, (url,), (bodies,)),
            Episodes(AgentSettings(job, **settings), pool, tokenizer_of("qwen3"), scored) as episodes,
        ):
            yield Stage(episodes, pool, writer, url, bodies, scored)
