"""What a caller of our HTTP servers cannot do: hold a connection for nothing, or have them take memory without end."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from agent_endpoint import Scripted, endpoint_of
from aiohttp import web

from megarl.hf_server.requests import application, json_body
from megarl.network import http_limits

KEY = "a key that callers need"


@asynccontextmanager
async def hf_server() -> AsyncIterator[tuple[int, str, str]]:
    """The frame of our server's routes; yields its port, a path and the key that it asks for."""

    async def count(request: web.Request) -> web.Response:
        return web.json_response(len(await json_body(request)))

    app = application(KEY)
    app.router.add_post("/generate", count)
    runner = http_limits.limited_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1], "/generate", KEY
    await runner.cleanup()


@asynccontextmanager
async def agents_endpoint() -> AsyncIterator[tuple[int, str, str]]:
    async with endpoint_of(Scripted("qwen3", ["hi"])) as (endpoint, _):
        yield urlsplit(endpoint.url).port or 0, "/v1/chat/completions", endpoint.open("0-17/0").key


SERVERS = {"hf_server": hf_server, "agents_endpoint": agents_endpoint}


@dataclass
class Case:
    """What a caller sends: headers and a body; cut: not the end of the headers."""

    status: bytes  # how the answer begins
    lines: list[str] = field(default_factory=list)
    body: bytes = b""
    key: str = ""  # where it is not the server's own
    cut: bool = False


def of_body(status: bytes, body: bytes, *more: str) -> Case:
    return Case(status, [f"Content-Length: {len(body)}", *more], body)


def check(cases: dict[str, Case]) -> None:
    """Each case on a connection of its own, all at once, to both servers, which have to close every connection."""

    async def ask(port: int, path: str, own: str, case: Case) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {case.key or own}", *case.lines]
        writer.write("\r\n".join(head).encode() + (b"" if case.cut else b"\r\n\r\n") + case.body)
        said = b""
        with suppress(ConnectionResetError):  # it closed the connection while we spoke
            said = await reader.read()
        writer.close()
        return said[: len(case.status)] if case.status else said

    async def heard(server: Callable[[], Any]) -> dict[str, bytes]:
        async with server() as place:
            return dict(zip(cases, await asyncio.gather(*(ask(*place, case) for case in cases.values())), strict=True))

    async def heard_of_all() -> list[dict[str, bytes]]:
        return await asyncio.wait_for(asyncio.gather(*map(heard, SERVERS.values())), 120)

    expected = {name: case.status for name, case in cases.items()}
    assert dict(zip(SERVERS, asyncio.run(heard_of_all()), strict=True)) == dict.fromkeys(SERVERS, expected)


def test_what_is_sent_by_half_is_not_waited_for_and_what_is_too_large_or_no_json_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_limits, "HEADERS_S", 0.3)
    monkeypatch.setattr(http_limits, "BODY_S", 0.3)
    zipped = gzip.compress(b" " * 2**20 + b"{}")
    check(
        {
            "headers by half": Case(b"", ["X-Half: "], cut=True),
            "a body by half": Case(b"HTTP/1.1 408 ", ["Content-Length: 100"], b'{"a":'),
            "too large a body": Case(b"HTTP/1.1 413 ", [f"Content-Length: {2**27}"], b"{}"),
            "a far too large one": Case(b"HTTP/1.1 413 ", [f"Content-Length: {2**62}"], b"{}"),
            "a compressed body": of_body(b"HTTP/1.1 400 ", zipped, "Content-Encoding: gzip"),
            "a deep one": of_body(b"HTTP/1.1 400 ", b"[" * 100_000),
            "half a character": of_body(b"HTTP/1.1 400 ", b'{"a": "\\ud800"}'),
            "half a character in bytes": of_body(b"HTTP/1.1 400 ", b'{"a": "\xed\xa0\x80"}'),
            "no text": of_body(b"HTTP/1.1 400 ", b"\xff"),
            "a long header": of_body(b"HTTP/1.0 400 ", b"{}", "X-Long: " + "x" * 20_000),
            "many headers": of_body(b"HTTP/1.0 400 ", b"{}", *(f"X-{i}: 1" for i in range(1000))),
        }
    )


def test_a_stranger_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose key is wrong is answered and sent away, also if he does not send his whole body."""
    monkeypatch.setattr(http_limits, "HEADERS_S", 3600.0)
    sizes = (2, 9_000_000)
    check({f"{n} bytes": Case(b"HTTP/1.1 401 ", [f"Content-Length: {n}"], b"{}", "a guess") for n in sizes})
