"""Completions in pieces: the same as at once; nothing written is lost or written twice, whatever its server does."""

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from fake_servers import Writer, broken, completion_of, refusing, serving
from pools import pool_of, until
from states import fenced, held, trusted
from tiny_server import TOKEN, VARIANTS, running

from megarl.rollout.continuation import generate_completion, join
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import RolloutFailed
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import Completion, VersionSpan

PROMPT = [3, 4, 5]
PARAMS = SamplingParams(max_new_tokens=24, sampling_seed=6)
WHOLE = completion_of(6, len(PROMPT), 24)


class Recording(EnginePool):
    """Remembers what every piece was asked with, and what came."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.pieces = []

    async def generate(self, request, **how):
        piece = await super().generate(request, **how)
        self.pieces.append((list(request.prompt_ids), request.params, piece))
        return piece

    def check(self, prompt, completion):
        """Each piece went on exactly where the one before had ended, and the completion is all of them."""
        so_far, log_probs, urls = [], [], []
        for prompt_ids, _, (part, url) in self.pieces:
            if prompt_ids[: len(prompt)] == prompt:  # not of another one's
                assert prompt_ids == prompt + so_far
                so_far, log_probs, urls = so_far + part.token_ids, log_probs + part.log_probs, [*urls, url]
        assert (completion.token_ids, completion.log_probs) == (so_far, log_probs)
        edges = [0, *(span.end for span in completion.versions)]
        assert [span.start for span in completion.versions] == edges[:-1] and edges[-1] == len(so_far)
        return urls


def part(tokens, *spans, finish="length", **columns):
    return Completion(
        tokens, [-0.5 * token for token in tokens], finish, tuple(VersionSpan(*span) for span in spans), columns=columns
    )


def test_pieces_are_joined_with_their_versions_and_columns():
    first = part([7, 8], (1, 0, 1), (2, 1, 2), experts=np.array([[1, 1], [2, 2], [3, 3]]), odd=np.arange(3.0))
    # The second piece describes its own prompt again, and differently: what is there stays.
    new = part([9, 10, 11], (2, 0, 1), (3, 1, 3), finish="stop", experts=np.full((6, 2), 9), odd=-np.arange(6.0))
    whole = join(first, new, prompt_tokens=1)
    assert whole.token_ids == [7, 8, 9, 10, 11] and whole.finish_reason == "stop"
    assert whole.log_probs == [-3.5, -4.0, -4.5, -5.0, -5.5]
    assert whole.versions == (VersionSpan(1, 0, 1), VersionSpan(2, 1, 3), VersionSpan(3, 3, 5))
    assert whole.columns["experts"].tolist() == [[1, 1], [2, 2], [3, 3], [9, 9], [9, 9], [9, 9]]
    assert whole.columns["odd"].tolist() == [0.0, 1.0, 2.0, -3.0, -4.0, -5.0]
    apart = join(part([7], (1, 0, 1)), part([8], (2, 0, 1)), prompt_tokens=1)
    assert apart.versions == (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))


async def test_a_completion_in_pieces_of_any_size_is_the_one_that_is_written_at_once():
    async with serving(Writer(), Writer()) as (urls, _):
        for size in (0, 1, 2, 7, len(WHOLE) - 1, len(WHOLE), len(WHOLE) + 1, 100):
            async with Recording(urls, "", GenerationSettings(timeout_s=200, piece_tokens=size)) as pool:
                completion = await generate_completion(pool, PROMPT, PARAMS)
                assert len(set(pool.check(PROMPT, completion))) == 1, "it stays on its server"
                assert completion == part(WHOLE, (0, 0, len(WHOLE)), finish=completion.finish_reason)
                assert completion.finish_reason == ("stop" if WHOLE[-1] == 1 else "length")
                assert len(pool.pieces) == (-(-len(WHOLE) // size) if size else 1)
                limits = [params.max_new_tokens for _, params, _ in pool.pieces]
                assert all(limit <= (size or 24) for limit in limits) and limits[0] == min(size or 24, 24)


@pytest.mark.parametrize("limit", [4, 5])
async def test_a_completion_ends_at_its_own_limit(limit):
    async with pool_of(Writer(), piece_tokens=2) as (pool, _, seen):
        completion = await generate_completion(pool, PROMPT, replace(PARAMS, max_new_tokens=limit))
        assert (completion.token_ids, completion.finish_reason) == (WHOLE[:limit], "length")
        assert len(seen[0]) == (limit + 1) // 2


class Full(Writer):
    """Has room for so many tokens; stock SGLang writes as many as fit, and refuses a prompt that fills it."""

    room = len(PROMPT) + 7

    async def __call__(self, request):
        body = await request.json()
        if len(body["input_ids"]) >= self.room:
            return await refusing(request)
        return await super().__call__(request)

    async def write(self, body, ended):
        tokens, finish = await super().write(body, ended)
        left = self.room - len(body["input_ids"])
        return tokens[:left], finish if len(tokens) <= left else "length"


@pytest.mark.parametrize("piece_tokens", [0, 4])
async def test_a_completion_that_fills_its_server_ends_there(piece_tokens):
    async with pool_of(Full(), piece_tokens=piece_tokens) as (pool, _, seen):
        completion = await generate_completion(pool, PROMPT, PARAMS)
        assert (completion.token_ids, completion.finish_reason) == (WHOLE[:7], "length")
        assert len(seen[0]) == (2 if piece_tokens else 1)


async def test_a_server_that_is_fenced_in_mid_piece_costs_only_this_piece():
    first, other = Writer("5"), Writer("6")
    async with pool_of(first, other, fenced=True, piece_tokens=4, make=Recording) as (pool, urls, seen):
        pool.update(trusted(urls[0], 5))
        asked = asyncio.create_task(generate_completion(pool, PROMPT, PARAMS))
        while len(pool.pieces) < 2:
            first.stops_after = 2 if len(seen[0]) >= 2 else None
            await asyncio.sleep(0)
        await until(lambda: first.ended)
        verified = sum(len(piece.completion.token_ids) for _, _, piece in pool.pieces)
        pool.update(fenced(urls[0]))
        pool.update(trusted(urls[1], 6))
        completion = await asked
        pool.check(PROMPT, completion)
        assert completion.token_ids == WHOLE
        assert completion.versions == (VersionSpan(5, 0, verified), VersionSpan(6, verified, len(WHOLE)))


async def test_pieces_that_a_push_ends_go_on_with_the_next_version():
    writer = Writer("1", stops_after=5)
    async with pool_of(writer, trusts=1, make=Recording) as (pool, urls, _):
        asked = asyncio.create_task(generate_completion(pool, PROMPT, PARAMS))
        for version in (2, 3):
            await until(lambda: writer.ended)
            pool.update(held(urls[0]))
            writer.end()
            await until(lambda: not writer.ended)
            writer.version = str(version)
            pool.update(trusted(urls[0], version))
        writer.go.set()
        completion = await asked
        pool.check(PROMPT, completion)
        assert completion.token_ids == WHOLE
        assert completion.versions == (VersionSpan(1, 0, 5), VersionSpan(2, 5, 10), VersionSpan(3, 10, len(WHOLE)))
        assert not any(value for name, value in pool.counters().items() if name.startswith("wasted"))


async def test_an_answer_may_take_longer_than_any_request():
    writer = Writer(stops_after=6)  # of each request, until its time is over
    async with pool_of(writer, timeout_s=0.3, retries=0, make=Recording) as (pool, _, seen):
        completion = await generate_completion(pool, PROMPT, PARAMS)
        pool.check(PROMPT, completion)
        assert completion.token_ids == WHOLE and len(seen[0]) >= 3
        assert pool.counters()["wasted_failed"] == 0


class Flaky(Writer):
    """Fails `failures` times before each piece."""

    def __init__(self, failures):
        super().__init__()
        self.failures, self.num = failures, 0

    async def __call__(self, request):
        self.num += 1
        return await (super().__call__(request) if self.num % (self.failures + 1) == 0 else broken(request))


async def test_attempts_are_counted_from_the_last_token():
    """A fleet that goes on writing never fails, however often it stumbles; a dead one does."""
    async with pool_of(Flaky(2), retries=2, rest_s=0.001, piece_tokens=3) as (pool, _, seen):
        assert (await generate_completion(pool, PROMPT, PARAMS)).token_ids == WHOLE
        assert len(seen[0]) > 3 * 2
    async with pool_of(Flaky(3), retries=2, rest_s=0.001, piece_tokens=3) as (pool, *_):
        with pytest.raises(RolloutFailed, match="3 attempts failed"):
            await generate_completion(pool, PROMPT, PARAMS)


async def test_what_a_fleet_that_dies_had_written_is_counted_as_lost():
    writer = Writer()
    dying = iter([writer, writer])

    async def handler(request):
        return await next(dying, broken)(request)

    async with pool_of(handler, retries=1, rest_s=0.001, piece_tokens=4) as (pool, *_):
        with pytest.raises(RolloutFailed, match="2 attempts failed.*out of order.* after 8 tokens"):
            await generate_completion(pool, PROMPT, PARAMS)
        assert pool.counters()["wasted_lost"] == 8


async def test_a_cancelled_completion_frees_its_slot_and_counts_its_tokens():
    writer = Writer()
    async with pool_of(writer, max_in_flight=1, piece_tokens=4) as (pool, _, seen):
        asked = asyncio.create_task(generate_completion(pool, PROMPT, PARAMS))
        while len(seen[0]) < 2:
            writer.stops_after = 0 if seen[0] else None
            await asyncio.sleep(0)
        await until(lambda: pool.counters()["pieces"] or not writer.ended)
        num_pieces = pool.counters()["pieces"]
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert pool.counters()["wasted_cancelled"] >= 4 * num_pieces
        writer.go.set()
        assert (await generate_completion(pool, PROMPT, PARAMS)).token_ids == WHOLE


async def test_a_server_that_is_killed_in_mid_piece_costs_only_this_piece(server, model_path, tmp_path):
    """Real servers: one of two dies while it writes; its pieces stay, and the other one goes on."""
    prompts = [[5, 6 + i] for i in range(8)]
    params = SamplingParams(max_new_tokens=100, sampling_seed=5, ignore_eos=True)
    with running(VARIANTS["hf"], model_path, tmp_path) as servers:
        urls, (victim,) = [server.url, *servers.urls], servers.pids
        async with EnginePool(urls[:1], TOKEN, GenerationSettings(timeout_s=240)) as alone:
            expected = await asyncio.gather(*(generate_completion(alone, prompt, params) for prompt in prompts))
        async with Recording(urls, TOKEN, GenerationSettings(timeout_s=240, piece_tokens=10)) as pool:
            tasks = [
                asyncio.create_task(generate_completion(pool, prompt, params, prefer=urls[1])) for prompt in prompts
            ]
            await until(lambda: len(pool.pieces) >= 3 * len(prompts))
            os.kill(victim, signal.SIGKILL)
            completions = await asyncio.gather(*tasks)
    for prompt, completion, whole in zip(prompts, completions, expected, strict=True):
        written_by = pool.check(prompt, completion)
        assert completion.token_ids == whole.token_ids and len(completion.token_ids) == 100
        assert written_by[0] == urls[1] and written_by[-1] == urls[0]


async def test_urgent_completions_are_asked_before_those_that_wait():
    writer = Writer(stops_after=0)
    async with pool_of(writer, max_in_flight=2, piece_tokens=24) as (pool, *_):

        def ask(first, *, urgent):
            return [
                asyncio.create_task(generate_completion(pool, [first + i], PARAMS, urgent=urgent)) for i in range(4)
            ]

        tasks = ask(10, urgent=False)
        await until(lambda: len(writer.ended) >= 2)
        tasks += ask(20, urgent=True)
        await asyncio.sleep(0)  # they wait for a slot
        writer.go.set()
        await asyncio.gather(*tasks)
        assert writer.most == 2
        assert [body["input_ids"][0] for body in writer.bodies] == [10, 11, 20, 21, 22, 23, 12, 13]
