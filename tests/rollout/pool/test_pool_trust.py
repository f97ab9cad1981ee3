"""Servers are trusted, fenced and held, join and leave: what is written with which weights, and where it goes on."""

import asyncio
from functools import partial

import pytest
from aiohttp import web
from fake_servers import Writer, completion_of, good, reply_to, serving, silent
from pools import pool_of, until
from states import fenced, held, trusted

from megarl.rollout.continuation import generate_completion
from megarl.rollout.pool.pool import WASTE, EnginePool
from megarl.rollout.pool.pool_server import PieceRequest, RolloutFailed
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import VersionSpan

PARAMS = SamplingParams(max_new_tokens=2)
SEEDED = SamplingParams(max_new_tokens=8, sampling_seed=3)
LONG = completion_of(3, 1, 8)  # what a `Writer` writes after a prompt of one token


async def stamping(version, tokens, request):
    return web.json_response(reply_to(version=version, tokens=tokens))


ahead = partial(stamping, "8", (4, 1))
restarted = partial(stamping, "0", (4, 1))  # it serves the weights of its folder
right = partial(stamping, "7", (5, 1))


async def test_a_completion_waits_until_its_version_is_trusted_on_its_server():
    """The server goes on as soon as its push is verified, so an answer may overtake the news of that."""
    async with pool_of(ahead, trusts=7) as (pool, urls, _):
        asked = asyncio.create_task(pool.generate(PieceRequest([3], PARAMS)))
        await asyncio.sleep(0.05)
        assert not asked.done()
        pool.update(trusted(urls[0], 8))
        assert (await asked).completion.versions[0].version == 8


async def test_a_completion_of_an_unverified_version_is_never_handed_out():
    """Another server is asked instead."""
    async with pool_of(restarted, right, timeout_s=1.0, trusts=7, rest_s=600) as (pool, urls, _):
        answers = await asyncio.gather(*(pool.generate(PieceRequest([3], PARAMS)) for _ in range(4)))
        assert [answer.completion.token_ids for answer in answers] == [[5, 1]] * 4
    async with pool_of(ahead, timeout_s=0.5, trusts=7, retries=1) as (pool, urls, _):
        with pytest.raises(RolloutFailed, match=r"unverified weights \(version 8\)"):
            await pool.generate(PieceRequest([3], PARAMS))


async def test_a_server_that_somebody_else_started_again_is_reported():
    """It writes as at the first push, whose version the pool trusts still."""
    unfit = []
    async with pool_of(restarted, right, fenced=True, unfit=unfit) as (pool, urls, seen):
        for version in (0, 7):
            for url in urls:
                pool.update(trusted(url, version))
        answers = [await pool.generate(PieceRequest([3], PARAMS), prefer=urls[0]) for _ in range(4)]
        assert [answer.completion.token_ids for answer in answers] == [[5, 1]] * 4
        assert unfit == [(urls[0], "it generated with weights version 0 although it was given version 7")]
        assert len(seen[0]) == 1


async def test_completions_are_asked_with_the_adapter_and_are_of_its_version():
    """The server stamps the weights below the adapter, which never change."""
    async with pool_of(good, fenced=True) as (pool, urls, seen):
        found = []
        for version in (7, 8):
            pool.update(trusted(urls[0], version, f"actor_{version}"))
            found.append((await pool.generate(PieceRequest([3], PARAMS))).completion.versions)
        assert [body["lora_path"] for body in seen[0]] == ["actor_7", "actor_8"]
        assert found == [(VersionSpan(7, 0, 2),), (VersionSpan(8, 0, 2),)]


