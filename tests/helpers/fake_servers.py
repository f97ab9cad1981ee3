"""Servers of a few lines of aiohttp: some misbehave, and `Writer` writes as a real engine does, but at once."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from multiprocessing import get_context
from typing import Any

from aiohttp import web

from megarl.processes.lifetime import die_with_parent
from megarl.rollout.protocol import Route

EOS = 1
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def reply_to(
    tokens: Sequence[int] = (4, 1),
    version: str = "0",
    finish: str = "stop",
    spans: Sequence[tuple[str, int, int]] | None = None,
    cached: int = 0,
) -> list[dict[str, Any]]:
    """A reply of one completion; `spans`: (version, start, end)."""
    meta: dict[str, Any] = {"finish_reason": {"type": finish}, "weight_version": version, "cached_tokens": cached}
    meta["output_token_logprobs"] = [[-0.5 * token, token, None] for token in tokens]
    if spans is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return [{"output_ids": list(tokens), "meta_info": meta}]


async def good(request: web.Request) -> web.Response:
    return web.json_response(reply_to())


async def broken(request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "out of order"}}, status=500)


async def refusing(request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "such a prompt is not wanted"}}, status=400)


async def silent(request: web.Request) -> web.Response:
    await asyncio.sleep(600)  # longer than any test waits
    raise AssertionError("no test waits for so long")


async def babbling(request: web.Request) -> web.Response:
    return web.json_response([{"output_ids": [3]}])


async def nothing(request: web.Request) -> web.Response:
    return web.json_response(reply_to(tokens=(), finish="abort", spans=()))


def token_at(seed: int, position: int) -> int:
    """The token that `Writer` draws at this position of a sequence, prompt included: one of 20 is the last one."""
    drawn = (seed * 1_000_003 + position * 7919) % 65_537
    return EOS if drawn % 20 == 0 else 2 + drawn % 28


def completion_of(seed: int, prompt_tokens: int, most: int) -> list[int]:
    """What `Writer` writes."""
    tokens: list[int] = []
    while len(tokens) < most and EOS not in tokens:
        tokens.append(token_at(seed, prompt_tokens + len(tokens)))
    return tokens


class Writer:
    """Draws token t from (seed, t), as both engines do.

    With `stops_after`, it writes so many tokens of each request and then waits, until `go` is set or the request is
    ended: then it returns what it has.
    """

    routes: tuple[Route, ...] = (Route.ABORT,)  # beside /generate

    def __init__(self, version: str = "0", stops_after: int | None = None) -> None:
        self.version, self.stops_after, self.go = version, stops_after, asyncio.Event()
        self.cached = 0
        self.bodies: list[dict[str, Any]] = []
        self.ended: dict[str, asyncio.Event] = {}  # by rid, of the running requests
        self.most = 0  # requests at a time

    async def __call__(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.path == Route.ABORT:
            self.end(body["rid"])
            return web.Response()
        self.bodies.append(body)
        ended = self.ended[body["rid"]] = asyncio.Event()
        self.most = max(self.most, len(self.ended))
        try:
            tokens, finish = await self.write(body, ended)
        finally:
            del self.ended[body["rid"]]
        spans = [(self.version, 0, len(tokens))] if tokens else []
        return web.json_response(reply_to(tokens, self.version, finish, spans, self.cached))

    async def write(self, body: dict[str, Any], ended: asyncio.Event) -> tuple[list[int], str]:
        params = body["sampling_params"]
        tokens = completion_of(params.get("sampling_seed", 0), len(body["input_ids"]), params["max_new_tokens"])
        stops_after = self.stops_after
        if stops_after is not None and len(tokens) > stops_after and not self.go.is_set():
            waits = [asyncio.create_task(event.wait()) for event in (self.go, ended)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if ended.is_set():
                return tokens[:stops_after], "abort"
        return tokens, "stop" if tokens[-1] == EOS else "length"

    def end(self, rid: str = "") -> None:
        """End the requests whose names begin so; they return their tokens so far."""
        for name, event in self.ended.items():
            if name.startswith(rid):
                event.set()


class Telling(Writer):
    """Answers one route with what `say` returns, as JSON; None in its place: with nothing, for ever."""

    def __init__(self, route: Route, say: Callable[[], Any] | None) -> None:
        super().__init__()
        self.routes, self.say = (route,), say

    async def __call__(self, request: web.Request) -> Any:
        return await silent(request) if self.say is None else web.json_response(self.say())


class AdapterWriter(Writer):
    """A `Writer` that holds adapters; as in SGLang, unloading one waits for the requests that use it."""

    routes = (*Writer.routes, Route.SERVER_INFO, Route.MODELS, Route.LOAD_ADAPTER, Route.UNLOAD_ADAPTER)

    def __init__(self, *adapters: str, stops_after: int | None = None) -> None:
        super().__init__(stops_after=stops_after)
        self.adapters = list(adapters)
        self.ordered: list[str] = []  # what it was told to do with adapters
        self.users: Counter[str] = Counter()
        self.unused = asyncio.Condition()

    async def __call__(self, request: web.Request) -> web.Response:
        if request.path == Route.SERVER_INFO:
            return web.json_response({"tp_size": 1})
        if request.path == Route.MODELS:
            cards = [{"id": "base", "parent": None}, *({"id": name, "parent": "base"} for name in self.adapters)]
            return web.json_response({"object": "list", "data": cards})
        body = await request.json()
        if request.path == Route.ABORT:
            self.ordered.append("abort")
        if request.path == Route.GENERATE:
            self.users[body["lora_path"]] += 1
            try:
                return await super().__call__(request)
            finally:
                async with self.unused:
                    self.users[body["lora_path"]] -= 1
                    self.unused.notify_all()
        if request.path not in (Route.LOAD_ADAPTER, Route.UNLOAD_ADAPTER):
            return await super().__call__(request)
        name = body["lora_name"]
        if (name in self.adapters) == (request.path == Route.LOAD_ADAPTER):
            return web.json_response({"success": False}, status=400)
        if request.path == Route.LOAD_ADAPTER:
            self.adapters.append(name)
        else:
            self.adapters.remove(name)
            async with self.unused:
                await self.unused.wait_for(lambda: not self.users[name])
        self.ordered.append(f"{'load' if request.path == Route.LOAD_ADAPTER else 'unload'} {name}")
        return web.json_response({"success": True})


@asynccontextmanager
async def serving(*handlers: Handler, port: int = 0) -> AsyncIterator[tuple[list[str], list[list[Any]]]]:
    """A server for each handler; yields (urls, list of bodies of /generate of each).  `port`: of one server; 0: any."""
    urls, runners, seen = [], [], []
    for handler in handlers:
        bodies: list[Any] = []
        seen.append(bodies)

        async def record(
            request: web.Request, handler: Handler = handler, bodies: list[Any] = bodies
        ) -> web.StreamResponse:
            bodies.append(await request.json())
            return await handler(request)

        app = web.Application()
        app.router.add_post(Route.GENERATE, record)
        if isinstance(handler, Writer):
            for route in handler.routes:
                app.router.add_route("*", route, handler.__call__)
        runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)  # as real ones do
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, backlog=2048)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        runners.append(runner)
    try:
        yield urls, seen
    finally:
        for runner in runners:
            await runner.cleanup()


@contextmanager
def serving_in_a_thread(*handlers: Handler) -> Iterator[tuple[list[str], Callable[..., Any]]]:
    """The same for tests that are no coroutines; yields (urls, call): `call(f, *args)` runs beside the servers."""
    loop, urls, ready, ended = asyncio.new_event_loop(), list[str](), threading.Event(), asyncio.Event()

    async def main() -> None:
        async with serving(*handlers) as (found, _):
            urls.extend(found)
            ready.set()
            await ended.wait()

    async def run(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def call(function: Callable[..., Any], *args: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(run(function, *args), loop).result()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    ready.wait()
    try:
        yield urls, call
    finally:
        call(ended.set)
        thread.join()
        loop.close()


@contextmanager
def serving_in_a_process(count: int) -> Iterator[tuple[list[str], Callable[[], dict[str, Any]]]]:
    """So many `Writer`s in a process; yields (urls, ask): `ask()` says how many requests each had, and most at once."""
    pipe, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(theirs, count, os.getpid()))
    process.start()

    def ask() -> dict[str, Any]:
        pipe.send("how many")
        return pipe.recv()

    try:
        yield pipe.recv(), ask
    finally:
        process.kill()
        process.join()


def _serve(pipe: Any, count: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    asyncio.run(_serve_until_killed(pipe, [Writer() for _ in range(count)]))


async def _serve_until_killed(pipe: Any, writers: Sequence[Writer]) -> None:
    async with serving(*writers) as (urls, seen):
        pipe.send(urls)
        while await asyncio.to_thread(pipe.recv):
            pipe.send({"requests": [len(bodies) for bodies in seen], "most": [writer.most for writer in writers]})
