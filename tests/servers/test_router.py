"""The real router smg before two servers of ours, which are told apart by the version that they stamp."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest
from tiny_server import CURRENT, TOKEN, sglang_of

from megarl.rollout.client import ServerClient
from megarl.rollout.pool import EnginePool
from megarl.rollout.protocol import Route, SamplingParams, generate_body
from megarl.servers.launch import EngineLaunch
from megarl.servers.router import Router
from megarl.servers.server_process import ServerDied
from megarl.servers.supervisor import Servers

pytestmark = pytest.mark.sglang

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
            return await asyncio.gather(*(pool.generate([5, 6 + i % 8], 1, PARAMS) for i in range(count)))

    return Counter(completion.versions[0].version for group in asyncio.run(ask()) for completion in group)


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


def test_a_router_that_ended_is_named_with_its_log(servers, tmp_path):
    with Router(TOKEN, tmp_path / "router.log", python=sglang_of(CURRENT)) as router:
        router.start(servers.urls)
        router.check()
        os.kill(router.pid, signal.SIGKILL)
        os.waitid(os.P_PID, router.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ServerDied, match=r"the router \(pid \d+\) ended with exit code -9; its log: .*router\.log"):
            router.check()


def test_a_router_that_cannot_start_says_why(servers, tmp_path):
    router = Router(TOKEN, tmp_path / "router.log", python=sglang_of(CURRENT), args=("--no-such-option",))
    with pytest.raises(ServerDied, match="no-such-option"):
        router.start(servers.urls)
