"""The pool against servers that fail in every way; the misbehaving ones are a few lines of aiohttp in this process."""

from __future__ import annotations

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

from megarl.rollout.client import ServerClient, ServerError
from megarl.rollout.pieces import write
from megarl.rollout.pool import pace
from megarl.rollout.pool import pool as pool_module
from megarl.rollout.pool.pool import WASTE, EnginePool, RolloutFailed
from megarl.rollout.pool.pool_server import FAULTS, NoFilesLeft
from megarl.rollout.protocol import SamplingParams
from megarl.sample import VersionSpan
from megarl.servers.supervisor import free_ports

PARAMS = SamplingParams(max_new_tokens=2)
SEEDED = SamplingParams(max_new_tokens=8, sampling_seed=3)
LONG = completion_of(3, 1, 8)  # what a `Writer` writes after a prompt of one token
PATIENCE_S = 2.0  # where a limit must pass while others, in this same process, answer within it


def run(test):
    asyncio.run(asyncio.wait_for(test(), 240))


def test_work_goes_to_the_least_loaded_server():
    async def test():
        async with serving(good, good) as (urls, seen), EnginePool(urls, "", timeout_s=60) as pool:
            await asyncio.gather(*(pool.generate([3], PARAMS) for _ in range(40)))
            assert [len(bodies) for bodies in seen] == [20, 20]

    run(test)


@pytest.mark.parametrize(("bad", "timeout_s"), [(broken, 60), (silent, PATIENCE_S / 2)])
def test_a_failed_request_is_tried_on_another_server(bad, timeout_s):
    async def test():
        async with serving(bad, good) as (urls, seen), EnginePool(urls, "", timeout_s=timeout_s, rest_s=600) as pool:
            answers = await asyncio.gather(*(pool.generate([3], PARAMS) for i in range(6)))
            assert [answer.completion.token_ids for answer in answers] == [[4, 1]] * 6
            assert len(seen[0]) == 3 and len(seen[1]) == 6
            await pool.generate([3], PARAMS)
            assert len(seen[0]) == 3, "a server that has just failed was asked again"
            names = [body["rid"] for bodies in seen for body in bodies]
            assert len(set(names)) == len(names), "two attempts share a name"

    run(test)


@pytest.mark.parametrize(
    ("behave", "timeout_s", "why"), [(drip, 0.3, "no answer within 0.3 s"), (flood, 60, r"more than [0-9,]+ bytes")]
)
def test_a_request_whose_reply_does_not_end_is_tried_on_another_server(behave, timeout_s, why, caplog):
    async def test(bad):
        async with serving(good) as ([url], _), EnginePool([bad, url], "", timeout_s=timeout_s, rest_s=600) as pool:
            answers = await asyncio.gather(*(pool.generate([3], PARAMS) for _ in range(4)))
            assert [answer.completion.token_ids for answer in answers] == [[4, 1]] * 4

    with endless(behave) as bad:
        run(partial(test, bad))
    assert re.search(why, caplog.text)


def test_requests_wait_for_a_server_that_is_down_for_longer_than_all_attempts_would_last(caplog):
    async def test():
        (port,) = free_ports(["127.0.0.1"])
        url, refusals = f"http://127.0.0.1:{port}", "gets no requests for .* ClientConnectorError"
        async with EnginePool([url], "", timeout_s=60, retries=1, rest_s=0.01) as pool:
            asked = [asyncio.create_task(write(pool, [3], PARAMS)) for _ in range(3)]
            while len(re.findall(refusals, caplog.text)) < 4:
                assert not any(task.done() for task in asked)
                await asyncio.sleep(0.01)
            async with serving(good, port=port) as ([same], seen):
                assert same == url
                assert [(await task).token_ids for task in asked] == [[4, 1]] * 3
                assert len(seen[0]) == 3
            assert pool.counters()["wasted_lost"] == pool.counters()["wasted_failed"] == 0

    run(test)


def test_requests_wait_for_a_router_that_has_no_server_for_now():
    async def test():
        answers = iter([503] * 5)

        async def router(request):
            status = next(answers, 200)
            return await good(request) if status == 200 else web.Response(status=status, text="no available workers")

        options = {"timeout_s": 60, "retries": 1, "rest_s": 0.01}
        async with serving(router) as (urls, seen), EnginePool(urls, "", **options) as pool:
            assert (await pool.generate([3], PARAMS)).completion.token_ids == [4, 1]
            assert len(seen[0]) == 6 and pool.counters()["wasted_failed"] == 0

    run(test)


