"""Calls of servers whose replies do not end, over real sockets."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
from endless_servers import Behaviour, drip, drip_headers, endless, flood, take_nothing

from megarl.io import http_calls
from megarl.io.http_calls import Caller, CallFailed, TooLarge, read_at_most

LIMIT_S = 0.3
MUCH = "x" * (12 << 20)  # more than the buffers of sockets take


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller({})
    yield made
    made.close()


@pytest.mark.parametrize("behaviours", [(drip_headers,), (drip, drip)])
def test_each_call_ends_at_its_own_limit_however_many_bytes_come(
    caller: Caller, behaviours: Sequence[Behaviour]
) -> None:
    for behave in behaviours:
        began = time.monotonic()
        with endless(behave) as url, pytest.raises(CallFailed, match=r"^no whole reply within 0\.3 s$"):
            caller.call("GET", f"{url}/health", within_s=LIMIT_S, most_bytes=1 << 30)
        assert time.monotonic() - began >= LIMIT_S


def test_a_call_ends_too_when_nobody_takes_what_it_sends(caller: Caller) -> None:
    late = r"^no whole reply within 1\.36 s$"  # 0.1 s, and a second for each 10 MB of the body
    with endless(take_nothing) as url, pytest.raises(CallFailed, match=late):
        caller.call("POST", url, MUCH, within_s=0.1, most_bytes=1 << 20)


def test_a_reply_is_read_up_to_its_limit_of_bytes(caller: Caller) -> None:
    with endless(flood) as url, pytest.raises(CallFailed, match=r"^a reply of more than 1,000,000 bytes$"):
        caller.call("GET", url, within_s=600, most_bytes=1_000_000)


def test_a_reply_to_aiohttp_is_read_up_to_its_limit_of_bytes() -> None:
    async def read(url: str) -> bytes:
        async with aiohttp.ClientSession() as http, http.get(url) as reply:
            return await read_at_most(reply, 1_000_000)

    with endless(flood) as url, pytest.raises(TooLarge, match=r"^a reply of more than 1,000,000 bytes$"):
        asyncio.run(read(url))


def test_threads_that_call_first_at_the_same_time_share_one_loop() -> None:
    """Connections of one loop cannot be used from another."""
    ready = threading.Barrier(16)

    def loop(_: int) -> asyncio.AbstractEventLoop:
        ready.wait(60)
        return http_calls._loop()

    http_calls._loop_of.cache_clear()
    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(loop, range(16)))) == 1
