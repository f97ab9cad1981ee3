"""What an agent does with an order that is none, and the driver with an agent that does half of one."""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl import __version__
from megarl.machines import NodeLost, Nodes, nodes
from megarl.machines.agent import Agent, DriverLost
from megarl.processes.connection import Connection
from megarl.processes.greeting import connect
from megarl.processes.ranks import RanksLaunch
from megarl.processes.signals import Signals, Terminated
from megarl.servers.launch import EngineLaunch

TOKEN = "the secret of these tests"
HOST = re.escape(socket.gethostname())
RANKS, OTHER = (RanksLaunch(worker, "cpu", "/nowhere", 1) for worker in ("megarl.roles.worker", "http.server"))


@contextmanager
def driver() -> Iterator[Nodes]:
    with Nodes(2, 1, "127.0.0.1", 0, TOKEN) as found:
        yield found


def agent_of(found: Nodes) -> threading.Thread:
    thread = threading.Thread(target=Agent(1, f"127.0.0.1:{found.port}", TOKEN).serve, daemon=True)
    thread.start()
    found.wait(limit_s=20)
    return thread


def test_an_order_that_nobody_knows_is_answered_and_others_are_still_taken() -> None:
    with driver() as found, socket.create_connection(("127.0.0.1", found.port)):  # a stranger, who says nothing
        agent = agent_of(found)
        for order, more, error in (
            ("dance", {}, "ValueError dance is no order; expected one of ports, ranks, server"),
            ("words", {"job": 7}, "KeyError 7$"),
            ("ranks", {"job": 8, "launch": {"colour": "red"}}, "TypeError"),
            (
                "ranks",
                {"job": 8, "launch": asdict(OTHER)},
                "ValueError worker=http.server: expected megarl.roles.w",
            ),
        ):
            with pytest.raises(NodeLost, match=rf"^machine 1 \(host {HOST}\): {error}"):
                found.order(1, order, **more)
        assert len(found.machine(1).free_ports([found.address(1)] * 2)) == 2
    agent.join(20)
    assert not agent.is_alive()


def test_an_agent_ends_as_its_driver_does() -> None:
    """So that what starts both again after a failure, or after SIGTERM to one of them, starts both again."""
    ended: list[str] = []
    failures = (RuntimeError("rank 3 is gone\nsee its log"), Terminated("SIGTERM: step 3 is saved"))
    for failure in (None, *failures, KeyboardInterrupt()):
        with ThreadPoolExecutor(1) as threads:
            with suppress(RuntimeError, Terminated, KeyboardInterrupt), driver() as found:
                agent = threads.submit(Agent(1, f"127.0.0.1:{found.port}", TOKEN).serve)
                found.wait(limit_s=200)
                if failure is not None:
                    raise failure
            ended.append(repr(agent.exception(200)))
    lost = "DriverLost('the driver stopped: rank 3 is gone see its log')"
    assert ended == ["None", lost, "Terminated('the driver stopped: SIGTERM: step 3 is saved')", "None"]


def test_signals_of_an_agent_count_as_the_drivers() -> None:
    """A scheduler may take one machine away: the run saves, whichever it is."""
    with pytest.raises(Terminated, match="could not finish its step: node 1 is gone"), Signals(200.0) as signals:
        signals.is_patient = True
        with driver() as found:
            agent = Agent(1, f"127.0.0.1:{found.port}", TOKEN)
            with pytest.raises(Terminated, match="had not joined a run"):
                agent.take_signal(signal.SIGTERM)
            thread = threading.Thread(target=agent.serve, daemon=True)
            thread.start()
            found.wait(limit_s=200)
            for number in (signal.SIGUSR1, signal.SIGTERM):
                agent.take_signal(number)
            while not signals.ends:
                time.sleep(0.01)
            assert signals.take_save()
            assert len(found.machine(1).free_ports(["127.0.0.1"])) == 1, "it goes on until the driver ends"
        thread.join(200)
        raise RuntimeError("node 1 is gone")


def test_ranks_whose_relay_does_not_call_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that says it started them, as one whose second connection is cut off does."""
    monkeypatch.setattr(nodes, "_RELAY_S", 0.2)
    heard: list[dict[str, Any]] = []

    def half(connection: Connection) -> None:
        while (order := connection.receive()[0]).get("do") != "leave":
            if "beat" not in order:
                heard.append(order)
                connection.send({"id": order["id"], "pid": 17})

    with driver() as found:
        hello = {"node": 1, "version": __version__, "host": "half"}
        connection = connect(f"127.0.0.1:{found.port}", TOKEN, hello, timeout_s=10)
        thread = threading.Thread(target=half, args=(connection,))
        thread.start()
        found.wait(limit_s=20)
        with pytest.raises(NodeLost, match=r"machine 1 \(host half\) opened no connection for its ranks"):
            found.start_ranks(1, RANKS)
    thread.join(20)
    connection.close()
    assert [(order["do"], order["job"]) for order in heard] == [("ranks", 0), ("end", 0)]


def test_an_order_that_somebody_puts_between_starts_nothing(tmp_path: Path) -> None:
    """The driver's own order starts a program; the same bytes of somebody who passes on what both ends say do not."""
    program, mark = tmp_path / "program", tmp_path / "mark"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o700)
    launch = asdict(EngineLaunch("sglang", str(tmp_path), port=1, device="cpu", python=str(program)))
    order = {"do": "server", "job": 7, "launch": launch, "log": str(tmp_path / "log")}
    with ThreadPoolExecutor(1) as threads, driver() as found, socket.create_server(("127.0.0.1", 0)) as between:
        agent = threads.submit(Agent(1, f"127.0.0.1:{between.getsockname()[1]}", TOKEN).serve)
        (down, _), up = between.accept(), socket.create_connection(("127.0.0.1", found.port))
        stop = threading.Event()
        ways = [threading.Thread(target=pass_on, args=way, daemon=True) for way in ((down, up), (up, down, stop))]
        for way in ways:
            way.start()
        found.wait(limit_s=60)
        job = found._member(1).start("server", 7, launch=launch, log=str(tmp_path / "log"))
        while job.exit_code() is None:
            stop.wait(0.05)
        assert mark.exists()
        mark.unlink()
        stop.set()
        ways[1].join(60)  # until the driver's next sign of life
        head = json.dumps({"id": 99, **order}).encode()
        down.sendall(len(head).to_bytes(4) + bytes(8) + head)
        with pytest.raises(DriverLost, match="is lost: a record"):
            agent.result(60)
        up.close()
        down.close()
    assert not mark.exists()


def pass_on(source: socket.socket, target: socket.socket, stop: threading.Event | None = None) -> None:
    """All that comes, until the source ends or, at the next byte, until he stops."""
    with suppress(OSError):
        while data := source.recv(65536):
            if stop is not None and stop.is_set():
                return
            target.sendall(data)