def test_a_request_that_a_server_ran_for_too_long_is_an_attempt():
    """SGLang's own limits (SGLANG_REQ_RUNNING_TIMEOUT, _WAITING_TIMEOUT) answer 503, as an absent server does."""

    def overdue(message):
        async def handler(request):
            return web.json_response({"object": "error", "message": message}, status=503)

        return handler

    async def ran():
        options = {"timeout_s": 60, "retries": 2, "rest_s": 0.01}
        handler = overdue("Request running timeout reached.")
        async with serving(handler) as (urls, seen), EnginePool(urls, "", **options) as pool:
            with pytest.raises(RolloutFailed, match=r"3 attempts failed: .*503: Request running timeout reached"):
                await pool.generate([3], PARAMS)
            assert len(seen[0]) == 3

    async def waited():
        answers = iter([overdue("Request waiting timeout reached.")] * 5)

        async def busy(request):
            return await next(answers, good)(request)

        options = {"timeout_s": 60, "retries": 1, "rest_s": 0.01}
        async with serving(busy) as (urls, _), EnginePool(urls, "", **options) as pool:
            assert (await pool.generate([3], PARAMS)).completion.token_ids == [4, 1], "no server had begun with it"

    run(ran)
    run(waited)


def test_without_files_for_connections_the_limit_is_named():
    """No further file can be opened here: its number would be the limit."""

    async def test():
        (port,) = free_ports(["127.0.0.1"])
        async with EnginePool([f"http://127.0.0.1:{port}"], "", timeout_s=60) as pool:
            allowed, free = resource.getrlimit(resource.RLIMIT_NOFILE), os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, allowed[1]))
            try:
                with pytest.raises(NoFilesLeft) as error:
                    await pool.generate([3], PARAMS)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
            assert str(error.value) == (
                "rollout.max_in_flight: each request needs an open file, and this process may open "
                f"{free}; expected fewer requests at a time, or a larger limit (ulimit -n)"
            )

    run(test)


async def hanging_up(request):
    request.transport.close()


def test_a_request_that_ends_server_after_server_is_given_up():
    async def test():
        options = {"timeout_s": 60, "retries": 2, "rest_s": 0.01}
        async with serving(hanging_up, hanging_up) as (urls, seen), EnginePool(urls, "", **options) as pool:
            with pytest.raises(RolloutFailed, match=r"3 attempts failed.*Disconnected") as caught:
                await pool.generate([3], PARAMS)
            assert all(url in str(caught.value) for url in urls)
            assert sum(len(bodies) for bodies in seen) == 3

    run(test)


def test_a_silent_server_costs_at_most_attempts_times_the_limit():
    async def test():
        options = {"timeout_s": 0.2, "retries": 1, "rest_s": 0.05}
        async with serving(silent) as (urls, _), EnginePool(urls, "", **options) as pool:
            with pytest.raises(RolloutFailed, match=r"2 attempts failed: .*no answer within 0\.2 s"):
                await pool.generate([3], PARAMS)

    run(test)


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_a_refused_request_is_tried_on_one_other_server(num_servers):
    async def test():
        async with serving(*[refusing] * num_servers) as (urls, seen), EnginePool(urls, "", timeout_s=60) as pool:
            with pytest.raises(RolloutFailed, match="refused the request with status 400: such a prompt is not wanted"):
                await pool.generate([3], PARAMS)
            assert sum(len(bodies) for bodies in seen) == min(num_servers, 2)

    run(test)


def test_a_server_that_alone_refuses_requests_is_to_blame():
    async def test():
        unfit = []
        options = {"timeout_s": 60, "rest_s": 0.001, "on_unfit": lambda url, reason: unfit.append((url, reason))}
        async with serving(refusing, good) as (urls, _), EnginePool(urls, "", **options) as pool:
            while not unfit:
                assert (await pool.generate([3], PARAMS, prefer=urls[0])).url == urls[1]
            assert unfit == [(urls[0], "3 requests in a row failed; the last: status 400: such a prompt is not wanted")]

    run(test)


async def forbidding(request):
    return web.json_response({"error": {"message": "Unauthorized"}}, status=401)


async def sending_elsewhere(request):
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize("bad", [babbling, broken, hanging_up, forbidding, sending_elsewhere])
def test_a_server_that_fails_again_and_again_is_reported_and_asked_no_more(bad):
    """Before its requests have no attempt left; a trust, the next verified push, lets it write again."""

    async def test():
        unfit, well = [], False

        async def handler(request):
            return await (good if well else bad)(request)

        options = {"timeout_s": 60, "rest_s": 0.001, "fenced": True}
        options["on_unfit"] = lambda url, reason: unfit.append((url, reason))
        async with serving(handler) as (urls, seen), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 0)
            asked = asyncio.create_task(pool.generate([3], PARAMS))
            while not unfit:
                await asyncio.sleep(0.01)
            assert len(seen[0]) == FAULTS and not asked.done()
            ((url, reason),) = unfit
            assert url == urls[0] and re.match(r"3 requests (in a row )?failed; the last: ", reason)
            well = True
            pool.trust(urls[0], 0)
            assert (await asked).completion.token_ids == [4, 1]

    run(test)


def test_senseless_replies_among_good_ones_are_counted_too():
    """Whatever comes between them, and since the last trust only."""

    async def test():
        unfit, bad = [], False

        async def moody(request):
            return await (babbling if bad else good)(request)

        options = {"timeout_s": 60, "rest_s": 0.001, "on_unfit": lambda url, reason: unfit.append(url)}
        async with serving(moody, good) as (urls, _), EnginePool(urls, "", **options) as pool:
            for turn in range(5):
                for is_bad in (True, False):
                    bad = is_bad
                    await pool.generate([3], PARAMS, prefer=urls[0])
                    while pool._named(urls[0]).resting_until > asyncio.get_running_loop().time():
                        await asyncio.sleep(0.001)
                if turn == 1:
                    pool.trust(urls[0], 0)
                assert len(unfit) == (turn == 4)
            assert pool.counters()["failed_requests"] == 5

    run(test)


