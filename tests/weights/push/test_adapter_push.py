"""Which adapters a server holds over the pushes, and what becomes of requests whose adapter is unloaded."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import torch
from aiohttp import web
from fake_servers import AdapterWriter, completion_of, serving

from megarl.rollout.pieces import write
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import Route, SamplingParams
from megarl.sample import VersionSpan
from megarl.weights.push import adapter_push
from megarl.weights.push.adapter_push import AdapterPusher, outdated
from megarl.weights.push.report import Clock, PushReport

CONFIG: Any = {}


def pusher_of(urls: list[str], keep: int = 2, timeout_s: float = 60.0, life: str = "first") -> AdapterPusher:
    return AdapterPusher(urls, "token", CONFIG, base_model="base", keep=keep, life=life, timeout_s=timeout_s)


async def push(pusher: AdapterPusher, urls: list[str], version: int) -> PushReport:
    return await asyncio.to_thread(pusher.deliver, urls, version, {"a": torch.ones(2)}, CONFIG, None, Clock())


def test_a_pushers_oldest_and_all_of_other_lives_are_outdated() -> None:
    names = [
        "users-own",
        "megarl-b-x-00000010-v9",
        "megarl-b-x-00000009-v8",
        "megarl-b-y-00000001-v1",
        "megarl-a-x-00000011-v9",
        "megarl-b-x-00000011-v9",
    ]
    of_b = ("megarl-b-", "megarl-b-x-")
    assert outdated(names, *of_b, keep=2) == ["megarl-a-x-00000011-v9", "megarl-b-x-00000009-v8"]
    assert outdated(names, *of_b, keep=9) == ["megarl-a-x-00000011-v9"]


def test_a_server_holds_so_many_adapters_and_a_new_life_begins_without_those_before() -> None:
    async def run() -> None:
        server = AdapterWriter("users-own")
        async with serving(server) as (urls, _):
            first, second = pusher_of(urls, keep=3), pusher_of(urls, keep=3, life="second")
            names = [(await push(first, urls, version)).adapter for version in range(5)]
            assert server.adapters == ["users-own", *names[2:]]
            again = await push(second, urls, 0)  # of the same version, with other weights
            assert again.failed == {} and again.adapter not in names
            assert server.adapters == ["users-own", again.adapter]

    asyncio.run(run())


def test_two_runs_of_one_life_keep_their_own_adapters_on_a_server() -> None:
    async def run() -> None:
        server = AdapterWriter()
        async with serving(server) as (urls, _):
            first, second = pusher_of(urls), pusher_of(urls)
            ours = [(await push(first, urls, version)).adapter for version in range(3)]
            theirs = [(await push(second, urls, version)).adapter for version in range(3)]
            assert sorted(server.adapters) == sorted([*ours[1:], *theirs[1:]])

    asyncio.run(run())


def test_an_adapter_is_encoded_once_for_all_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    monkeypatch.setattr(pickle, "dumps", lambda tensors: encoded.append(tensors) or b"bytes")

    async def run() -> None:
        servers = AdapterWriter(), AdapterWriter()
        async with serving(*servers) as (urls, _):
            report = await push(pusher_of(urls), urls, 0)
            assert report.failed == {} and [server.adapters for server in servers] == [[report.adapter]] * 2

    asyncio.run(run())
    assert len(encoded) == 1


def test_a_request_of_an_adapter_that_goes_is_ended_and_its_completion_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_push, "_UNLOAD_S", 0.05)
    params = SamplingParams(max_new_tokens=12, sampling_seed=1)
    expected = completion_of(1, 2, 12)
    assert len(expected) > 6

    async def run() -> None:
        server = AdapterWriter(stops_after=3)
        async with serving(server) as (urls, _), EnginePool(urls, "token", timeout_s=60, fenced=True) as pool:
            pusher = pusher_of(urls)
            (url,) = urls

            async def push_and_trust(version: int) -> None:
                report = await push(pusher, urls, version)
                assert report.failed == {}
                pool.trust(url, version, report.adapter)

            await push_and_trust(0)
            writing = asyncio.create_task(write(pool, [5, 6], params))
            while not server.ended:  # it has begun
                await asyncio.sleep(0)
            await push_and_trust(1)
            assert "abort" not in server.ordered, "there is room for two"
            await push_and_trust(2)
            assert [order.partition(" ")[0] for order in server.ordered] == ["load", "load", "abort", "unload", "load"]
            server.go.set()
            completion = await writing
            assert completion.token_ids == expected
            assert completion.versions == (VersionSpan(0, 0, 3), VersionSpan(1, 3, len(expected)))
            assert pool.counters()["wasted_fenced"] == pool.counters()["wasted_failed"] == 0

    asyncio.run(run())


def test_an_adapter_that_could_not_be_unloaded_is_unloaded_by_the_next_push() -> None:
    class Busy(AdapterWriter):
        """Its first order to unload fails before it has done anything."""

        refuses = True

        async def __call__(self, request: Any) -> Any:
            if request.path == Route.UNLOAD_ADAPTER and self.refuses:
                self.refuses = False
                return web.json_response({"message": "busy"}, status=500)
            return await super().__call__(request)

    async def run() -> None:
        server = Busy()
        async with serving(server) as (urls, _):
            pusher = pusher_of(urls)
            for version in (0, 1):
                await push(pusher, urls, version)
            report = await push(pusher, urls, 2)
            assert list(report.failed) == urls and report.transports == {}
            assert len(server.adapters) == 2
            report = await push(pusher, urls, 2)
            assert report.failed == {} and server.adapters[1:] == [report.adapter]

    asyncio.run(run())
