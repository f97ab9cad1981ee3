"""Two clients that have the same completions written by the same server: a run's own, and one that does nothing else.

Both run in a process of their own, and both are timed from the order to the last completion.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import NormalDist
from typing import Any

import aiohttp
import psutil

from megarl.processes.garbage import collect_garbage_rarely
from megarl.processes.lifetime import die_with_parent
from megarl.rewards.result import RewardResult
from megarl.rewards.scorer import Rewards
from megarl.rollout.collector.collector import CollectorSettings, Scorer
from megarl.rollout.collector.collector_client import Collectors
from megarl.rollout.protocol import KEEP_ALIVE_S, Route, SamplingParams, auth_headers, generate_body
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import Completion, LostRollout, Prompt

NUM_LENGTHS = 8  # of a distribution: so many lengths, each equally often
LIMIT_S = 1800.0
EXACT = partial(Rewards, ["exact"])


@dataclass(frozen=True)
class Free:
    """A reward that costs nothing."""

    first_errors: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """There is nothing to start."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[RewardResult]:
        return [RewardResult(0.0)] * len(completions)

    def stop(self) -> None:
        """There is nothing to stop."""


@dataclass(frozen=True)
class Request:
    prompt: Prompt
    n: int
    new_tokens: int  # of each of the n completions, no fewer and no more

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.new_tokens, ignore_eos=True)


def requests(
    num: int, n: int, *, prompt_tokens: int, new_tokens: int, spread: float, vocabulary: int, seed: int = 0
) -> list[Request]:
    """Prompts of random tokens; `new_tokens` is the mean of a lognormal distribution whose logarithm spreads so."""
    rng = random.Random(seed)
    sizes = lengths(num, new_tokens, spread)
    rng.shuffle(sizes)
    order = list(dict.fromkeys(sizes))  # one order to our client has one length
    sizes.sort(key=order.index)
    return [
        Request(Prompt(str(i), [rng.randrange(6, vocabulary) for _ in range(prompt_tokens)], "", "7"), n, size)
        for i, size in enumerate(sizes)
    ]


def lengths(num: int, mean: int, spread: float) -> list[int]:
    """Of so many completions: quantiles of the distribution, as often as each other."""
    if spread == 0:
        return [mean] * num
    several = min(NUM_LENGTHS, num)
    factors = [math.exp(NormalDist(0, spread).inv_cdf((i + 0.5) / several)) for i in range(several)]
    scale = mean * several / sum(factors)
    return [max(1, round(scale * factors[i % several])) for i in range(num)]


class RingClient:
    """What a run uses: a collector, its tokenizer, and by default a reward process whose reward costs nothing.

    `ask` returns when the driver holds all samples.
    """

    def __init__(
        self,
        url: str,
        token: str,
        tokenizer: Path,
        concurrency: int,
        log: Path,
        make_scorer: Callable[[], Scorer] = EXACT,
    ) -> None:
        self._collectors = Collectors(
            CollectorSettings(
                (url,),
                token,
                str(tokenizer),
                GenerationSettings(timeout_s=LIMIT_S, max_in_flight=concurrency),
                make_scorer,
                log,
            )
        )

    @property
    def pid(self) -> int | None:
        return self._collectors.pids[0]

    def ready(self, work: Sequence[Request]) -> None:
        """There is nothing to prepare."""

    def ask(self, work: Sequence[Request]) -> int:
        """Returns how many tokens were written."""
        tickets = []
        for _, same in groupby(work, key=lambda request: (request.n, request.new_tokens)):
            some = list(same)
            prompts = [request.prompt for request in some]
            tickets += self._collectors.submit(prompts, n=some[0].n, params=some[0].params)
        for ticket in tickets:
            while ticket.group is None:
                self._collectors.wait()
            if isinstance(ticket.group, LostRollout):
                raise RuntimeError(f"our client lost a rollout: {ticket.group.reason}")
        return sum(s.num_learnt for t in tickets if isinstance(t.group, list) for s in t.group)

    def close(self) -> None:
        self._collectors.close()