def test_a_senseless_reply_to_several_requests_counts_once():
    """Short answers that are asked for at once travel in one request."""

    async def test():
        unfit, num_bad = [], FAULTS - 1

        async def moody(request):
            nonlocal num_bad
            num_bad -= 1
            num = len((await request.json())["input_ids"])
            return web.json_response([{"output_ids": [3]}] * num if num_bad >= 0 else reply_to() * num)

        options = {"timeout_s": 60, "rest_s": 0.001, "joins": True}
        options["on_unfit"] = lambda url, reason: unfit.append(url)
        async with serving(moody) as (urls, seen), EnginePool(urls, "", **options) as pool:
            await asyncio.gather(*(pool.generate([3, 4], PARAMS) for _ in range(8)))
            assert [len(body["rid"]) for body in seen[0]] == [8] * FAULTS and not unfit

    run(test)


@pytest.mark.parametrize("max_in_flight", [4, 64])
def test_while_others_wait_for_slots_only_answers_to_one_prompt_travel_together(max_in_flight):
    async def test():
        async def answering(request):
            body = await request.json()
            asked = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
            return web.json_response(reply_to() * len(asked))

        options = {"timeout_s": 60, "joins": True, "max_in_flight": max_in_flight}
        async with serving(answering) as (urls, seen), EnginePool(urls, "", **options) as pool:
            prompts = [[3], [3], [4], [4], [5], [5]]
            await asyncio.gather(*(write(pool, prompt, PARAMS) for prompt in prompts))
            sizes = [len(body["rid"]) if isinstance(body["rid"], list) else 1 for body in seen[0]]
            assert sizes == ([2, 2, 2] if max_in_flight == 4 else [6])

    run(test)


def test_a_slow_request_is_ended_with_those_that_travel_with_it():
    """The server answers when all of them end."""

    async def test():
        aborted = set()

        async def moody(request):
            rids = (await request.json())["rid"]
            while not aborted >= set(rids):
                await asyncio.sleep(0.01)
            return web.json_response(reply_to() * len(rids))

        async def abort(url, rid):
            aborted.add(rid)

        options = {"timeout_s": 60, "joins": True}
        async with serving(moody) as (urls, seen), EnginePool(urls, "", **options) as pool:
            pool._sender._abort = abort
            asked = [asyncio.create_task(pool.generate([3], PARAMS)) for _ in range(3)]
            while not seen[0]:
                await asyncio.sleep(0.01)
            (server,) = pool._servers.values()
            pool._sender.hurry(server, next(iter(server.asks)))
            assert all(ask.is_overdue for ask in server.asks)
            assert [(await each).completion.token_ids for each in asked] == [[4, 1]] * 3

    run(test)


def test_a_server_that_hangs_is_reported_at_once():
    """It does not even end a request whose time is over; its request is written elsewhere."""

    async def test():
        unfit = []
        options = {"timeout_s": PATIENCE_S / 2, "on_unfit": lambda url, reason: unfit.append((url, reason))}
        async with serving(silent, good) as (urls, seen), EnginePool(urls, "", **options) as pool:
            assert (await pool.generate([3], PARAMS, prefer=urls[0])).url == urls[1]
            assert unfit == [(urls[0], "no answer within 1 s, and no token for any other request")]
            assert len(seen[0]) == 1

    run(test)


def test_a_real_server_that_writes_nothing_while_its_health_check_answers_is_reported(server):
    """This one still ends a request when its time is over."""

    async def test():
        unfit = []
        options = {"timeout_s": 0.5, "retries": 2, "rest_s": 0.01}
        options["on_unfit"] = lambda url, reason: unfit.append((url, reason))
        async with EnginePool([server.url], server.token, **options) as pool:
            with pytest.raises(RolloutFailed, match="3 attempts failed: .*before the first token"):
                await pool.generate([3], PARAMS)
        reason = "3 requests in a row failed; the last: it ended the request before the first token"
        assert unfit == [(server.url, reason)]

    server.engine.pause("in_place")
    run(test)
    server.engine.health()


def test_a_server_that_lets_no_request_in_for_longer_than_the_time_limit_is_reported():
    async def test():
        unfit, full = [], web.Response
        options = {"timeout_s": 0.2, "rest_s": 0.001, "on_unfit": lambda url, reason: unfit.append((url, reason))}

        async def refuses(request):
            return full(status=503, text="the queue is full")

        async with serving(refuses, good) as (urls, seen), EnginePool(urls, "", **options) as pool:
            while not unfit:
                assert (await pool.generate([3], PARAMS, prefer=urls[0])).url == urls[1]
                await asyncio.sleep(0.01)
            reason = "no request has reached it for 0.2 s; the last: status 503: the queue is full"
            assert unfit == [(urls[0], reason)] and len(seen[0]) > 1

    run(test)


