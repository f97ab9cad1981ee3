"""How ranks of this machine come into their group; they are threads here."""

import socket
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from echo_messages import Where

from megarl.arch.layout import Layout
from megarl.group import Group, GroupSettings, group
from megarl.group.message import Place
from megarl.processes.channels.connection import connect
from megarl.processes.channels.listener import Listener


class Threads:
    """Ranks that answer every call: each is a replica of its own.  A stranger came before them, and says nothing."""

    port = 0  # of a store that nobody needs

    def __init__(self, launch: Any, address: str, token: str) -> None:
        host, port = address.rsplit(":", 1)
        self.strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
        self.threads = [
            threading.Thread(target=follow, args=(address, token, rank)) for rank in range(launch.num_ranks)
        ]
        for thread in self.threads:
            thread.start()

    def exit_code(self) -> int | None:
        return None

    def end(self, grace_s: float) -> None:
        for thread in self.threads:
            thread.join()
        for stranger in self.strangers:
            stranger.close()


def follow(address: str, token: str, rank: int) -> None:
    driver = connect(address, token, {"rank": rank, "host": "here", "pid": 1}, timeout_s=200)
    while (call := driver.receive()[0])["method"] != "close":
        driver.send({"id": call["id"], "ok": True, "result": asdict(Place(rank, True)), "seconds": 0.0})
    driver.close()


def test_strangers_keep_no_rank_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "RanksProcess", Threads)
    monkeypatch.setattr(group, "Listener", partial(Listener, greeting_s=600))  # so long is a stranger waited for
    with Group("two", 2, Layout(), GroupSettings(start_timeout_s=200), log_dir=tmp_path) as two:
        two.start()
        assert [reply.result["replica"] for reply in two.call(Where())] == [0, 1]
