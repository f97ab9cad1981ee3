"""Which server the pool asks, how long it waits, when it gives a request up, and a server."""

import asyncio
import contextlib
import os
import re
import resource
from functools import partial

import pytest
from aiohttp import web
from endless_servers import drip, endless, flood
from fake_servers import Writer, babbling, broken, completion_of, good, nothing, refusing, reply_to, serving, silent
from pools import pool_of, until
from states import fenced, trusted

from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.continuation import generate_completion
from megarl.rollout.pool import pace
from megarl.rollout.pool import pool as pool_module
from megarl.rollout.pool.pool import WASTE, EnginePool
from megarl.rollout.pool.pool_server import FAULTS, NoFilesLeft, PieceRequest, RolloutFailed
from megarl.rollout.protocol import ROUTING_KEY, SamplingParams
from megarl.rollout.settings import GenerationSettings
from megarl.servers.supervisor import free_ports

PARAMS = SamplingParams(max_new_tokens=2)
SEEDED = SamplingParams(max_new_tokens=8, sampling_seed=3)
LONG = completion_of(3, 1, 8)  # what a `Writer` writes after a prompt of one token
PATIENCE_S = 1.0  # where a limit must pass while others, in this same process, answer within it


async def test_a_failed_request_is_tried_on_another_server():
    async with pool_of(broken, good, rest_s=600) as pooled:
        answers = await asyncio.gather(*(pooled.pool.generate(PieceRequest([3], PARAMS)) for i in range(6)))
        assert [answer.completion.token_ids for answer in answers] == [[4, 1]] * 6
        assert pooled.counts == [3, 6], "at first each server had half of them"
        await pooled.pool.generate(PieceRequest([3], PARAMS))
        assert pooled.counts == [3, 7], "a server that has just failed was asked again"
        names = [body["rid"] for bodies in pooled.seen for body in bodies]
        assert len(set(names)) == len(names), "two attempts share a name"


@pytest.mark.parametrize(
    ("behave", "timeout_s", "why"), [(drip, 0.3, "no answer within 0.3 s"), (flood, 60, r"more than [0-9,]+ bytes")]
)
async def test_a_request_whose_reply_does_not_end_is_tried_on_another_server(behave, timeout_s, why, caplog):
    with endless(behave) as bad:
        async with (
            serving(good) as ([url], _),
            EnginePool([bad, url], "", GenerationSettings(timeout_s=timeout_s, rest_s=600)) as pool,
        ):
            answers = await asyncio.gather(*(pool.generate(PieceRequest([3], PARAMS)) for _ in range(4)))
            assert [answer.completion.token_ids for answer in answers] == [[4, 1]] * 4
    assert re.search(why, caplog.text)


async def test_requests_wait_for_a_server_that_is_down_for_longer_than_all_attempts_would_last(caplog):
    (port,) = free_ports(["127.0.0.1"])
    url, refusals = f"http://127.0.0.1:{port}", "gets no requests for .* ClientConnectorError"
    async with EnginePool([url], "", GenerationSettings(timeout_s=60, retries=1, rest_s=0.01)) as pool:
        asked = [asyncio.create_task(generate_completion(pool, [3], PARAMS)) for _ in range(3)]
        await until(lambda: len(re.findall(refusals, caplog.text)) >= 4)
        assert not any(task.done() for task in asked)
        async with serving(good, port=port) as ([same], seen):
            assert same == url
            assert [(await task).token_ids for task in asked] == [[4, 1]] * 3
            assert len(seen[0]) == 3
        assert pool.counters()["wasted_lost"] == pool.counters()["wasted_failed"] == 0


async def overdue(request):
    return web.json_response({"object": "error", "message": "Request running timeout reached."}, status=503)


@pytest.mark.parametrize("words", ["no available workers", "Request waiting timeout reached."])
async def test_requests_wait_where_a_router_or_a_queue_has_no_room_for_them(words):
    """A router without a server answers 503, and SGLang where a request waited for longer than it allows."""
    answers = iter([503] * 5)

    async def full(request):
        return web.Response(status=503, text=words) if next(answers, 200) == 503 else await good(request)

    async with pool_of(full, retries=1) as (pool, _, seen):
        assert (await pool.generate(PieceRequest([3], PARAMS))).completion.token_ids == [4, 1]
        assert len(seen[0]) == 6 and pool.counters()["wasted_failed"] == 0