def test_nobody_fences_the_servers_of_a_pool_without_an_owner():
    async def test():
        options = {"timeout_s": 60, "rest_s": 0.001, "retries": 4}
        async with serving(babbling) as (urls, seen), EnginePool(urls, "", **options) as pool:
            with pytest.raises(RolloutFailed, match="5 attempts failed: .*lacks 'meta_info'"):
                await pool.generate([3], PARAMS)
            assert len(seen[0]) == 5

    run(test)


@pytest.mark.parametrize("prompt", [[], [3, 8], [-1]])
def test_a_prompt_that_could_kill_a_server_is_never_sent(prompt):
    async def test():
        async with serving(good) as (urls, seen), EnginePool(urls, "", timeout_s=60, vocab_size=8) as pool:
            with pytest.raises(RolloutFailed):
                await write(pool, prompt, PARAMS)
            assert not seen[0]

    run(test)


def test_a_server_that_comes_back_is_used_again():
    async def test():
        moody = iter([broken, broken])

        async def handler(request):
            return await next(moody, good)(request)

        async with serving(handler) as (urls, _), EnginePool(urls, "", timeout_s=60, rest_s=0.02) as pool:
            assert (await pool.generate([3], PARAMS)).completion.token_ids == [4, 1]

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
            await asyncio.gather(*(write(pool, [3], PARAMS) for _ in range(7 * 7)))
        assert most == 7

    run(test)


def test_two_thousand_requests_are_answered_by_a_real_server(server):
    async def test():
        async with EnginePool([server.url], server.token, timeout_s=60) as pool:
            params = SamplingParams(max_new_tokens=1)
            answers = await asyncio.gather(*(write(pool, [2 + i % 30], params) for i in range(2000)))
        assert [len(answer.token_ids) for answer in answers] == [1] * 2000

    asyncio.run(test())


def test_a_fenced_server_is_asked_for_nothing_until_it_is_trusted():
    async def test():
        async with serving(good) as (urls, seen), EnginePool(urls, "", timeout_s=60, fenced=True) as pool:
            asked = asyncio.create_task(pool.generate([3], PARAMS))
            await asyncio.sleep(0.05)
            assert not seen[0] and not asked.done()
            pool.trust(urls[0], 0)
            assert (await asked).completion.token_ids == [4, 1]

    run(test)


def test_what_a_fenced_server_was_writing_is_written_by_another():
    async def test():
        async with serving(silent, good) as (urls, seen), EnginePool(urls, "", timeout_s=200) as pool:
            asked = [asyncio.create_task(pool.generate([3], PARAMS)) for _ in range(4)]
            while not len(seen[0]) == len(seen[1]) == 2:
                await asyncio.sleep(0.01)
            pool.fence(urls[0])
            assert [(await task).completion.token_ids for task in asked] == [[4, 1]] * 4
            assert [len(bodies) for bodies in seen] == [2, 4]

    run(test)


async def ahead(request):
    return web.json_response(reply_to(version="8"))


def test_a_completion_waits_until_its_version_is_trusted_on_its_server():
    """The server goes on as soon as its push is verified, so an answer may overtake the news of that."""

    async def test():
        async with serving(ahead) as (urls, _), EnginePool(urls, "", timeout_s=60, fenced=True) as pool:
            pool.trust(urls[0], 7)
            asked = asyncio.create_task(pool.generate([3], PARAMS))
            await asyncio.sleep(0.05)
            assert not asked.done()
            pool.trust(urls[0], 8)
            assert (await asked).completion.versions[0].version == 8

    run(test)


def test_a_completion_of_an_unverified_version_is_never_handed_out():
    """A server that restarted in between serves the weights of its folder, stamped 0: another one is asked instead."""

    async def restarted(request):
        return web.json_response(reply_to(version="0"))

    async def right(request):
        return web.json_response(reply_to(version="7", tokens=(5, 1)))

    async def test():
        options = {"timeout_s": PATIENCE_S, "fenced": True, "rest_s": 600}
        async with serving(restarted, right) as (urls, _), EnginePool(urls, "", **options) as pool:
            for url in urls:
                pool.trust(url, 7)
            answers = await asyncio.gather(*(pool.generate([3], PARAMS) for _ in range(4)))
            assert [answer.completion.token_ids for answer in answers] == [[5, 1]] * 4

    async def alone():
        options = {"timeout_s": PATIENCE_S, "fenced": True, "rest_s": 0.01, "retries": 1}
        async with serving(ahead) as (urls, _), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 7)
            with pytest.raises(RolloutFailed, match=r"unverified weights \(version 8\)"):
                await pool.generate([3], PARAMS)

    async def behind_the_runs_back():
        """Somebody started it again: it writes as at the first push, whose version the pool trusts still."""
        unfit = []
        options = {"timeout_s": 60, "fenced": True, "on_unfit": lambda *what: unfit.append(what)}
        async with serving(restarted, right) as (urls, seen), EnginePool(urls, "", **options) as pool:
            for version in (0, 7):
                for url in urls:
                    pool.trust(url, version)
            answers = [await pool.generate([3], PARAMS, prefer=urls[0]) for _ in range(4)]
            assert [answer.completion.token_ids for answer in answers] == [[5, 1]] * 4
            assert unfit == [(urls[0], "it wrote with weights version 0 although it was given version 7")]
            assert len(seen[0]) == 1

    run(test)
    run(alone)
    run(behind_the_runs_back)


