"""The pool against servers that fail in every way; the misbehaving ones are a few lines of aiohttp in this process."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from megarl.rollout.pool import EnginePool, RolloutFailed
from megarl.rollout.protocol import Route, SamplingParams
from megarl.sample import VersionSpan
from megarl.servers.supervisor import free_ports

PARAMS = SamplingParams(max_new_tokens=2)
PATIENCE_S = 2.0  # where a limit must pass while others, in this same process, answer within it


def reply_to(body, tokens=(4, 1), version="0"):
    meta = {"finish_reason": {"type": "stop"}, "weight_version": version}
    meta["output_token_logprobs"] = [[-1.0, token, None] for token in tokens]
    return [{"output_ids": list(tokens), "meta_info": meta} for _ in range(body["sampling_params"]["n"])]


async def good(request):
    return web.json_response(reply_to(await request.json()))


async def broken(request):
    return web.json_response({"error": {"message": "out of order"}}, status=500)


async def refusing(request):
    return web.json_response({"error": {"message": "such a prompt is not wanted"}}, status=400)


async def silent(request):
    await asyncio.sleep(600)  # longer than any test waits


async def babbling(request):
    return web.json_response([{"output_ids": [3]}])


@asynccontextmanager
async def serving(*handlers):
    """A server for each handler; yields (urls, list of request bodies of each)."""
    urls, runners, seen = [], [], []
    for handler in handlers:
        bodies = []
        seen.append(bodies)

        async def record(request, handler=handler, bodies=bodies):
            bodies.append(await request.json())
            return await handler(request)

        app = web.Application()
        app.router.add_post(Route.GENERATE, record)
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        runners.append(runner)
    try:
        yield urls, seen
    finally:
        for runner in runners:
            await runner.cleanup()


def run(test):
    asyncio.run(asyncio.wait_for(test(), 240))


def test_work_goes_to_the_least_loaded_server():
    async def test():
        async with serving(good, good) as (urls, seen), EnginePool(urls, "", timeout_s=60) as pool:
            await asyncio.gather(*(pool.generate([3], 2, PARAMS) for _ in range(40)))
            assert [len(bodies) for bodies in seen] == [20, 20]

    run(test)


@pytest.mark.parametrize(("bad", "timeout_s"), [(broken, 60), (silent, PATIENCE_S)])
def test_a_failed_request_is_tried_on_another_server(bad, timeout_s):
    async def test():
        async with serving(bad, good) as (urls, seen), EnginePool(urls, "", timeout_s=timeout_s, rest_s=600) as pool:
            answers = await asyncio.gather(*(pool.generate([3], 1, PARAMS, rid=f"r{i}") for i in range(6)))
            assert [answer[0].token_ids for answer in answers] == [[4, 1]] * 6
            assert len(seen[0]) == 3 and len(seen[1]) == 6
            await pool.generate([3], 1, PARAMS)
            assert len(seen[0]) == 3, "a server that has just failed was asked again"
            names = [body["rid"] for bodies in seen for body in bodies]
            assert len(set(names)) == len(names), "two attempts share a name"

    run(test)


def test_a_dead_server_is_named_with_the_reason_of_every_attempt():
    async def test():
        (port,) = free_ports(["127.0.0.1"])
        pool = EnginePool([f"http://127.0.0.1:{port}"], "", timeout_s=60, retries=2, rest_s=0.02)
        async with pool:
            with pytest.raises(RolloutFailed, match=rf"3 attempts failed.*{port}.*Connect") as caught:
                await pool.generate([3], 1, PARAMS)
        assert str(caught.value).count(str(port)) >= 3

    run(test)


def test_a_silent_server_costs_at_most_attempts_times_the_limit():
    async def test():
        options = {"timeout_s": 0.2, "retries": 1, "rest_s": 0.05}
        async with serving(silent) as (urls, _), EnginePool(urls, "", **options) as pool:
            with pytest.raises(RolloutFailed, match=r"2 attempts failed: .*no answer within 0\.2 s"):
                await pool.generate([3], 1, PARAMS)

    run(test)


@pytest.mark.parametrize(("bad", "words"), [(refusing, "prompt is not wanted"), (babbling, "holds 1 completions")])
def test_a_refusal_or_a_senseless_reply_is_not_tried_again(bad, words):
    async def test():
        async with serving(bad) as (urls, seen), EnginePool(urls, "", timeout_s=60) as pool:
            with pytest.raises(RolloutFailed, match=words):
                await pool.generate([3], 2, PARAMS)
            assert len(seen[0]) == 1

    run(test)


@pytest.mark.parametrize("prompt", [[], [3, 8], [-1]])
def test_a_prompt_that_could_kill_a_server_is_never_sent(prompt):
    async def test():
        async with serving(good) as (urls, seen), EnginePool(urls, "", timeout_s=60, vocab_size=8) as pool:
            with pytest.raises(RolloutFailed):
                await pool.generate(prompt, 1, PARAMS)
            assert not seen[0]

    run(test)


def test_a_server_that_comes_back_is_used_again():
    async def test():
        moody = iter([broken, broken])

        async def handler(request):
            return await next(moody, good)(request)

        async with serving(handler) as (urls, _), EnginePool(urls, "", timeout_s=60, rest_s=0.02) as pool:
            assert len(await pool.generate([3], 4, PARAMS)) == 4

    run(test)


def test_no_more_requests_are_on_the_wire_than_allowed():
    async def test():
        here, most, seven = 0, 0, asyncio.Barrier(7)

        async def slow(request):
            nonlocal here, most
            here += 1
            most = max(most, here)
            await seven.wait()  # as many as are allowed, or for ever
            here -= 1
            return await good(request)

        async with serving(slow) as (urls, _), EnginePool(urls, "", timeout_s=60, max_in_flight=7) as pool:
            await asyncio.gather(*(pool.generate([3], 1, PARAMS) for _ in range(7 * 7)))
        assert most == 7

    run(test)


def test_two_thousand_requests_are_answered_by_a_real_server(server):
    async def test():
        async with EnginePool([server.url], server.token, timeout_s=60) as pool:
            params = SamplingParams(max_new_tokens=1)
            answers = await asyncio.gather(*(pool.generate([2 + i % 30], 1, params) for i in range(2000)))
        assert [len(answer[0].token_ids) for answer in answers] == [1] * 2000

    asyncio.run(test())


def test_a_fenced_server_is_asked_for_nothing_until_it_is_trusted():
    async def test():
        async with serving(good) as (urls, seen), EnginePool(urls, "", timeout_s=60, fenced=True) as pool:
            asked = asyncio.create_task(pool.generate([3], 1, PARAMS))
            await asyncio.sleep(0.05)
            assert not seen[0] and not asked.done()
            pool.trust(urls[0], 0)
            assert (await asked)[0].token_ids == [4, 1]

    run(test)


def test_what_a_fenced_server_was_writing_is_written_by_another():
    async def test():
        async with serving(silent, good) as (urls, seen), EnginePool(urls, "", timeout_s=200) as pool:
            asked = [asyncio.create_task(pool.generate([3], 1, PARAMS)) for _ in range(4)]
            while not len(seen[0]) == len(seen[1]) == 2:
                await asyncio.sleep(0.01)
            pool.fence(urls[0])
            assert [(await task)[0].token_ids for task in asked] == [[4, 1]] * 4
            assert [len(bodies) for bodies in seen] == [2, 4]

    run(test)


def test_a_completion_waits_until_its_version_is_trusted_on_its_server():
    """The server goes on as soon as its push is verified, so an answer may overtake the news of that."""

    async def ahead(request):
        return web.json_response(reply_to(await request.json(), version="8"))

    async def test():
        async with serving(ahead) as (urls, _), EnginePool(urls, "", timeout_s=60, fenced=True) as pool:
            pool.trust(urls[0], 7)
            asked = asyncio.create_task(pool.generate([3], 1, PARAMS))
            await asyncio.sleep(0.05)
            assert not asked.done()
            pool.trust(urls[0], 8)
            assert (await asked)[0].versions[0].version == 8

    run(test)


def test_a_completion_of_an_unverified_version_is_never_handed_out():
    """A server that restarted in between serves the weights of its folder, stamped 0: another one is asked instead."""

    async def restarted(request):
        return web.json_response(reply_to(await request.json(), version="0"))

    async def right(request):
        return web.json_response(reply_to(await request.json(), version="7", tokens=(5, 1)))

    async def test():
        options = {"timeout_s": PATIENCE_S, "fenced": True, "rest_s": 600}
        async with serving(restarted, right) as (urls, _), EnginePool(urls, "", **options) as pool:
            for url in urls:
                pool.trust(url, 7)
            answers = await asyncio.gather(*(pool.generate([3], 1, PARAMS) for _ in range(4)))
            assert [answer[0].token_ids for answer in answers] == [[5, 1]] * 4

    async def alone():
        options = {"timeout_s": PATIENCE_S, "fenced": True, "rest_s": 0.01, "retries": 1}
        async with serving(restarted) as (urls, _), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 7)
            with pytest.raises(RolloutFailed, match=r"unverified weights \(version 0\)"):
                await pool.generate([3], 1, PARAMS)

    run(test)
    run(alone)


def test_completions_are_asked_with_the_adapter_and_are_of_its_version():
    """The server stamps the weights below the adapter, which never change."""

    async def test():
        async with serving(good) as (urls, seen), EnginePool(urls, "", timeout_s=60, fenced=True) as pool:
            pool.trust(urls[0], 7, "actor_7")
            (answer,) = await pool.generate([3], 1, PARAMS)
            pool.trust(urls[0], 8, "actor_8")
            (later,) = await pool.generate([3], 1, PARAMS)
            assert [body["lora_path"] for body in seen[0]] == ["actor_7", "actor_8"]
            assert [answer.versions, later.versions] == [(VersionSpan(v, 0, 2),) for v in (7, 8)]

    run(test)


def test_a_fence_and_the_next_trust_in_one_breath_lose_nothing():
    """Both messages may come at once to a collector that was busy; the healed server is asked at once, not rested."""
    slow = asyncio.Event()

    async def handler(request):
        await slow.wait()
        return await good(request)

    async def test():
        options = {"timeout_s": 200, "fenced": True, "retries": 0, "rest_s": 60}
        async with serving(handler) as (urls, seen), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 0)
            asked = [asyncio.create_task(pool.generate([3], 1, PARAMS)) for _ in range(3)]
            while len(seen[0]) < 3:
                await asyncio.sleep(0.01)
            pool.fence(urls[0])
            pool.trust(urls[0], 0)
            slow.set()
            assert [(await task)[0].token_ids for task in asked] == [[4, 1]] * 3
            assert len(seen[0]) == 6

    run(test)