async def hanging_up(request):
    request.transport.close()


@pytest.mark.parametrize(
    ("handlers", "options", "why", "num"),
    [
        (
            [hanging_up] * 2,
            {"retries": 2},
            r"3 attempts failed: (\S+): \w+Disconnected.* (?!\1)http\S+: \w+Disconnected",
            3,
        ),
        ([silent], {"retries": 1, "timeout_s": 0.2}, r"2 attempts failed: .*no answer within 0\.2 s", 2),
        # It is told to end the request when its time is over.
        ([Writer(stops_after=0)], {"retries": 1, "timeout_s": 0.2}, "2 attempts failed: .*before the first token", 2),
        # SGLang's limit of a running request answers 503, as an absent server does, but the server had begun.
        ([overdue], {"retries": 2}, "3 attempts failed: .*503: Request running timeout reached", 3),
        # Nobody is told of it, so nobody fences the server.
        ([babbling], {"retries": 4}, "5 attempts failed: .*lacks 'meta_info'", 5),
        ([refusing], {}, "refused the request with status 400: such a prompt is not wanted", 1),
        ([refusing] * 3, {}, "refused the request with status 400: such a prompt is not wanted", 2),
    ],
    ids=["hangs_up", "silent", "only_ends", "overdue", "babbles", "refuses", "all_refuse"],
)
async def test_a_request_that_no_server_answers_is_given_up(handlers, options, why, num):
    async with pool_of(*handlers, **options) as pooled:
        with pytest.raises(RolloutFailed, match=why):
            await pooled.pool.generate(PieceRequest([3], PARAMS))
        assert sum(pooled.counts) == num


async def test_without_files_for_connections_the_limit_is_named():
    """No further file can be opened here: its number would be the limit."""
    (port,) = free_ports(["127.0.0.1"])
    async with EnginePool([f"http://127.0.0.1:{port}"], "", GenerationSettings(timeout_s=60)) as pool:
        allowed, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, allowed[1]))
        try:
            with pytest.raises(
                NoFilesLeft, match=rf"^rollout\.max_in_flight: .* may open {free}; expected .*ulimit -n"
            ):
                await pool.generate(PieceRequest([3], PARAMS))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)


async def test_a_prompt_that_could_kill_a_server_is_never_sent():
    async with pool_of(good, num_ids=8) as (pool, _, seen):
        for prompt in ([], [3, 8], [-1]):
            with pytest.raises(RolloutFailed):
                await generate_completion(pool, prompt, PARAMS)
        assert not seen[0]


@pytest.mark.full
async def test_two_thousand_requests_are_answered_by_a_real_server(server):
    async with EnginePool([server.url], server.token, GenerationSettings(timeout_s=60)) as pool:
        params = SamplingParams(max_new_tokens=1)
        answers = await asyncio.gather(*(generate_completion(pool, [2 + i % 30], params) for i in range(2000)))
    assert [len(answer.token_ids) for answer in answers] == [1] * 2000


@pytest.mark.parametrize("max_in_flight", [4, 64])
async def test_while_others_wait_for_slots_only_answers_to_one_prompt_travel_together(max_in_flight):
    async def answering(request):
        body = await request.json()
        asked = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
        return web.json_response(reply_to() * len(asked))

    async with pool_of(answering, joins=True, max_in_flight=max_in_flight) as (pool, _, seen):
        await asyncio.gather(*(generate_completion(pool, prompt, PARAMS) for prompt in ([3], [3], [4], [4], [5], [5])))
        sizes = [len(body["rid"]) if isinstance(body["rid"], list) else 1 for body in seen[0]]
        assert sizes == ([2, 2, 2] if max_in_flight == 4 else [6])


async def test_a_slow_request_is_ended_with_those_that_travel_with_it():
    """The server answers when all of them end."""
    aborted = set()

    async def moody(request):
        rids = (await request.json())["rid"]
        await until(lambda: aborted >= set(rids))
        return web.json_response(reply_to() * len(rids))

    async def abort(url, rid):
        aborted.add(rid)

    async with pool_of(moody, joins=True) as (pool, _, seen):
        pool._sender._abort = abort
        asked = [asyncio.create_task(pool.generate(PieceRequest([3], PARAMS))) for _ in range(3)]
        await until(lambda: seen[0])
        (server,) = pool._servers.values()
        pool._sender.hurry(next(iter(server.asks)))
        assert all(ask.is_overdue for ask in server.asks)
        assert [(await each).completion.token_ids for each in asked] == [[4, 1]] * 3


