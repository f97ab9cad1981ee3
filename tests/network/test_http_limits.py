"""What a caller of our HTTP servers cannot do: hold a connection for nothing, or have them take memory without end."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import pytest
from agent_endpoint import Scripted, endpoint_of
from aiohttp import web

from megarl.hf_server.requests import application, json_body
from megarl.network import http_limits

KEY = "a key that callers need"
Ask = Callable[[bytes], Awaitable[bytes]]


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


SERVERS = pytest.mark.parametrize("server", [hf_server, agents_endpoint], ids=lambda made: made.__name__)


def heard(server: Callable[[], object], *lines: str, body: bytes = b"", key: str = "", cut: bool = False) -> bytes:
    """All that the server says to these headers and this body until it closes the connection, which it has to do."""

    async def ask() -> bytes:
        async with server() as (port, path, own):  # type: ignore[attr-defined]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key or own}", *lines]
            writer.write("\r\n".join(head).encode() + (b"" if cut else b"\r\n\r\n") + body)
            said = b""
            with suppress(ConnectionResetError):  # it closed the connection while we spoke
                said = await reader.read()
            writer.close()
            return said

    return asyncio.run(asyncio.wait_for(ask(), 120))


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEADERS_S", 0.3)
    monkeypatch.setattr(http_limits, "BODY_S", 0.3)


@SERVERS
def test_headers_that_are_sent_by_half_are_not_waited_for(server: Callable[[], object], short_limits: None) -> None:
    assert heard(server, "X-Half: ", cut=True) == b""


@SERVERS
def test_a_body_that_is_sent_by_half_is_not_waited_for(server: Callable[[], object], short_limits: None) -> None:
    said = heard(server, "Content-Length: 100", body=b'{"a":')
    assert said.startswith(b"HTTP/1.1 408 ")


@SERVERS
@pytest.mark.parametrize("size", [2**27, 2**62])
def test_a_body_that_is_too_large_is_refused_before_it_is_sent(
    server: Callable[[], object], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "HEADERS_S", 0.3)
    assert heard(server, f"Content-Length: {size}", body=b"{}").startswith(b"HTTP/1.1 413 ")


@SERVERS
@pytest.mark.parametrize(
    ("body", "lines"),
    [
        pytest.param(gzip.compress(b" " * 2**20 + b"{}"), ("Content-Encoding: gzip",), id="a compressed body"),
        pytest.param(b"[" * 100_000, (), id="a deep one"),
        pytest.param(b'{"a": "\\ud800"}', (), id="half a character"),
        pytest.param(b'{"a": "\xed\xa0\x80"}', (), id="half a character in bytes"),
        pytest.param(b"\xff", (), id="no text"),
    ],
)
def test_a_body_that_is_no_json_is_a_400(
    server: Callable[[], object], body: bytes, lines: tuple[str, ...], short_limits: None
) -> None:
    assert heard(server, f"Content-Length: {len(body)}", *lines, body=body).startswith(b"HTTP/1.1 400 ")


@SERVERS
@pytest.mark.parametrize("size", [2, 9_000_000])
def test_a_stranger_keeps_no_connection(
    server: Callable[[], object], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose key is wrong is answered and sent away, also if he does not send his whole body."""
    monkeypatch.setattr(http_limits, "HEADERS_S", 3600.0)
    said = heard(server, f"Content-Length: {size}", body=b"{}", key="a guess")
    assert said.startswith(b"HTTP/1.1 401 ")


@SERVERS
@pytest.mark.parametrize("lines", [["X-Long: " + "x" * 20_000], [f"X-{i}: 1" for i in range(1000)]])
def test_headers_have_a_limit(server: Callable[[], object], lines: list[str], short_limits: None) -> None:
    assert heard(server, *lines, "Content-Length: 2", body=b"{}").startswith(b"HTTP/1.0 400 ")