@pytest.mark.parametrize(
    "words",
    [
        "Got LoRA adapter that has never been loaded: {}\nAll",
        "The following requested LoRA adapters are not loaded: {}\n",
    ],
)
async def test_a_server_that_lost_its_adapter_is_waited_for(words):
    """It was started again, and the trainer, which has not noticed yet, will push the adapter again."""

    async def lost(request):
        name = (await request.json())["lora_path"]
        if name == "actor_7":
            return web.json_response({"error": {"message": words.format(name)}}, status=400)
        return await good(request)

    async with pool_of(lost, retries=0, fenced=True) as (pool, urls, seen):
        pool.update(trusted(urls[0], 7, "actor_7"))
        asked = asyncio.create_task(pool.generate(PieceRequest([3], PARAMS)))
        await until(lambda: len(seen[0]) >= 3)
        pool.update(trusted(urls[0], 7, "actor_7_again"))
        assert (await asked).completion.token_ids == [4, 1]


async def test_a_server_without_adapters_refuses_for_good():
    async def refuses(request):
        message = "LoRA adapter 'actor_7' was requested, but LoRA is not enabled. Please preload adapters"
        return web.json_response({"error": {"message": message}}, status=400)

    async with pool_of(refuses, fenced=True) as (pool, urls, seen):
        pool.update(trusted(urls[0], 7, "actor_7"))
        with pytest.raises(RolloutFailed, match="LoRA is not enabled"):
            await pool.generate(PieceRequest([3], PARAMS))
        assert len(seen[0]) == 1


async def test_a_fence_and_the_next_trust_in_one_breath_lose_nothing():
    """Both messages may come at once to a collector that was busy; the healed server is asked at once, not rested."""
    slow = asyncio.Event()

    async def handler(request):
        await slow.wait()
        return await good(request)

    async with pool_of(handler, trusts=0, retries=0, rest_s=60) as (pool, urls, seen):
        asked = [asyncio.create_task(pool.generate(PieceRequest([3], PARAMS))) for _ in range(3)]
        await until(lambda: len(seen[0]) == 3)
        pool.update(fenced(urls[0]))
        pool.update(trusted(urls[0], 0))
        slow.set()
        assert [(await task).completion.token_ids for task in asked] == [[4, 1]] * 3
        assert len(seen[0]) == 6


async def test_a_held_server_is_asked_for_nothing_new_and_brings_back_what_it_has():
    first, other = Writer(stops_after=3), Writer()
    async with pool_of(first, other, fenced=True) as (pool, urls, seen):
        pool.update(trusted(urls[0], 0))
        asked = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
        await until(lambda: first.ended)
        pool.update(held(urls[0]))
        waiting = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
        await asyncio.sleep(0.05)
        assert [len(bodies) for bodies in seen] == [1, 0] and not waiting.done()
        first.end()
        piece = await asked
        assert (piece.completion.token_ids, piece.completion.finish_reason) == (LONG[:3], "abort")
        pool.update(trusted(urls[1], 0))
        assert (await waiting).url == urls[1]
        first.go.set()
        pool.update(fenced(urls[1]))
        waiting = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
        pool.update(trusted(urls[0], 0))
        assert (await waiting).completion.token_ids == LONG


class Paused(Writer):
    """Returns nothing before it goes on, also not what it was told to end."""

    def __init__(self):
        super().__init__(stops_after=0)
        self.told = asyncio.Event()

    def end(self, rid=""):
        self.told.set()


@pytest.mark.parametrize("is_told", [False, True])
async def test_the_time_limit_of_a_request_waits_for_a_held_server(is_told):
    writer = Paused()
    async with pool_of(writer, timeout_s=0.3, retries=0, trusts=0) as (pool, urls, seen):
        asked = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
        await until(writer.told.is_set if is_told else lambda: writer.ended)
        pool.update(held(urls[0]))
        await asyncio.sleep(0.7)  # longer than the limit and the time that is left to end a request
        assert not asked.done() and writer.told.is_set() == is_told
        writer.go.set()
        assert (await asked).completion.token_ids == LONG
        assert len(seen[0]) == 1


