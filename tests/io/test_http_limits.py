"""What a caller of our HTTP servers cannot do: hold a connection for nothing, or have them take memory without end."""

import asyncio
import gzip
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from agent_endpoint import CALL, Scripted, endpoint_of
from aiohttp import web
from spoilt_requests import DEEP, collected, request_of, requests, statuses
from strangers import strangers_at

from megarl.hf_server.routes import application
from megarl.io import callers, http_limits

KEY = "a key that callers need"


@asynccontextmanager
async def hf_server() -> AsyncIterator[tuple[int, str, str]]:
    """The frame of our server's routes; yields its port, a path and the key that it asks for."""

    async def count(request: web.Request) -> web.Response:
        return web.json_response(len(await http_limits.json_object(request)))

    app = application(KEY)
    app.router.add_post("/generate", count)
    async with http_limits.served(app, "127.0.0.1") as port:
        yield port, "/generate", KEY


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


def test_silent_connections_end_in_time_and_who_has_shown_the_key_keeps_his(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "PROOF_S", 0.4)
    check({"headers by half": Case(b"", ["X-Half: "], cut=True)})

    async def keeps(server: Callable[[], Any]) -> None:
        async with server() as (port, path, key):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            silent, _ = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
                assert b"connection: close" not in head
                assert await silent.read() == b"", "it ends, and with it more than the time that is allowed"
            writer.close()

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(*map(keeps, SERVERS.values())), 120)

    asyncio.run(both())


def _serve(pipe: Connection, log: str, server: str) -> None:
    """A process that may open 1,024 files."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    logging.basicConfig(level=logging.INFO, force=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))

    async def serve() -> None:
        async with SERVERS[server]() as place:
            pipe.send(place)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(serve())


def friends_at(port: int, key: str, count: int) -> list[socket.socket]:
    """So many connections at once, each of which is silent at first, as in a TLS handshake, and then shows the key."""
    found = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(count)]
    time.sleep(0.5)
    for sock in found:
        sock.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
    for sock in found:
        assert sock.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 404")
    return found


@pytest.mark.parametrize("server", SERVERS)
def test_silent_connections_of_another_user_keep_nobody_out(server: str, tmp_path: Path) -> None:
    """Also where friends have nearly all files of the server: the oldest strangers go until a friend's turn comes."""
    log, (ours, theirs) = tmp_path / "log", get_context("fork").Pipe()
    process = get_context("fork").Process(target=_serve, args=(theirs, str(log), server), daemon=True)
    process.start()
    port, path, key = ours.recv()
    friends = friends_at(port, key, 400) + friends_at(port, key, 400)  # a fork of pytest has files of its own
    with strangers_at(port, 1500, most=192) as strangers:
        assert 0 < strangers.num_left <= 192, "the oldest went"
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi?"}]}
        reply = httpx.post(f"http://127.0.0.1:{port}{path}", json=body, headers=headers, timeout=30, trust_env=False)
        assert reply.status_code == 200, reply.text
    for sock in friends:
        sock.close()
    ours.send("end")
    process.join()
    assert process.exitcode == 0
    assert log.stat().st_size < 10_000 and "Traceback" not in log.read_text()


def test_who_comes_while_a_server_ends_is_refused_at_once_and_who_was_asked_before_answers() -> None:
    async def heard() -> None:
        asked, ends = asyncio.Event(), asyncio.Event()

        async def wait(request: web.Request) -> web.Response:
            http_limits.let_in(request)
            asked.set()
            await ends.wait()
            return web.Response()

        app = web.Application()
        app.router.add_get("/", wait)
        async with AsyncExitStack() as stack:
            port = await stack.enter_async_context(http_limits.served(app, "127.0.0.1"))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asked.wait()
            closing = asyncio.create_task(stack.aclose())
            await asyncio.sleep(0.1)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            ends.set()
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await closing

    asyncio.run(heard())


ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": ADD}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "12 + 3?"}]},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "15"},
]  # fmt: skip
OF_ANTHROPIC = [
    {"role": "user", "content": "12 + 3?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "15"}]},
]
OF_RESPONSES = [
    {"role": "user", "content": "12 + 3?"},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "15"},
]
COMMON = {"model": "policy", "stream": False, "tools": [TOOL], "tool_choice": "auto", "n": 1, "max_tokens": 9}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**COMMON, "messages": ASKED, "logprobs": True, "stream_options": {"include_usage": True}},
    "/v1/completions": {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 3, "return_token_ids": True},
    "/v1/responses": {"model": "policy", "input": OF_RESPONSES, "tools": [{"type": "function", "name": "add"}]},
    "/v1/messages": {"model": "policy", "messages": OF_ANTHROPIC, "tools": [{"name": "add", "input_schema": ADD}]},
    "/v1/messages/count_tokens": {"model": "policy", "messages": OF_ANTHROPIC, "system": [{"text": "so"}]},
    "/inference/v1/generate": {"model": "policy", "token_ids": [1, 2], "sampling_params": {"stop_token_ids": [3]}},
    "/v1/reward": {"reward": 0.5, "turn": 1},
}
TOO_DEEP = {**COMMON, "messages": ASKED, "tools": [{"type": "function", "function": {"parameters": DEEP}}]}
BRACKETS = [ASKED[0], {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 50_000}}]}]
HAND_CASES: list[tuple[str, Any, tuple[int, ...]]] = [
    ("/v1/chat/completions", TOO_DEEP, (400,)),
    ("/v1/chat/completions", {**COMMON, "messages": [*BRACKETS, ASKED[2]]}, (200, 400)),
    ("/v1/chat/completions", {**COMMON, "messages": [{"role": []}]}, (400,)),
    ("/v1/reward", {"reward": 10**400}, (400,)),
    ("/v1/reward", {"reward": float("nan")}, (400,)),
    ("/v1/completions", {"model": "policy", "prompt": [True, False]}, (400,)),
]


def test_no_request_is_an_error_of_the_endpoint_and_none_fills_its_log(caplog: pytest.LogCaptureFixture) -> None:
    async def heard() -> None:
        servers = Scripted("qwen3", ["<think>\nso\n</think>\n\n" + CALL])
        async with endpoint_of(servers, max_tokens=10**7) as (endpoint, _):
            port, key = urlsplit(endpoint.url).port or 0, endpoint.open("0-17/0").key
            hand = [request_of(path, key, body) for path, body, _ in HAND_CASES]
            each = [collected(requests([path], key, [body]), 40) for path, body in BODIES.items()]
            sent = [request_of("/v1/reward", "\udcff", {}), *hand, *chain.from_iterable(each)]
            heard = await asyncio.to_thread(statuses, port, sent)
            assert heard[0] == 401
            for status, (path, _, expected) in zip(heard[1:], HAND_CASES, strict=False):
                assert status in expected, path
            assert sum(status == 200 for status in heard) > 5 and sum(status == 400 for status in heard) > 20
            assert not [pair for pair in zip(heard, sent, strict=True) if pair[0] and pair[0] >= 500]

    with caplog.at_level(logging.WARNING):
        asyncio.run(heard())
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert len(caplog.text) < 10_000
