"""A service that dies in the middle of its calls and starts again at the same address."""

import asyncio
import socket

from aiohttp import web
from async_tests import in_a_loop
from fake_servers import Writer, serving

from megarl.rewards.services.limit import Limit
from megarl.rewards.services.service import Service


class Adder(Writer):
    routes = ("/",)

    async def __call__(self, request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.json_response((await request.json())["number"] + 1)


@in_a_loop
async def test_no_call_is_lost_when_the_service_ends_and_is_started_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limit = Limit(8, retries=2, away_s=120.0)
    service = Service(f"http://127.0.0.1:{port}", limit)
    answered: list[int] = []

    async def call(number: int) -> None:
        answered.append(await service.post("/", {"number": number}, int))

    async with serving(Adder(), port=port):
        calls = asyncio.gather(*map(call, range(64)))
        while len(answered) < 8:
            await asyncio.sleep(0.01)
    while limit._away_since is None:  # eight calls were on their way, and their connections are cut
        await asyncio.sleep(0.01)
    assert len(answered) < 64
    async with serving(Adder(), port=port):
        await calls
    assert sorted(answered) == list(range(1, 65))