async def test_a_request_may_wait_in_the_queue_of_a_server_that_writes_for_others():
    writer = Writer(stops_after=0)
    async with pool_of(writer, timeout_s=PATIENCE_S, retries=0) as (pool, _, seen):
        asked = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
        await until(lambda: seen[0])
        writer.stops_after = None
        await pool.generate(PieceRequest([3], SEEDED))
        assert (await asked).completion.token_ids == LONG
        assert len(seen[0]) == 3, "it was ended without a token, and asked once more"


async def test_a_session_stays_on_its_server_until_that_is_much_busier():
    here, there = Writer(stops_after=0), Writer(stops_after=0)
    # max_in_flight 64 / 8 / 2 servers: up to 4 more than the least busy one
    async with pool_of(here, there, max_in_flight=64) as pooled:
        asked = []
        for expected in ([1, 0], [2, 0], [3, 0], [4, 0], [5, 0], [5, 1], [6, 1], [6, 2]):
            asked.append(asyncio.create_task(pooled.pool.generate(PieceRequest([3], SEEDED), prefer=pooled.urls[0])))
            await until(lambda expected=expected: pooled.counts == expected)
        here.go.set(), there.go.set()
        assert {(await task).url for task in asked} == set(pooled.urls)


def test_sessions_are_spread_by_their_completions():
    with contextlib.ExitStack() as stack:
        pool = EnginePool(["http://a", "http://b"], "", GenerationSettings(timeout_s=1))
        homes = [stack.enter_context(pool.session(size)).url for size in (8, 2, 2, 2, 2, 2)]
        assert homes == ["http://a"] + ["http://b"] * 4 + ["http://a"]
        pool.update(fenced("http://b"))
        assert stack.enter_context(pool.session(2)).url == "http://a"
    pool.update(trusted("http://b", 0))
    with pool.session(1) as first, pool.session(1) as second:
        assert {first.url, second.url} == {"http://a", "http://b"}, "ended sessions count no more"


def test_sessions_are_spread_over_the_data_parallel_ranks_of_each_server():
    with contextlib.ExitStack() as stack:
        pool = EnginePool(["http://a", "http://b"], "", GenerationSettings(timeout_s=1, dp_ranks=2))
        homes = [stack.enter_context(pool.session(size)) for size in (8, 2, 2, 2, 4, 1)]
        assert [(home.url, home.dp_rank) for home in homes] == [
            ("http://a", 0), ("http://b", 0), ("http://b", 1), ("http://b", 0), ("http://b", 1), ("http://a", 1),
        ]  # fmt: skip
        assert len({home.key for home in homes}) == len(homes)


async def test_requests_of_a_session_have_one_key_for_the_router_and_another_one_after_a_failure():
    keys = []

    async def fails_once(request):
        keys.append(request.headers[ROUTING_KEY])
        return await (broken if len(keys) == 2 else good)(request)

    async with pool_of(fails_once) as (pool, _, _):
        with pool.session(1) as affinity, pool.session(1) as other:
            for _ in range(3):
                await pool.generate(PieceRequest([3], PARAMS, affinity=affinity), prefer=affinity.url)
            await pool.generate(PieceRequest([3], PARAMS, affinity=other), prefer=affinity.url)
    first, second, again, third, of_other = keys
    assert first == second and again == third and len({first, again, of_other}) == 3


async def test_requests_name_the_data_parallel_rank_of_their_session_where_a_server_has_several():
    async with (
        pool_of(Writer(), dp_ranks=2, piece_tokens=1) as (pool, _, seen),
        pool_of(Writer()) as (plain, _, seen_by_one),
    ):
        with pool.session(1), pool.session(1) as affinity:
            await generate_completion(pool, [3], SEEDED, affinity=affinity)
        assert len(seen[0]) > 1 and {body["routed_dp_rank"] for body in seen[0]} == {1}
        await generate_completion(pool, [3], SEEDED)
        with plain.session(1) as affinity:
            await generate_completion(plain, [3], SEEDED, affinity=affinity)
        assert "routed_dp_rank" not in seen[0][-1] and "routed_dp_rank" not in seen_by_one[0][-1]