def test_completions_are_asked_with_the_adapter_and_are_of_its_version():
    """The server stamps the weights below the adapter, which never change."""

    async def test():
        async with serving(good) as (urls, seen), EnginePool(urls, "", timeout_s=60, fenced=True) as pool:
            pool.trust(urls[0], 7, "actor_7")
            answer = await pool.generate([3], PARAMS)
            pool.trust(urls[0], 8, "actor_8")
            later = await pool.generate([3], PARAMS)
            assert [body["lora_path"] for body in seen[0]] == ["actor_7", "actor_8"]
            assert [piece.completion.versions for piece in (answer, later)] == [(VersionSpan(v, 0, 2),) for v in (7, 8)]

    run(test)


@pytest.mark.parametrize(
    "words",
    [
        "Got LoRA adapter that has never been loaded: {}\nAll",
        "The following requested LoRA adapters are not loaded: {}\n",
    ],
)
def test_a_server_that_lost_its_adapter_is_waited_for(words):
    """It was started again, and the trainer, which has not noticed yet, will push the adapter again."""
    lost = asyncio.Event()

    async def restarted(request):
        name = (await request.json())["lora_path"]
        if name == "actor_7":
            lost.set()
            return web.json_response({"error": {"message": words.format(name)}}, status=400)
        return await good(request)

    async def test():
        options = {"timeout_s": 60, "retries": 0, "rest_s": 0.01, "fenced": True}
        async with serving(restarted) as (urls, seen), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 7, "actor_7")
            asked = asyncio.create_task(pool.generate([3], PARAMS))
            await lost.wait()
            while len(seen[0]) < 3:
                await asyncio.sleep(0.01)
            pool.trust(urls[0], 7, "actor_7_again")
            assert (await asked).completion.token_ids == [4, 1]

    run(test)


def test_a_server_without_adapters_refuses_for_good():
    async def refuses(request):
        message = "LoRA adapter 'actor_7' was requested, but LoRA is not enabled. Please preload adapters"
        return web.json_response({"error": {"message": message}}, status=400)

    async def test():
        async with serving(refuses) as (urls, seen), EnginePool(urls, "", timeout_s=60, fenced=True) as pool:
            pool.trust(urls[0], 7, "actor_7")
            with pytest.raises(RolloutFailed, match="LoRA is not enabled"):
                await pool.generate([3], PARAMS)
            assert len(seen[0]) == 1

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
            asked = [asyncio.create_task(pool.generate([3], PARAMS)) for _ in range(3)]
            while len(seen[0]) < 3:
                await asyncio.sleep(0.01)
            pool.fence(urls[0])
            pool.trust(urls[0], 0)
            slow.set()
            assert [(await task).completion.token_ids for task in asked] == [[4, 1]] * 3
            assert len(seen[0]) == 6

    run(test)


def test_a_session_stays_on_its_server_until_that_is_much_busier():
    async def test():
        here, there = Writer(stops_after=0), Writer(stops_after=0)
        options = {"timeout_s": 200, "max_in_flight": 64}  # 64 / 8 / 2 servers: up to 4 more than the least busy one
        async with serving(here, there) as (urls, seen), EnginePool(urls, "", **options) as pool:
            asked = []
            for expected in ([1, 0], [2, 0], [3, 0], [4, 0], [5, 0], [5, 1], [6, 1], [6, 2]):
                asked.append(asyncio.create_task(pool.generate([3], SEEDED, prefer=urls[0])))
                while [len(bodies) for bodies in seen] != expected:
                    await asyncio.sleep(0.005)
            here.go.set(), there.go.set()
            assert {(await task).url for task in asked} == set(urls)

    run(test)


def test_sessions_are_spread_by_their_completions():
    with contextlib.ExitStack() as stack:
        pool = EnginePool(["http://a", "http://b"], "", timeout_s=1)
        homes = [stack.enter_context(pool.session(size)) for size in (8, 2, 2, 2, 2, 2)]
        assert homes == ["http://a"] + ["http://b"] * 4 + ["http://a"]
        pool.fence("http://b")
        assert stack.enter_context(pool.session(2)) == "http://a"
    pool.trust("http://b", 0)
    with pool.session(1) as first, pool.session(1) as second:
        assert {first, second} == {"http://a", "http://b"}, "ended sessions count no more"


