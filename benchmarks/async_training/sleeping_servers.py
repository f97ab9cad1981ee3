"""Servers that write nothing and take their time: a completion is there when a real server would have written it.

How long it is stands in a trace of lengths: the prompt's first token ids name the row, the seed of the request the
column.  So a completion is equally long whenever, wherever and in whatever pieces it is asked for.  Tokens have the
version that the server had when they were due.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from aiohttp import web

from megarl.processes.lifetime import die_with_parent
from megarl.rollout.protocol import Route
from megarl.samples.sample import Prompt
from megarl.servers.server_process import free_ports

BASE, DIGITS, FIRST_ID = 64, 4, 6  # a visit as token ids: digits of base 64, lowest first, above the special tokens
READY, VERSION = "/ready", "/version"
START_S = 600.0  # on a machine that is busy


def prompt_of(number: int) -> Prompt:
    """The prompt of a visit.  Example: visit 65 has the token ids [7, 7, 6, 6]."""
    ids = [FIRST_ID + number // BASE**place % BASE for place in range(DIGITS)]
    return Prompt(f"0-{number}", ids, "", "", extra={"visit": number})


def visit_of(token_ids: Sequence[int]) -> int:
    """The other way round."""
    return sum((token - FIRST_ID) * BASE**place for place, token in enumerate(token_ids[:DIGITS]))


class Sleeper:
    """One server; a token takes `token_s`, and no more than `max_running` requests are written at a time."""

    def __init__(self, lengths: np.ndarray, token_s: float, max_running: int) -> None:
        self._lengths, self._token_s, self._places = lengths, token_s, asyncio.Semaphore(max_running)
        self._times, self._versions = [-math.inf], [0]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        params, written = body["sampling_params"], len(body["input_ids"]) - DIGITS
        row = self._lengths[visit_of(body["input_ids"]) % len(self._lengths)]
        length = int(row[params["sampling_seed"] % len(row)])
        count = min(length - written, params["max_new_tokens"])
        async with self._places:
            begun = time.monotonic()
            await asyncio.sleep(count * self._token_s)
        reason = "stop" if written + count == length else "length"
        return web.json_response(self._reply(len(body["input_ids"]), begun, count, reason))

    async def set_version(self, request: web.Request) -> web.Response:
        self._times.append(time.monotonic())
        self._versions.append(int(request.query["version"]))
        return web.Response()

    async def nothing(self, _: web.Request) -> web.Response:
        return web.Response()

    def _reply(self, num_asked: int, begun: float, count: int, reason: str) -> dict[str, Any]:
        tokens = [FIRST_ID + at % BASE for at in range(count)]
        meta = {"finish_reason": {"type": reason}, "prompt_tokens": num_asked, "completion_tokens": count}
        meta |= {"cached_tokens": 0, "weight_version": str(self._versions[-1])}
        meta |= {"weight_versions": list(self._spans(begun, count))}
        meta |= {"output_token_logprobs": [[-1.0, token, None] for token in tokens]}
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _spans(self, begun: float, count: int) -> Iterator[dict[str, Any]]:
        first = bisect_right(self._times, begun) - 1
        pushes = [min(count, int((at - begun) / self._token_s)) for at in self._times[first + 1 :]]
        for version, (start, end) in zip(self._versions[first:], pairwise([0, *pushes, count]), strict=True):
            if end > start:
                yield {"version": str(version), "start": start, "end": end}


class SleepingServers:
    """The driver's side: urls of the servers, all of which are in one process."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def push(self, version: int) -> None:
        """All have this version from now on."""
        for url in self.urls:
            _ask(f"{url}{VERSION}?version={version}")


@contextmanager
def sleeping_servers(count: int, lengths: np.ndarray, *, token_s: float, max_running: int) -> Iterator[SleepingServers]:
    """So many servers, until the context ends."""
    ports = free_ports(["127.0.0.1"] * count)
    arguments = (ports, lengths, token_s, max_running, os.getpid())
    process = multiprocessing.get_context("spawn").Process(target=_main, args=arguments)
    process.start()
    try:
        servers = SleepingServers([f"http://127.0.0.1:{port}" for port in ports])
        deadline = time.monotonic() + START_S
        while not _is_ready(servers.urls[-1]):
            if process.exitcode is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the servers did not start (exit code {process.exitcode})")
            time.sleep(0.05)
        yield servers
    finally:
        process.kill()
        process.join()


def _is_ready(url: str) -> bool:
    try:
        _ask(url + READY)
    except OSError:
        return False
    return True


def _ask(url: str) -> None:
    with urllib.request.urlopen(url, timeout=30):
        pass


def _main(ports: Sequence[int], lengths: np.ndarray, token_s: float, max_running: int, parent: int) -> None:
    die_with_parent(parent)
    asyncio.run(_serve(ports, lengths, token_s, max_running))


async def _serve(ports: Sequence[int], lengths: np.ndarray, token_s: float, max_running: int) -> None:
    for port in ports:
        sleeper = Sleeper(lengths, token_s, max_running)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post(Route.GENERATE, sleeper.generate)
        app.router.add_post(Route.ABORT, sleeper.nothing)
        app.router.add_get(VERSION, sleeper.set_version)
        app.router.add_get(READY, sleeper.nothing)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()