class BareClient:
    """aiohttp and nothing else: bodies are encoded before, answers read as bytes, and looked into after the clock.

    `with_json`: bodies are encoded and answers are parsed under the clock, which no client can do without.
    `rare_garbage`: with a collector's settings of the search for garbage, else with Python's.
    """

    def __init__(
        self, url: str, token: str, concurrency: int, *, with_json: bool = False, rare_garbage: bool = True
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        settings = (theirs, url, token, concurrency, with_json, rare_garbage, os.getpid())
        self._process = context.Process(target=_bare, args=settings)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def ready(self, work: Sequence[Request]) -> None:
        """Send the requests, and encode the bodies if that is not measured; returns when that is done."""
        asked = [request for request in work for _ in range(request.n)]  # one request a completion, as ours
        name = "0" * 32  # rids are as long as a collector's
        self._pipe.send([(list(r.prompt.token_ids), 1, r.params, f"{i}-{name}") for i, r in enumerate(asked)])
        assert self._pipe.recv() == "ready"

    def ask(self, work: Sequence[Request]) -> int:
        """Returns how many tokens it knows to be asked for: `check` counts what was written."""
        self._pipe.send("go")
        if (said := self._pipe.recv()) != "done":
            raise RuntimeError(f"the bare client failed: {said}")
        return sum(request.n * request.new_tokens for request in work)

    def check(self) -> int:
        """How many tokens the last answers hold."""
        self._pipe.send("count")
        return int(self._pipe.recv())

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5.0)
        self._process.kill()


def cpu_seconds(pid: int | None) -> float:
    """Of a process and all its children, so far."""
    mother = psutil.Process(pid)
    times = [process.cpu_times() for process in (mother, *mother.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def _bare(
    pipe: Connection, url: str, token: str, concurrency: int, with_json: bool, rare_garbage: bool, parent: int
) -> None:
    die_with_parent(parent)
    if rare_garbage:
        collect_garbage_rarely()
    asyncio.run(_bare_loop(pipe, url + Route.GENERATE, auth_headers(token), concurrency, with_json))


async def _bare_loop(pipe: Connection, url: str, headers: dict[str, str], concurrency: int, with_json: bool) -> None:
    before, during = (_same, _encoded) if with_json else (_encoded, _same)
    at_once, later = (_num_tokens, _same) if with_json else (_same, _num_tokens)
    bodies: list[Any] = []
    answers: list[Any] = []
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)  # opened as often as ours
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    headers = {**headers, "Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=limit) as session:

        async def one(body: Any) -> Any:
            async with session.post(url, data=during(body)) as reply:
                reply.raise_for_status()
                return at_once(await reply.read())

        async def one_by_one(todo: Iterator[Any]) -> list[Any]:
            return [await one(body) for body in todo]

        while (word := await asyncio.to_thread(_next, pipe)) is not None:
            if word == "go":
                try:
                    todo = iter(bodies)  # of all workers
                    parts = await asyncio.gather(*(one_by_one(todo) for _ in range(concurrency)))
                    answers = [answer for part in parts for answer in part]
                    pipe.send("done")
                except aiohttp.ClientError as error:
                    pipe.send(f"{type(error).__name__} {error}")
            elif word == "count":
                pipe.send(sum(later(answer) for answer in answers))
            else:
                bodies = [before(arguments) for arguments in word]
                gc.collect()
                gc.freeze()  # the bodies are visited no more
                pipe.send("ready")


def _encoded(arguments: Any) -> bytes:
    return json.dumps(generate_body(*arguments)).encode()


def _same(value: Any) -> Any:
    return value


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _num_tokens(answer: bytes) -> int:
    reply = json.loads(answer)
    return sum(len(item["output_ids"]) for item in (reply if isinstance(reply, list) else [reply]))