async def test_a_request_that_a_push_ended_in_the_queue_has_not_failed():
    """A push that aborts ends also requests that have no token yet, again and again."""
    writer = Writer(stops_after=0)
    async with pool_of(writer, retries=0, trusts=0, rest_s=600) as (pool, urls, seen):
        asked = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
        for push in range(1, 4):
            await until(lambda push=push: len(seen[0]) == push and writer.ended)
            pool.update(held(urls[0]))
            writer.end()
            await until(lambda: not writer.ended)
            pool.update(trusted(urls[0], push))
        writer.version = "3"
        writer.go.set()
        assert (await asked).completion.token_ids == LONG


async def test_a_task_that_is_cancelled_and_fenced_at_once_is_cancelled():
    writer = Writer(stops_after=0)
    async with pool_of(writer) as (pool, urls, _):
        asked = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
        await until(lambda: writer.ended)
        pool.update(fenced(urls[0]))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked


# ---- salts of the prefix cache


async def test_requests_carry_the_newest_trusted_version_as_salt():
    options = {"timeout_s": 60, "fenced": True}

    async def salt_of(pool, *versions, adapter=None):
        for version in versions:
            pool.update(trusted(urls[0], version, adapter))
        await pool.generate(PieceRequest([3], SEEDED))
        return seen[0][-1].get("cache_salt")

    async with serving(Writer("7")) as (urls, seen):
        async with EnginePool(urls, "", GenerationSettings(**options, salted=True)) as pool:
            first = await salt_of(pool, 6, 7, 5)
            pool.update(fenced(urls[0]))
            assert first.endswith(".7") and await salt_of(pool, 7, adapter="actor_7") == first
        async with (
            EnginePool(urls, "", GenerationSettings(**options)) as plain,
            EnginePool(urls, "", GenerationSettings(timeout_s=60, salted=True)) as free,
        ):
            assert await salt_of(plain, 7) is None and await salt_of(free) is None
        async with EnginePool(urls, "", GenerationSettings(**options, salted=True)) as later:
            assert await salt_of(later, 7) != first, "a later run may have other weights of this number"


class Caching(Writer):
    """Has every prompt in its cache, but none for a request with a salt of its own."""

    knows_salts, empty = True, False
    push = None  # a function of a version: a push ends while each request comes

    async def write(self, body, ended):
        if self.push is not None:
            self.version = str(int(self.version) + 1)
            self.push(int(self.version))
        is_shared = not self.knows_salts or body["cache_salt"].count(".") == 1
        self.cached = int(not self.empty and is_shared)
        return await super().write(body, ended)


async def test_what_goes_on_keeps_the_salt_with_which_it_began_except_where_weights_are_older():
    """Otherwise KV of the older weights would be found there under the newer salt, after the next push."""
    async with pool_of(Writer("9"), trusts=7, salted=True) as (pool, urls, seen):
        pool.update(trusted(urls[0], 9))
        for began in (None, 7, 9, 10):
            await pool.generate(PieceRequest([3], PARAMS, began=began))
        assert [body["cache_salt"].split(".")[1] for body in seen[0]] == ["9", "7", "9", "9"]


async def test_no_salt_from_before_a_fence_is_used_again():
    """A server whose canary failed has resumed before: KV of the bad weights is in its cache, under the old salt."""
    async with pool_of(Writer("6"), trusts=5, salted=True) as (pool, urls, seen):
        pool.update(fenced(urls[0]))
        pool.update(trusted(urls[0], 6))
        await pool.generate(PieceRequest([3], PARAMS, began=5))
        assert [body["cache_salt"].split(".")[1] for body in seen[0]] == ["6"]


