"""A service that dies in the middle of its calls and starts again at the same address."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from megarl.rewards.services.limit import Limit
from megarl.rewards.services.service import Service

SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.05)
        body = json.dumps(asked["number"] + 1).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listens", flush=True)
server.serve_forever()
"""


@contextmanager
def server(port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_no_call_is_lost_when_the_service_is_killed_and_started_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    limit = Limit(8, retries=2, away_s=120.0)
    service = Service(f"http://127.0.0.1:{port}", limit)
    answered = 0

    async def call(number: int) -> int:
        nonlocal answered
        found: int = await service.post("/", {"number": number}, int)
        answered += 1
        return found

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def test() -> list[int]:
        with server(port) as first:
            calls = asyncio.gather(*map(call, range(64)))
            await until(lambda: answered >= 8)
            first.kill()  # with eight calls on their way
            first.wait()
            await until(lambda: limit.is_waiting)
        assert answered < 64
        with server(port):
            return list(await calls)

    assert asyncio.run(asyncio.wait_for(test(), 240)) == list(range(1, 65))