def test_a_held_server_is_asked_for_nothing_new_and_brings_back_what_it_has():
    async def test():
        held, other = Writer(stops_after=3), Writer()
        async with serving(held, other) as (urls, seen), EnginePool(urls, "", timeout_s=200, fenced=True) as pool:
            pool.trust(urls[0], 0)
            asked = asyncio.create_task(pool.generate([3], SEEDED))
            while not held.ended:
                await asyncio.sleep(0.005)
            pool.hold(urls[0])
            waiting = asyncio.create_task(pool.generate([3], SEEDED))
            await asyncio.sleep(0.05)
            assert len(seen[0]) == 1 and not waiting.done()
            held.end()
            piece = await asked
            assert (piece.completion.token_ids, piece.completion.finish_reason) == (LONG[:3], "abort")
            pool.trust(urls[1], 0)
            assert (await waiting).url == urls[1]
            held.go.set()
            pool.fence(urls[1])
            waiting = asyncio.create_task(pool.generate([3], SEEDED))
            pool.trust(urls[0], 0)
            assert (await waiting).completion.token_ids == LONG

    run(test)


def test_a_request_whose_time_is_over_brings_back_what_is_written():
    async def test():
        async with serving(Writer(stops_after=3)) as (urls, _), EnginePool(urls, "", timeout_s=0.5) as pool:
            completion, _ = await pool.generate([3], SEEDED)
            assert (completion.token_ids, completion.finish_reason) == (LONG[:3], "abort")
            assert pool.counters()["wasted_failed"] == 0

    run(test)


class Paused(Writer):
    """Returns nothing before it goes on, also not what it was told to end."""

    def __init__(self):
        super().__init__(stops_after=0)
        self.told = asyncio.Event()

    def end(self, rid=""):
        self.told.set()


@pytest.mark.parametrize("is_told", [False, True])
def test_the_time_limit_of_a_request_waits_for_a_held_server(is_told):
    async def test():
        writer = Paused()
        options = {"timeout_s": 0.5, "retries": 0, "fenced": True}
        async with serving(writer) as (urls, seen), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 0)
            asked = asyncio.create_task(pool.generate([3], SEEDED))
            while not (writer.told.is_set() if is_told else writer.ended):
                await asyncio.sleep(0.005)
            pool.hold(urls[0])
            await asyncio.sleep(1.2)  # longer than the limit and the time that is left to end a request
            assert not asked.done() and writer.told.is_set() == is_told
            writer.go.set()
            assert (await asked).completion.token_ids == LONG
            assert len(seen[0]) == 1

    run(test)


def test_a_server_that_only_ends_requests_is_given_up():
    async def test():
        options = {"timeout_s": 60, "retries": 1, "rest_s": 0.01}
        async with serving(nothing) as (urls, seen), EnginePool(urls, "", **options) as pool:
            with pytest.raises(RolloutFailed, match="2 attempts failed: .*before the first token"):
                await pool.generate([3], PARAMS)

    run(test)


def test_a_request_that_a_push_ended_in_the_queue_has_not_failed():
    """A push that aborts ends also requests that have no token yet, again and again."""

    async def test():
        writer = Writer(stops_after=0)
        options = {"timeout_s": 200, "retries": 0, "fenced": True, "rest_s": 600}
        async with serving(writer) as (urls, seen), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 0)
            asked = asyncio.create_task(pool.generate([3], SEEDED))
            for push in range(1, 4):
                while len(seen[0]) != push or not writer.ended:
                    await asyncio.sleep(0.005)
                pool.hold(urls[0])
                writer.end()
                while writer.ended:
                    await asyncio.sleep(0.005)
                pool.trust(urls[0], push)
            writer.version = "3"
            writer.go.set()
            assert (await asked).completion.token_ids == LONG

    run(test)


def test_a_request_may_wait_in_the_queue_of_a_server_that_writes_for_others():
    async def test():
        writer = Writer(stops_after=0)
        options = {"timeout_s": PATIENCE_S, "retries": 0}
        async with serving(writer) as (urls, seen), EnginePool(urls, "", **options) as pool:
            asked = asyncio.create_task(pool.generate([3], SEEDED))
            while not seen[0]:
                await asyncio.sleep(0.005)
            writer.stops_after = None
            await pool.generate([3], SEEDED)
            assert (await asked).completion.token_ids == LONG
            assert len(seen[0]) == 3, "it was ended without a token, and asked once more"

    run(test)


def test_requests_carry_the_newest_trusted_version_as_salt():
    async def test():
        options = {"timeout_s": 60, "fenced": True}
        async with serving(Writer("7")) as (urls, seen):
            async with EnginePool(urls, "", **options, salted=True) as pool:
                for version in (6, 7, 5):
                    pool.trust(urls[0], version)
                await pool.generate([3], SEEDED)
                pool.fence(urls[0])
                pool.trust(urls[0], 7, "actor_7")
                await pool.generate([3], SEEDED)
            async with (
                EnginePool(urls, "", **options) as plain,
                EnginePool(urls, "", timeout_s=60, salted=True) as free,
            ):
                plain.trust(urls[0], 7)
                await plain.generate([3], SEEDED)
                await free.generate([3], SEEDED)
            salts = [body.get("cache_salt") for body in seen[0]]
            assert salts[0] == salts[1] and salts[0].endswith(".7") and salts[2:] == [None, None]

            async with EnginePool(urls, "", **options, salted=True) as later:
                later.trust(urls[0], 7)
                await later.generate([3], SEEDED)
            assert seen[0][-1]["cache_salt"] != salts[0], "a later run may have other weights of this number"

    run(test)


