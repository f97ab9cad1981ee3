"""Episodes in this process, over a server that writes given texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_endpoint import Scripted
from chat_templates import tokenizer_of
from fake_servers import serving

from megarl.agents.episodes import Episodes, Settings
from megarl.agents.process import Job
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Prompt

PARAMS = SamplingParams(max_new_tokens=256, sampling_seed=3)


@dataclass(frozen=True)
class Result:
    reward: float
    extra: dict[str, float] = field(default_factory=dict)
    pred: str | None = None


class Scored:
    """The rewards of a run: the length of the text; `seen`: the texts."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, prompt: Prompt, completions: list[Any]) -> list[Result]:
        self.seen += [completion.text for completion in completions]
        return [Result(float(len(completion.text))) for completion in completions]


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
    agent: str | list[str], *texts: str, folder: Path, server: Callable[..., Any] | None = None, **settings: Any
) -> AsyncIterator[Stage]:
    """`agent`: the source of a function `episode`, or a command; `settings`: of the episodes."""
    scored, arguments = Scored(), settings.pop("args", {})
    if isinstance(agent, str):
        (folder / "agent.py").write_text(agent)
        job = Job(f"{folder}/agent.py:episode", (), arguments)
    else:
        job = Job(None, tuple(agent))
    writer = server or Scripted("qwen3", texts)
    async with (
        serving(writer) as (urls, seen),
        EnginePool(urls, "", timeout_s=60, rest_s=0.001, retries=1) as pool,
        Episodes(Settings(job, **settings), pool, tokenizer_of("qwen3"), scored, 0) as episodes,
    ):
        yield Stage(episodes, pool, writer, urls[0], seen[0], scored)
