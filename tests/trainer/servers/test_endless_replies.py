"""A server whose replies to the supervisor's questions do not end: noticed, fenced, and started again."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.servers.engines import ENGINES
from megarl.servers.launch import EngineLaunch, ServerCommand
from megarl.servers.supervisor import Servers, Supervision
from megarl.trainer.servers.server_manager import ServerManager
from megarl.weights.push.report import PushReport

SERVER = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
        while os.path.exists(sys.argv[2]):
            self.wfile.write(b" " * int(sys.argv[3]))
            time.sleep(float(sys.argv[4]))
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
PATIENCE = Supervision(answer_within_s=0.5, ask_every_s=0, rest_s=0.01)


class Collector:
    """What it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        self.told.append(("trust", url))

    def hold(self, url: str) -> None:
        self.told.append(("hold", url))

    def fence(self, url: str) -> None:
        self.told.append(("fence", url))


def push(urls: Sequence[str], version: int) -> dict[str, Any]:
    return asdict(PushReport(version, 1, 4, len(urls), dict.fromkeys(urls, "gathered"), {}, {}, [], {}))


@pytest.mark.parametrize(
    ("part", "rest_s", "why"),
    [
        pytest.param(1, 0.02, "no whole reply within 0.5 s", id="drip"),
        pytest.param(1 << 20, 0.0, "(a reply of more than 8,388,608 bytes|no whole reply within 0.5 s)", id="flood"),
    ],
)
def test_a_server_whose_replies_do_not_end_is_fenced_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, rest_s: float, why: str
) -> None:
    never_ends, warnings = tmp_path / "never_ends", list[str]()

    def command(launch: EngineLaunch, folder: Path) -> ServerCommand:
        words = [str(launch.port), str(never_ends), str(part), str(rest_s)]
        return ServerCommand([sys.executable, "-c", SERVER, *words], dict(os.environ))

    monkeypatch.setitem(ENGINES, "hf", command)
    collector = Collector()
    with Servers([EngineLaunch("hf", "/m")], "", tmp_path, PATIENCE) as servers:
        servers.start()
        (url,), (pid,) = servers.urls, servers.pids
        manager = ServerManager(servers, collector, push, warnings.append)
        manager.push(0)
        never_ends.touch()
        while manager.holding:
            manager.check_servers()
            time.sleep(0.01)
        assert collector.told == [("hold", url), ("trust", url), ("fence", url)]
        assert warnings[0].startswith(f"{url} is out of service: server 0 did not answer within 0.5 s (")
        assert re.search(why, warnings[0])
        never_ends.unlink()
        while not manager.holding:
            manager.check_servers()
            time.sleep(0.01)
        assert collector.told[-1] == ("trust", url) and servers.pids != [pid]
