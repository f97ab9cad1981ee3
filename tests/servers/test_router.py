"""The real router smg before two servers of ours, told apart by the version that they stamp, and trust behind it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tiny_server import CURRENT, TOKEN, sglang_of

from megarl.rollout.client import ServerClient
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.protocol import Route, SamplingParams, generate_body
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
        async with EnginePool([router.url], TOKEN, timeout_s=30) as pool:
            return await asyncio.gather(*(pool.generate([5, 6 + i % 8], PARAMS) for i in range(count)))

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


@sglang
def test_a_router_that_cannot_start_says_why(servers, tmp_path):
    router = Router(TOKEN, tmp_path / "router.log", python=sglang_of(CURRENT), args=("--no-such-option",))
    with pytest.raises(ServerDied, match="no-such-option"):
        router.start(servers.urls)


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

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.said: list[tuple[Any, ...]] = []

    def add(self, url: str) -> None:
        self.said.append(("add", url))

    def remove(self, url: str) -> None:
        self.said.append(("remove", url))

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        self.said.append(("trust", url, version, adapter))

    def fence(self, url: str) -> None:
        self.said.append(("fence", url))

    def hold(self, url: str) -> None:
        self.said.append(("hold", url))


def test_a_server_gets_work_before_its_version_counts() -> None:
    notes: Any = Notes()
    Routed(notes, notes).trust(A, 7)
    assert notes.said == [("add", A), ("trust", ROUTER, 7, None)]


def test_servers_of_an_earlier_life_get_nothing_before_they_are_trusted_again() -> None:
    notes: Any = Notes(A, B)
    routed = Routed(notes, notes)
    routed.trust(A, 7)
    assert notes.said == [("remove", A), ("remove", B), ("add", A), ("trust", ROUTER, 7, None)]


def test_the_work_of_a_fenced_server_is_asked_for_again_of_the_others() -> None:
    notes: Any = Notes()
    routed = Routed(notes, notes)
    routed.trust(A, 7)
    routed.trust(B, 7)
    notes.said.clear()
    routed.fence(A)
    assert notes.said == [("remove", A), ("fence", ROUTER), ("trust", ROUTER, 7, None)]


def test_a_server_that_was_never_trusted_takes_nothing_with_it() -> None:
    notes: Any = Notes()
    routed = Routed(notes, notes)
    routed.trust(B, 7)
    notes.said.clear()
    routed.fence(A)
    assert notes.said == [("remove", A)]


def test_without_any_server_nothing_is_asked_for() -> None:
    notes: Any = Notes()
    routed = Routed(notes, notes)
    routed.trust(A, 7)
    notes.said.clear()
    routed.fence(A)
    assert notes.said == [("remove", A), ("fence", ROUTER)]


def test_a_held_server_holds_all_because_the_router_chooses() -> None:
    notes: Any = Notes()
    Routed(notes, notes).hold(A)
    assert notes.said == [("hold", ROUTER)]
