"""What an agent does with an order that is none, and the driver with an agent that does half of one."""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl import __version__
from megarl.machines import nodes
from megarl.machines.agent import Agent, DriverLost
from megarl.machines.member import NodeLeft
from megarl.machines.nodes import NodeLost, Nodes, announced
from megarl.processes.channels import waiting
from megarl.processes.channels.connection import Connection, connect
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


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


def test_sigterm_to_a_machine_lets_it_go_after_a_save_where_a_spare_one_waits() -> None:
    """To a spare one it does no harm; where it is lost before the save, the run ends."""
    with (
        ThreadPoolExecutor(5) as threads,
        Signals(200.0) as signals,
        Nodes(3, 1, "127.0.0.1", 0, TOKEN, spares=2) as found,
    ):
        signals.is_patient = True
        agents = [Agent(node, f"127.0.0.1:{found.port}", TOKEN) for node in (1, 2, 3, 4)]
        ends = [threads.submit(agent.serve) for agent in agents[:2]]
        found.wait(limit_s=200)
        ends += [threads.submit(agent.serve) for agent in agents[2:]]
        until(lambda: len(found._spares) == 2)
        agents[3].take_signal(signal.SIGTERM)
        assert "this spare machine had no place" in str(ends[3].exception(60))
        assert not found.leaving and not signals.take_save()
        agents[0].take_signal(signal.SIGTERM)
        until(signals.take_save)
        assert len(found.leaving) == 1 and not signals.ends
        with pytest.raises(NodeLeft, match=r"^machine 1 \(host .*\) got SIGTERM and leaves the run; step 3 is saved$"):
            found.let_go("step 3")
        end = ends[0].exception(60)
        assert isinstance(end, Terminated) and "SIGTERM: step 3 is saved, and a spare machine takes" in str(end)
        told: list[str] = []
        found.wait(limit_s=200, on_replaced=told.append)
        assert len(told) == 1 and told[0].endswith("which has left")
        threads.submit(Agent(4, f"127.0.0.1:{found.port}", TOKEN).serve)
        until(lambda: found._spares)
        agents[1].take_signal(signal.SIGTERM)
        until(signals.take_save)
        found._spares[0].connection.close()
        until(lambda: found._spares[0].lost)
        assert not signals.ends
        found.let_go("step 4")
        until(lambda: signals.ends)
        assert ends[1].running(), "it stays until the run has ended"


def test_an_agent_that_waits_for_its_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whom, where, why and until when; and that once more a while later."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.0)
    monkeypatch.setattr(waiting, "EVERY_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    addresses: dict[str, str | Callable[[], str]] = {
        r"at 127.0.0.1:\d+ yet \(Connection refused\)": f"127.0.0.1:{port}",
        r"at no-such-host.invalid:1 yet \((Name or service not known|Temporary .*)\)": "no-such-host.invalid:1",
        r"yet \(its port is not in no/driver_port; expected .*\)": lambda: f"127.0.0.1:{announced(Path('no'))}",
    }
    said: dict[str, list[str]] = {why: [] for why in addresses}
    with ThreadPoolExecutor(3) as threads:
        agents = {why: Agent(1, address, TOKEN, say=said[why].append) for why, address in addresses.items()}
        ends = {why: threads.submit(agent.serve, join_s=1.5) for why, agent in agents.items()}
    for why, end in ends.items():
        assert re.fullmatch(rf"machine 1: no driver {why}, within 1.5 s", str(end.exception()))
        assert len(said[why]) == 2
        line = rf"machine 1: no driver {why}; it tries again, until \d\d:\d\d"
        assert all(re.fullmatch(line, sentence) for sentence in said[why])


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