class Caching(Writer):
    """Has every prompt in its cache, but none for a request with a salt of its own."""

    empty = False
    push = None  # a function of a version: a push ends while each request comes

    async def write(self, body, ended):
        if self.push is not None:
            self.version = str(int(self.version) + 1)
            self.push(int(self.version))
        self.cached = int(not self.empty and body["cache_salt"].count(".") == 1)
        return await super().write(body, ended)


def test_a_stale_prefix_is_asked_again_at_last_with_a_salt_of_its_own():
    async def test():
        writer = Caching("8")
        options = {"timeout_s": 60, "fenced": True, "salted": True}
        async with serving(writer) as (urls, seen), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 7)
            asked = asyncio.create_task(pool.generate([3], SEEDED))
            while not seen[0]:
                await asyncio.sleep(0.005)
            pool.trust(urls[0], 8)  # the push had ended when the server began to write
            assert (await asked).completion.versions == (VersionSpan(8, 0, len(LONG)),)
            assert [body["cache_salt"].split(".")[1] for body in seen[0]] == ["7", "8"]
            found = pool.counters()
            assert (found["stale_prefixes"], found["wasted_stale"], found["pieces"]) == (1, len(LONG), 1)
            assert found["tokens"] == 2 * len(LONG)

            writer.push = partial(pool.trust, urls[0])
            await pool.generate([3], SEEDED)
            assert len(seen[0]) == 5 and pool.counters()["stale_prefixes"] == 3
            assert len({body["cache_salt"] for body in seen[0]}) == 4, "of 8 twice, of 9, at last one of its own"

            writer.empty = True
            await pool.generate([3], SEEDED)
            assert len(seen[0]) == 6 and pool.counters()["stale_prefixes"] == 3, "an empty cache is never stale"

    run(test)


def test_a_server_that_does_not_know_salts_is_told():
    async def test():
        class Deaf(Caching):
            async def write(self, body, ended):
                return await super().write({**body, "cache_salt": "one.salt"}, ended)

        writer = Deaf("8")
        options = {"timeout_s": 60, "fenced": True, "salted": True, "retries": 1}
        async with serving(writer) as (urls, seen), EnginePool(urls, "", **options) as pool:
            pool.trust(urls[0], 8)
            writer.push = partial(pool.trust, urls[0])
            with pytest.raises(RolloutFailed, match="its prefix cache does not keep salts apart"):
                await pool.generate([3], SEEDED)
            assert len(seen[0]) == 4

    run(test)


def test_what_a_cut_off_request_wrote_is_estimated_and_counted_by_its_cause():
    async def test():
        writer = Writer()
        async with serving(writer) as (urls, seen), EnginePool(urls, "", timeout_s=200) as pool:
            await pool.generate([3], SEEDED)
            writer.stops_after = 0
            for cause in ("fenced", "cancelled"):
                asked = asyncio.create_task(pool.generate([3], SEEDED))
                while not writer.ended:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.1)  # much longer than the first one took
                assert pool.counters()["in_flight"] == 1
                if cause == "fenced":
                    pool.fence(urls[0])
                    await asyncio.sleep(0)  # the request ends
                    assert pool.counters()["in_flight"] == 0
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asked
                assert pool.counters()[f"wasted_{cause}"] == SEEDED.max_new_tokens
                pool.trust(urls[0], 0)
            found = pool.counters()
            assert found["tokens"] == len(LONG) + 2 * SEEDED.max_new_tokens
            assert found.keys() >= {f"wasted_{cause}" for cause in WASTE}
            assert 0.2 < found["busy_s"] <= found["servers_s"]

    run(test)


def test_a_task_that_is_cancelled_and_fenced_at_once_is_cancelled():
    async def test():
        writer = Writer(stops_after=0)
        async with serving(writer) as (urls, _), EnginePool(urls, "", timeout_s=200) as pool:
            asked = asyncio.create_task(pool.generate([3], SEEDED))
            while not writer.ended:
                await asyncio.sleep(0.005)
            pool.fence(urls[0])
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    run(test)


