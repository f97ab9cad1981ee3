"""How many calls a second agents get through the endpoint, beside the same calls to the bare server.

    python benchmarks/rollout/bench_endpoint.py --json

The clients are plain aiohttp in a process of their own, each waits for its answer before it asks again.  Bare, they
send token ids to the hf server; through the endpoint, the chat whose tokens these are, each client with the key of its
own episode, of --calls questions.  Both get as many tokens an answer.  They take turns; the ratio is the median over
the rounds.  The CPU of the endpoint's process by the calls says what a call costs it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

import aiohttp

from benchmarks.common.page import Result, arguments, run
from benchmarks.rollout.bench_rollout import serving
from benchmarks.rollout.clients import cpu_seconds
from megarl.agents.endpoint import Endpoint
from megarl.agents.session import Policy
from megarl.agents.tool_calls.forms import FORMS
from megarl.data.chat import load_tokenizer
from megarl.data.examples.tiny import write_tiny_model
from megarl.data.template import ChatTemplate
from megarl.processes.garbage import collect_garbage_rarely
from megarl.processes.lifetime import die_with_parent
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import Route, SamplingParams, auth_headers, generate_body
from megarl.rollout.settings import GenerationSettings

GOAL = 0.8
TOKEN = "of-the-benchmark"
QUICK = {"clients": 4, "calls": 2, "rounds": 1}
USUAL = {"clients": 64, "calls": 16, "rounds": 3}
Call = tuple[str, dict[str, str], Any]  # url, headers, body


def work(options: argparse.Namespace) -> Result:
    usual = QUICK if options.quick else USUAL
    sizes = {name: usual[name] if getattr(options, name) is None else getattr(options, name) for name in usual}
    with tempfile.TemporaryDirectory(prefix="bench_endpoint_") as folder:
        model = write_tiny_model(Path(folder) / "model")
        options.tp = 1
        context = multiprocessing.get_context("spawn")
        with serving("hf", model, TOKEN, options, Path(folder)) as url:
            pipe, theirs = context.Pipe()
            endpoint = context.Process(target=_serve, args=(theirs, url, str(model), options.new_tokens, os.getpid()))
            endpoint.start()
            theirs.close()  # so that its end is seen
            try:
                found = _measure(pipe, endpoint.pid, url, model, sizes, options.new_tokens)
            finally:
                endpoint.kill()
                endpoint.join()
    rows = [
        {
            "calls": where,
            "clients": sizes["clients"],
            "calls/s": median(num / seconds for seconds, _, num in each),
            "endpoint CPU ms/call": median(1000 * cpu / num for _, cpu, num in each),
        }
        for where, each in found.items()
    ]
    pairs = zip(found["bare"], found["endpoint"], strict=True)
    ratio = median(bare / through for (bare, _, _), (through, _, _) in pairs)
    notes = [f"goal: endpoint_over_bare at least {GOAL}; the median of {sizes['rounds']} rounds that take turns"]
    notes.append(
        f"server, endpoint and clients share {os.cpu_count()} cores, and the model is tiny: its calls are short"
    )
    title = "Agents' calls through the endpoint beside the bare server"
    configuration = {**sizes, "new_tokens": options.new_tokens}
    return Result("endpoint", options.device, configuration, rows, {"endpoint_over_bare": ratio}, notes, title)


def _measure(
    pipe: Connection, pid: int | None, url: str, model: Path, sizes: dict[str, int], new_tokens: int
) -> dict[str, list[tuple[float, float, int]]]:
    """(seconds, the endpoint's CPU seconds, calls) of each round of both; the first of each does not count."""
    template = ChatTemplate(load_tokenizer(str(model)))
    found: dict[str, list[tuple[float, float, int]]] = {"bare": [], "endpoint": []}
    with multiprocessing.get_context("spawn").Pool(1) as client:
        for at in range(sizes["rounds"] + 1):
            for where in list(found)[:: -1 if at % 2 else 1]:
                pipe.send(sizes["clients"])
                base, keys = pipe.recv()
                work = []
                for number, key in enumerate(keys):
                    questions = [f"{at}{number:03d}{call:03d}+1=" for call in range(sizes["calls"])]
                    asked = [[{"role": "user", "content": question}] for question in questions]
                    if where == "bare":
                        params = _params(new_tokens)
                        bodies = [
                            generate_body(template.whole(a), 1, params, f"{at}-{number}-{i}")
                            for i, a in enumerate(asked)
                        ]
                        work.append([(url + Route.GENERATE, auth_headers(TOKEN), body) for body in bodies])
                    else:
                        headers = {"Authorization": f"Bearer {key}"}
                        to = base + "/v1/chat/completions"
                        work.append([(to, headers, {"model": "policy", "messages": a}) for a in asked])
                cpu = cpu_seconds(pid)
                seconds = client.apply(_ask, (work,))
                if at:
                    found[where].append((seconds, cpu_seconds(pid) - cpu, len(list(chain(*work)))))
    return found


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)


def _ask(work: Sequence[Sequence[Call]]) -> float:
    """Seconds that the clients need, each for its calls one after the other."""

    async def one(http: aiohttp.ClientSession, calls: Sequence[Call]) -> None:
        for url, headers, body in calls:
            async with http.post(url, headers=headers, json=body) as reply:
                reply.raise_for_status()
                await reply.json()

    async def everyone() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            begun = time.perf_counter()
            await asyncio.gather(*(one(http, calls) for calls in work))
            return time.perf_counter() - begun

    return asyncio.run(everyone())


def _serve(pipe: Connection, url: str, model: str, new_tokens: int, parent: int) -> None:
    """The endpoint, as a collector has it; for each number that comes it opens so many episodes."""
    die_with_parent(parent)
    collect_garbage_rarely()
    asyncio.run(_serve_episodes(pipe, url, model, new_tokens))


async def _serve_episodes(pipe: Connection, url: str, model: str, new_tokens: int) -> None:
    tokenizer = load_tokenizer(model)
    template, params = ChatTemplate(tokenizer), _params(new_tokens)
    async with EnginePool([url], TOKEN, GenerationSettings(timeout_s=600.0)) as pool:
        policy = Policy("policy", tokenizer, template, pool, params, FORMS["none"], max_tokens=1 << 20)
        async with Endpoint(policy) as endpoint:
            while True:
                sessions = [endpoint.open(f"{i}") for i in range(await asyncio.to_thread(pipe.recv))]
                pipe.send((endpoint.url, [session.key for session in sessions]))


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("--clients", type=int, help=f"default {USUAL['clients']}")
    found.add_argument("--calls", type=int, help=f"of each client in a round, default {USUAL['calls']}")
    found.add_argument("--rounds", type=int, help=f"default {USUAL['rounds']}")
    found.add_argument("--new-tokens", type=int, default=14, help="of each answer")
    return found


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
