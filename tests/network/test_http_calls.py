"""Calls of servers whose replies do not end, over real sockets."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from endless_servers import Behaviour, drip, drip_headers, endless, flood, take_nothing

from megarl.network.http_calls import Caller, CallFailed, TooLarge, read_at_most

LIMIT_S = 0.5
MUCH = "x" * (12 << 20)  # more than the buffers of sockets take


@pytest.mark.parametrize("behave", [drip, drip_headers])
def test_a_call_ends_at_its_limit_however_many_bytes_come(behave: Behaviour) -> None:
    caller = Caller({})
    with endless(behave) as url, pytest.raises(CallFailed, match=r"^no whole reply within 0\.5 s$"):
        caller.call("GET", f"{url}/health", within_s=LIMIT_S, most_bytes=1 << 30)
    caller.close()


def test_a_call_ends_too_when_nobody_takes_what_it_sends() -> None:
    caller = Caller({})
    late = r"^no whole reply within 1\.36 s$"  # 0.1 s, and a second for each 10 MB of the body
    with endless(take_nothing) as url, pytest.raises(CallFailed, match=late):
        caller.call("POST", url, MUCH, within_s=0.1, most_bytes=1 << 20)
    caller.close()


def test_a_reply_is_read_up_to_its_limit_of_bytes() -> None:
    caller = Caller({})
    with endless(flood) as url, pytest.raises(CallFailed, match=r"^a reply of more than 1,000,000 bytes$"):
        caller.call("GET", url, within_s=600, most_bytes=1_000_000)
    caller.close()


def test_a_reply_to_aiohttp_is_read_up_to_its_limit_of_bytes() -> None:
    async def read(url: str) -> bytes:
        async with aiohttp.ClientSession() as http, http.get(url) as reply:
            return await read_at_most(reply, 1_000_000)

    with endless(flood) as url, pytest.raises(TooLarge, match=r"^a reply of more than 1,000,000 bytes$"):
        asyncio.run(read(url))


def test_a_call_after_one_that_failed_has_a_limit_of_its_own() -> None:
    caller = Caller({})
    with endless(drip) as url:
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(CallFailed, match="no whole reply"):
                caller.call("GET", url, within_s=LIMIT_S, most_bytes=1 << 30)
            assert time.monotonic() - began >= LIMIT_S
    caller.close()