async def test_a_data_parallel_rank_that_is_much_busier_than_another_one_is_not_named():
    """max_in_flight 32 / 8 / 2 ranks: up to 2 more than the least busy one."""
    writer = Writer(stops_after=0)
    async with pool_of(writer, dp_ranks=2, max_in_flight=32) as (pool, _, seen):
        with pool.session(1) as affinity:
            asked = []
            for number in range(1, 6):
                request = PieceRequest([3], SEEDED, affinity=affinity)
                asked.append(asyncio.create_task(pool.generate(request, prefer=affinity.url)))
                await until(lambda number=number: len(seen[0]) == number)
            writer.go.set()
            await asyncio.gather(*asked)
    assert [body.get("routed_dp_rank") for body in seen[0]] == [0, 0, 0, None, None]


async def test_what_a_cut_off_request_wrote_is_estimated_and_counted_by_its_cause():
    writer = Writer()
    async with pool_of(writer) as (pool, urls, _):
        await pool.generate(PieceRequest([3], SEEDED))
        writer.stops_after = 0
        for cause in ("fenced", "cancelled"):
            asked = asyncio.create_task(pool.generate(PieceRequest([3], SEEDED)))
            await until(lambda: writer.ended)
            await asyncio.sleep(0.1)  # much longer than the first one took
            assert pool.counters()["in_flight"] == 1
            if cause == "fenced":
                pool.update(fenced(urls[0]))
                await asyncio.sleep(0)  # the request ends
                assert pool.counters()["in_flight"] == 0
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
            assert pool.counters()[f"wasted_{cause}"] == SEEDED.max_new_tokens
            pool.update(trusted(urls[0], 0))
        found = pool.counters()
        assert found["tokens"] == len(LONG) + 2 * SEEDED.max_new_tokens
        assert found.keys() >= {f"wasted_{cause}" for cause in WASTE}
        assert 0.2 < found["busy_s"] <= found["servers_s"]


