"""The real router smg before two servers of ours, told apart by the version that they stamp, and trust behind it."""

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from states import fenced, held, trusted
from tiny_server import CURRENT, TOKEN, sglang_of

from megarl.io.job_signals import ASKS
from megarl.rollout.client import ServerClient
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import PieceRequest
from megarl.rollout.protocol import Route, SamplingParams, generate_body
from megarl.rollout.settings import GenerationSettings
from megarl.servers.launch import EngineLaunch
from megarl.servers.router import Routed, Router
from megarl.servers.server_process import ServerDied
from megarl.servers.supervisor import Servers

sglang = pytest.mark.sglang  # has the router

PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def servers(model_path, tmp_path_factory):
    """Server number i writes at version i."""
    with Servers([EngineLaunch("hf", model_path)] * 2, TOKEN, tmp_path_factory.mktemp("logs")) as servers:
        servers.start()
        ServerClient(servers.urls[1], TOKEN).update_from_disk(model_path, version=1)
        yield servers


@pytest.fixture
def router(servers, tmp_path):
    with Router(TOKEN, tmp_path / "router.log", python=sglang_of(CURRENT)) as router:
        router.start(servers.urls)
        yield router


def writers(router, count=20):
    """How many of so many completions each server wrote."""

    async def ask():
        async with EnginePool([router.url], TOKEN, GenerationSettings(timeout_s=30)) as pool:
            return await asyncio.gather(*(pool.generate(PieceRequest([5, 6 + i % 8], PARAMS)) for i in range(count)))

    return Counter(piece.completion.versions[0].version for piece in asyncio.run(ask()))


@sglang
def test_both_servers_work_and_a_removed_one_does_not(router, servers):
    assert router.urls == sorted(servers.urls)
    assert set(writers(router)) == {0, 1}
    router.remove(servers.urls[0])
    assert router.urls == [servers.urls[1]]
    assert writers(router) == {1: 20}
    router.remove(servers.urls[0])  # nothing to remove
    router.add(servers.urls[0])
    router.add(servers.urls[0])  # nothing to add
    assert router.urls == sorted(servers.urls)
    assert set(writers(router)) == {0, 1}


@sglang
def test_signal_tree_the_router_goes_on(router):
    for number in ASKS:
        os.kill(router.pid, number)
    assert set(writers(router)) == {0, 1}
    router.check()


@sglang
def test_new_sessions_go_to_the_server_with_less_load(router):
    """Chance, or a hash of their keys, would send six of eight to one in every third of these rounds."""

    async def ask():
        async with EnginePool([router.url], TOKEN, GenerationSettings(timeout_s=30)) as pool:

            async def one(prompt):
                with pool.session(1) as affinity:
                    return await pool.generate(
                        PieceRequest(prompt, replace(PARAMS, max_new_tokens=64), affinity=affinity)
                    )

            return [await asyncio.gather(*(one([5, 6 + i]) for i in range(8))) for _ in range(10)]

    rounds = [Counter(piece.completion.versions[0].version for piece in pieces) for pieces in asyncio.run(ask())]
    assert all(min(found[0], found[1]) >= 3 for found in rounds), rounds


@sglang
def test_fields_of_replays_and_of_the_prefix_cache_come_through_the_router(router):
    """The server refuses a value that is none of a field's, so it has got the field."""
    body = generate_body([5, 6], 1, PARAMS, "r")

    def answer(**more):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.post(router.url + Route.GENERATE, json=body | more, headers=headers, trust_env=False, timeout=60)

    assert len(answer(return_sampling_mask=True).json()["meta_info"]["output_token_sampling_mask"]) == 4
    assert "expected a server started with --enable-return-routed-experts" in answer(return_routed_experts=True).text
    assert "routed_experts_start_len=99" in answer(routed_experts_start_len=99).text
    assert "cache_salt=3" in answer(cache_salt=3).text


@sglang
def test_without_servers_a_request_fails_and_later_succeeds(router, servers):
    for url in servers.urls:
        router.remove(url)
    reply = httpx.post(
        router.url + Route.GENERATE,
        json=generate_body([5, 6], 1, PARAMS, "r"),
        headers={"Authorization": f"Bearer {TOKEN}"},
        trust_env=False,
    )
    assert reply.status_code == 503
    router.add(servers.urls[1])
    assert writers(router) == {1: 20}


@sglang
def test_the_router_wants_the_token_and_does_not_show_it(router, tmp_path):
    for token in ("", "wrong"):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        for method, path in (("GET", "/workers"), ("POST", "/workers"), ("POST", Route.GENERATE)):
            reply = httpx.request(method, router.url + path, json={}, headers=headers, trust_env=False)
            assert reply.status_code == 401, (method, path)
    assert not any(TOKEN in line for line in command_lines())
    assert TOKEN not in (tmp_path / "router.log").read_text()


def command_lines():
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_text(errors="replace").replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue


@sglang
def test_a_router_that_ended_is_named_with_its_log(servers, tmp_path):
    with Router(TOKEN, tmp_path / "router.log", python=sglang_of(CURRENT)) as router:
        router.start(servers.urls)
        router.check()
        os.kill(router.pid, signal.SIGKILL)
        os.waitid(os.P_PID, router.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ServerDied, match=r"the router \(pid \d+\) ended with exit code -9; its log: .*router\.log"):
            router.check()


def test_the_router_waits_longer_for_a_server_than_its_client_waits_for_the_router(tmp_path):
    """smg gives up after 1800 s by default."""
    launches = []
    machine = SimpleNamespace(start=lambda launch, *_: launches.append(launch))
    router = Router(TOKEN, tmp_path / "router.log", request_timeout_s=7200.5)
    router._process.machine = machine
    router._process.spawn()
    args = launches[0].args
    assert int(args[args.index("--request-timeout-secs") + 1]) > 7200.5


A, B, ROUTER = "http://a:1", "http://b:1", "http://router:1"


class Notes:
    """A router and a collector that write down what they are told."""

    url = ROUTER

    def __init__(self, urls: list[str]) -> None:
        self.urls, self.said = urls, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        return lambda *what: self.said.append((name, *what))


TRUSTED = trusted(ROUTER, 7)
A_WORKS, B_WORKS = [("add", A), TRUSTED], [("add", B), TRUSTED]


@pytest.mark.parametrize(
    ("here", "orders", "said"),
    [
        # A server gets work before its version counts.
        ([], [trusted(A, 7)], A_WORKS),
        # Those of an earlier life get nothing before they are trusted again.
        ([A, B], [trusted(A, 7)], [("remove", A), ("remove", B), *A_WORKS]),
        # The work of a fenced one is asked for again of the others.
        (
            [],
            [trusted(A, 7), trusted(B, 7), fenced(A)],
            [*A_WORKS, *B_WORKS, ("remove", A), fenced(ROUTER), TRUSTED],
        ),
        # One that was never trusted takes nothing with it.
        ([], [trusted(B, 7), fenced(A)], [*B_WORKS, ("remove", A)]),
        # Without any server nothing is asked for.
        ([], [trusted(A, 7), fenced(A)], [*A_WORKS, ("remove", A), fenced(ROUTER)]),
        # A held one holds all, because the router chooses.
        ([], [held(A)], [held(ROUTER)]),
    ],
    ids=["trusted", "earlier_life", "fenced", "never_trusted", "none_left", "held"],
)
def test_what_router_and_collector_are_told_of_a_server(here: list[str], orders: Any, said: Any) -> None:
    notes: Any = Notes(here)
    routed = Routed(notes, notes.said.append)
    for state in orders:
        routed.update(state)
    assert notes.said == said