async def test_a_stale_prefix_is_asked_again_at_last_with_a_salt_of_its_own():
    writer = Caching("8")
    async with pool_of(writer, trusts=7, salted=True) as (pool, urls, seen):
        asked = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
        await until(lambda: seen[0])
        pool.update(trusted(urls[0], 8))  # the push had ended when the server began to write
        assert (await asked).completion.versions == (VersionSpan(8, 0, len(LONG)),)
        assert [body["cache_salt"].split(".")[1] for body in seen[0]] == ["7", "8"]
        found = pool.counters()
        assert (found["stale_prefixes"], found["wasted_stale"], found["pieces"]) == (1, len(LONG), 1)
        assert found["tokens"] == 2 * len(LONG)

        writer.push = lambda version: pool.update(trusted(urls[0], version))
        await pool.generate(PieceRequest([3], SEEDED))
        assert len(seen[0]) == 5 and pool.counters()["stale_prefixes"] == 3
        assert len({body["cache_salt"] for body in seen[0]}) == 4, "of 8 twice, of 9, at last one of its own"

        writer.empty = True
        await pool.generate(PieceRequest([3], SEEDED))
        assert len(seen[0]) == 6 and pool.counters()["stale_prefixes"] == 3, "an empty cache is never stale"


async def test_a_server_that_does_not_know_salts_is_told():
    writer = Caching("8")
    writer.knows_salts = False
    async with pool_of(writer, trusts=8, salted=True, retries=1) as (pool, urls, seen):
        writer.push = lambda version: pool.update(trusted(urls[0], version))
        with pytest.raises(RolloutFailed, match="its prefix cache does not keep salts apart"):
            await pool.generate(PieceRequest([3], SEEDED))
        assert len(seen[0]) == 4


# ---- servers join and leave


async def test_a_server_that_leaves_returns_what_it_has_written_and_is_forgotten():
    """The completion goes on at another server from there; nothing is written twice."""
    leaving, staying = Writer(stops_after=3), Writer(stops_after=0)
    async with pool_of(leaving, staying) as (pool, urls, seen):
        asked = asyncio.create_task(generate_completion(pool, [3], SEEDED, prefer=urls[0]))
        await until(lambda: leaving.ended)
        left = asyncio.create_task(pool.leave(urls[0], 0))
        staying.go.set()
        await left
        assert (await asked).token_ids == LONG
        assert [len(bodies) for bodies in seen] == [1, 1]
        assert seen[1][0]["input_ids"] == [3, *LONG[:3]]
        found = pool.counters()
        assert found["tokens"] == len(LONG) and not any(found[f"wasted_{cause}"] for cause in WASTE)
        assert 0 < found["busy_s"] <= found["servers_s"]
        assert (await pool.generate(PieceRequest([3], SEEDED), prefer=urls[0])).url == urls[1], (
            "its name may be known still"
        )


async def test_a_server_that_leaves_and_returns_nothing_is_waited_for_no_longer_than_a_cut_request(monkeypatch):
    monkeypatch.setattr("megarl.rollout.pool.sender.GRACE_S", 0.1)
    async with pool_of(silent, good, retries=0) as (pool, urls, seen):
        asked = asyncio.create_task(pool.generate(PieceRequest([3], PARAMS), prefer=urls[0]))
        await until(lambda: seen[0])
        await pool.leave(urls[0], 0)
        assert (await asked).url == urls[1], "it has not failed, and costs no attempt"


async def test_a_server_that_joins_writes_when_it_is_trusted_and_brings_its_slots():
    here, there = Writer(stops_after=0), Writer(stops_after=0)
    options = {"timeout_s": 200, "fenced": True, "max_in_flight": 1}
    async with serving(here, there) as (urls, seen), EnginePool([], "", GenerationSettings(**options)) as pool:
        pool.join(urls[0], 0)
        pool.update(trusted(urls[0], 0))
        asked = [asyncio.create_task(generate_completion(pool, [3], SEEDED)) for _ in range(3)]
        await until(lambda: here.ended)
        pool.join(urls[1], 2)
        await asyncio.sleep(0.05)
        assert [len(bodies) for bodies in seen] == [3, 0]
        pool.update(trusted(urls[1], 0))
        asked.append(asyncio.create_task(generate_completion(pool, [3], SEEDED)))
        await pool.leave(urls[0], 0)
        await until(lambda: len(there.ended) == 3)
        there.go.set()
        assert [(await task).token_ids for task in asked] == [LONG] * 4