@pytest.mark.parametrize(("rest_s", "connections"), [(0.0, 1), (0.3, 2)])
async def test_clients_do_not_use_a_connection_that_was_idle_for_long(monkeypatch, rest_s, connections):
    """A server closes idle connections too, and would close one while a request is on its way to it."""
    monkeypatch.setattr("megarl.rollout.pool.sender.KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr("megarl.rollout.client.KEEP_ALIVE_S", 0.1)

    async def note(request):
        peers.add(request.transport.get_extra_info("peername"))
        return await good(request)

    async with pool_of(note) as (pool, urls, _):
        client = ServerClient(urls[0], "token", timeout_s=60)

        async def ask_the_client():
            with contextlib.suppress(ServerError):  # it is not the reply that was asked for
                await asyncio.to_thread(client.prompt_log_probs, [5, 6])

        for ask in (partial(pool.generate, PieceRequest([5], PARAMS)), ask_the_client):
            peers = set()
            for _ in range(2):
                await ask()
                await asyncio.sleep(rest_s)
            assert len(peers) == connections


# ---- servers that fail, hang or are slow: when one is taken out of service, and what its owner is told


async def full(request):
    return web.Response(status=503, text="the queue is full")


@pytest.mark.parametrize(
    ("bad", "options", "reason"),
    [
        # The other server does not refuse them.
        (refusing, {}, "3 requests in a row failed; the last: status 400: such a prompt is not wanted"),
        # It does not even end a request whose time is over, and is reported at once.
        (silent, {"timeout_s": 0.5}, "no answer within 0.5 s, and no token for any other request"),
        # It lets no request in for longer than the time limit.
        (full, {"timeout_s": 0.2}, "no request has reached it for 0.2 s; the last: status 503: the queue is full"),
    ],
    ids=["refuses", "hangs", "full"],
)
async def test_a_server_that_is_to_blame_is_reported_and_its_requests_are_written_elsewhere(bad, options, reason):
    unfit = []
    async with pool_of(bad, good, rest_s=0.001, unfit=unfit, **options) as (pool, urls, seen):
        while not unfit:
            assert (await pool.generate(PieceRequest([3], PARAMS), prefer=urls[0])).url == urls[1]
            await asyncio.sleep(0.01)
        assert unfit == [(urls[0], reason)]
        assert (len(seen[0]) == 1) == (bad is silent)


async def forbidding(request):
    return web.json_response({"error": {"message": "Unauthorized"}}, status=401)


async def sending_elsewhere(request):
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize("bad", [babbling, broken, nothing, hanging_up, forbidding, sending_elsewhere])
async def test_a_server_that_fails_again_and_again_is_reported_and_asked_no_more(bad):
    """Before its requests have no attempt left; a trust, the next verified push, lets it write again."""
    unfit, well = [], False

    async def handler(request):
        return await (good if well else bad)(request)

    async with pool_of(handler, rest_s=0.001, trusts=0, unfit=unfit) as (pool, urls, seen):
        asked = asyncio.create_task(pool.generate(PieceRequest([3], PARAMS)))
        await until(lambda: unfit)
        assert len(seen[0]) == FAULTS and not asked.done()
        ((url, reason),) = unfit
        assert url == urls[0] and re.match(r"3 requests (in a row )?failed; the last: ", reason)
        well = True
        pool.update(trusted(urls[0], 0))
        assert (await asked).completion.token_ids == [4, 1]


async def test_senseless_replies_among_good_ones_are_counted_too():
    """Whatever comes between them, and since the last trust only."""
    unfit, bad = [], False

    async def moody(request):
        return await (babbling if bad else good)(request)

    async with pool_of(moody, good, rest_s=0.001, unfit=unfit) as (pool, urls, _):
        for turn in range(5):
            for is_bad in (True, False):
                bad = is_bad
                await pool.generate(PieceRequest([3], PARAMS), prefer=urls[0])
                await until(lambda: pool._servers[urls[0]].resting_until <= asyncio.get_running_loop().time())
            if turn == 1:
                pool.update(trusted(urls[0], 0))
            assert len(unfit) == (turn == 4)
        assert pool.counters()["failed_requests"] == 5


async def test_a_senseless_reply_to_several_requests_counts_once():
    """Short answers that are asked for at once travel in one request."""
    unfit, num_bad = [], FAULTS - 1

    async def moody(request):
        nonlocal num_bad
        num_bad -= 1
        num = len((await request.json())["input_ids"])
        return web.json_response([{"output_ids": [3]}] * num if num_bad >= 0 else reply_to() * num)

    # A rest lasts until all eight have failed: what asks again earlier travels in a request of its own.
    async with pool_of(moody, rest_s=0.2, joins=True, unfit=unfit) as (pool, _, seen):
        await asyncio.gather(*(pool.generate(PieceRequest([3, 4], PARAMS)) for _ in range(8)))
        assert [len(body["rid"]) for body in seen[0]] == [8] * FAULTS and not unfit


async def in_its_own_time(request):
    await asyncio.sleep(0.3)
    return await good(request)


@pytest.mark.parametrize("stops", [False, True])
async def test_a_server_that_is_slow_is_reported_and_its_requests_are_written_elsewhere(stops, monkeypatch):
    """Long before the time limit of a request.

    If it `stops`, it writes one token, and no other one before it is told to end the request: that one is kept.
    """
    monkeypatch.setattr(pace, "LEAST_S", 0.0)
    monkeypatch.setattr(pool_module, "_PACE_LOOK_S", 0.05)
    unfit, slow, fast, wanted = [], in_its_own_time, good, [4, 1]
    if stops:
        slow, fast, wanted = Writer(stops_after=1), Writer(), LONG
        slow.go.set()
    async with pool_of(slow, fast, timeout_s=600, max_in_flight=8, slow_factor=5.0, unfit=unfit) as (pool, urls, _):

        async def ask(url):
            while not unfit:
                assert (await generate_completion(pool, [3], SEEDED, prefer=url)).token_ids == wanted

        assert (await pool.generate(PieceRequest([3], SEEDED), prefer=urls[0])).url == urls[0]  # its start is over
        if stops:
            slow.go.clear()
        await asyncio.gather(*(ask(url) for url in [*urls, *urls]))
        assert len(unfit) == 1 and unfit[0][0] == urls[0], unfit
        assert re.match(r"it is slow: 3 of its last 5 replies took more than 5 times as long as ", unfit[0][1])
        assert pool.counters()["slow_servers"] == 1