@pytest.mark.parametrize(("rest_s", "connections"), [(0.0, 1), (0.3, 2)])
def test_clients_do_not_use_a_connection_that_was_idle_for_long(monkeypatch, rest_s, connections):
    """A server closes idle connections too, and would close one while a request is on its way to it."""
    monkeypatch.setattr("megarl.rollout.pool.sender.KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr("megarl.rollout.client.KEEP_ALIVE_S", 0.1)

    async def peers_of(ask):
        peers = set()

        async def note(request):
            peers.add(request.transport.get_extra_info("peername"))
            return await good(request)

        async with serving(note) as (urls, _):
            for _ in range(2):
                await ask(urls[0])
                await asyncio.sleep(rest_s)
        return len(peers)

    async def with_a_pool():
        pool = None

        async def ask(url):
            nonlocal pool
            if pool is None:
                pool = await EnginePool([url], "token", timeout_s=PATIENCE_S).__aenter__()
            await pool.generate([5], PARAMS)

        try:
            return await peers_of(ask)
        finally:
            await pool.__aexit__()

    async def with_a_client():
        clients = {}

        async def ask(url):
            client = clients.setdefault(url, ServerClient(url, "token", timeout_s=PATIENCE_S))
            with contextlib.suppress(ServerError):  # it is not the reply that was asked for
                await asyncio.to_thread(client.prompt_log_probs, [5, 6])

        return await peers_of(ask)

    assert asyncio.run(with_a_pool()) == connections
    assert asyncio.run(with_a_client()) == connections


def test_a_server_that_leaves_returns_what_it_has_written_and_is_forgotten():
    """The completion goes on at another server from there; nothing is written twice."""

    async def test():
        leaving, staying = Writer(stops_after=3), Writer(stops_after=0)
        async with serving(leaving, staying) as (urls, seen), EnginePool(urls, "", timeout_s=200) as pool:
            asked = asyncio.create_task(write(pool, [3], SEEDED, prefer=urls[0]))
            while not leaving.ended:
                await asyncio.sleep(0.005)
            left = asyncio.create_task(pool.leave(urls[0], 0))
            staying.go.set()
            await left
            assert (await asked).token_ids == LONG
            assert [len(bodies) for bodies in seen] == [1, 1]
            assert seen[1][0]["input_ids"] == [3, *LONG[:3]]
            found = pool.counters()
            assert found["tokens"] == len(LONG) and not any(found[f"wasted_{cause}"] for cause in WASTE)
            assert 0 < found["busy_s"] <= found["servers_s"]
            assert (await pool.generate([3], SEEDED, prefer=urls[0])).url == urls[1], "its name may be known still"

    run(test)


def test_a_server_that_leaves_and_returns_nothing_is_waited_for_no_longer_than_a_cut_request(monkeypatch):
    monkeypatch.setattr("megarl.rollout.pool.sender.GRACE_S", 0.1)

    async def test():
        async with serving(silent, good) as (urls, seen), EnginePool(urls, "", timeout_s=200, retries=0) as pool:
            asked = asyncio.create_task(pool.generate([3], PARAMS, prefer=urls[0]))
            while not seen[0]:
                await asyncio.sleep(0.005)
            await pool.leave(urls[0], 0)
            assert (await asked).url == urls[1], "it has not failed, and costs no attempt"

    run(test)


def test_a_server_that_joins_writes_when_it_is_trusted_and_brings_its_slots():
    async def test():
        here, there = Writer(stops_after=0), Writer(stops_after=0)
        options = {"timeout_s": 200, "fenced": True, "max_in_flight": 1}
        async with serving(here, there) as (urls, seen), EnginePool([], "", **options) as pool:
            pool.join(urls[0], 0)
            pool.trust(urls[0], 0)
            asked = [asyncio.create_task(write(pool, [3], SEEDED)) for _ in range(3)]
            while not here.ended:
                await asyncio.sleep(0.005)
            pool.join(urls[1], 2)
            await asyncio.sleep(0.05)
            assert [len(bodies) for bodies in seen] == [3, 0]
            pool.trust(urls[1], 0)
            asked.append(asyncio.create_task(write(pool, [3], SEEDED)))
            await pool.leave(urls[0], 0)
            while len(there.ended) != 3:
                await asyncio.sleep(0.005)
            there.go.set()
            assert [(await task).token_ids for task in asked] == [LONG] * 4

    run(test)


async def in_its_own_time(request):
    await asyncio.sleep(0.5)
    return await good(request)


@pytest.mark.parametrize("stops", [False, True])
def test_a_server_that_is_slow_is_reported_and_its_requests_are_written_elsewhere(stops, monkeypatch):
    """Long before the time limit of a request.

    If it `stops`, it writes one token, and no other one before it is told to end the request: that one is kept.
    """
    monkeypatch.setattr(pace, "LEAST_S", 0.0)
    monkeypatch.setattr(pool_module, "_PACE_LOOK_S", 0.05)

    async def test():
        unfit, slow, fast, wanted = [], in_its_own_time, good, [4, 1]
        if stops:
            slow, fast, wanted = Writer(stops_after=1), Writer(), LONG
            slow.go.set()
        options = {"timeout_s": 600, "max_in_flight": 8, "slow_factor": 5.0}
        options["on_unfit"] = lambda url, reason: unfit.append((url, reason))
        async with serving(slow, fast) as (urls, _), EnginePool(urls, "", **options) as pool:

            async def ask(url):
                while not unfit:
                    assert (await write(pool, [3], SEEDED, prefer=url)).token_ids == wanted

            assert (await pool.generate([3], SEEDED, prefer=urls[0])).url == urls[0]  # its start is over
            if stops:
                slow.go.clear()
            await asyncio.gather(*(ask(url) for url in [*urls, *urls]))
            assert len(unfit) == 1 and unfit[0][0] == urls[0], unfit
            assert re.match(r"it is slow: 3 of its last 5 replies took more than 5 times as long as ", unfit[0][1])
            assert pool.counters()["slow_servers"] == 1

    run(test)
