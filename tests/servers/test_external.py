"""Servers that somebody else started, and servers whose ranks lie over several machines."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_server import TOKEN

from megarl.servers.external import place
from megarl.servers.launch import EngineLaunch
from megarl.servers.server_process import MachineGone, Machines, ServerProcess, free_ports
from megarl.servers.sglang import _machines
from megarl.servers.supervisor import Servers, State, Supervision


class Foreign(http.server.BaseHTTPRequestHandler):
    """A server that somebody else may start again."""

    startup_time = 1.0

    def do_GET(self) -> None:
        body = json.dumps({"startup_time": Foreign.startup_time}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Into no log."""


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its url."""
    monkeypatch.setattr(Foreign, "startup_time", 1.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # looks every 10 ms
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def servers(foreign: str) -> Iterator[Servers]:
    with Servers.at([foreign], TOKEN, Supervision(ask_every_s=0, rest_s=0.01)) as servers:
        servers.start()
        yield servers


def states_until(servers: Servers, state: State) -> list[State]:
    """States of the events until one has this."""
    seen: list[State] = []
    deadline = time.monotonic() + 240
    while state not in seen:
        assert time.monotonic() < deadline, seen
        seen += [event.state for event in servers.poll()]
        time.sleep(0.02)
    return seen


def test_a_server_that_runs_is_used_and_left_running(foreign: str) -> None:
    for _ in range(2):
        with Servers.at([foreign], TOKEN) as servers:
            servers.start()
            assert (servers.urls, servers.states) == ([foreign], [State.SERVING])
            assert servers.poll() == []


def test_one_that_was_started_again_has_lost_its_weights_and_is_told_of(servers: Servers) -> None:
    Foreign.startup_time = 2.0
    assert states_until(servers, State.SERVING) == [State.RESTING, State.SERVING], "pushed to before it is used"


def test_one_of_no_use_is_tried_again_but_not_ended(servers: Servers, foreign: str) -> None:
    (event,) = servers.restart(servers.urls[0], "its weights are wrong")
    assert (event.state, event.url) == (State.RESTING, foreign)
    assert states_until(servers, State.SERVING) == [State.SERVING]


def test_one_that_is_away_holds_up_no_start_of_the_ranks(servers: Servers) -> None:
    (port,) = free_ports(["127.0.0.1"])
    servers.add(f"http://127.0.0.1:{port}")
    servers.restart(servers.urls[1], "it does not answer")
    assert servers.revive() == [], "it would be waited for for half an hour"
    assert servers.states == [State.SERVING, State.RESTING]


@pytest.mark.parametrize("url", ["gpu7:30000", "http://gpu7", "ftp://gpu7:1", "http://gpu7:1/v1", "http://gpu7:x"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"rollout.urls: .* is none; expected http://HOST:PORT"):
        place(url)


def test_a_url_is_a_place() -> None:
    found = {"host": "fd00::1", "port": 30000, "group_port": 30000}
    assert place("http://[fd00::1]:30000/") == {**found, "tls": "never"}
    assert place("https://[fd00::1]:30000") == {**found, "tls": "always"}
    assert EngineLaunch("running", "", **place("https://[fd00::1]:30000")).url == "https://[fd00::1]:30000"


class FakeHandle:
    def __init__(self, launch: EngineLaunch, log: Path) -> None:
        self.launch, self.log, self.code, self.ended, self.pid = launch, log, None, False, 7

    def exit_code(self) -> int | None:
        return self.code

    def log_tail(self) -> str:
        return f"\n    said on {self.launch.host}"

    def end(self, grace_s: float) -> None:
        self.ended, self.code = True, self.code or 0  # who waits for it to serve ends, too


class FakeMachine:
    address = None

    def __init__(self, broken: bool = False) -> None:
        self.started: list[FakeHandle] = []
        self.broken = broken

    def free_ports(self, hosts: list[str]) -> list[int]:
        return [5000 + n for n in range(len(hosts))]

    def start(self, launch: EngineLaunch, token: str, log: Path) -> FakeHandle:
        if self.broken:
            raise MachineGone("node 1 is lost")
        self.started.append(FakeHandle(launch, log))
        return self.started[-1]


LAUNCH = EngineLaunch("sglang", "/m", host="10.0.0.1", port=30000, group_port=5000, tensor_parallel_size=16)


def test_a_server_over_two_machines_lives_while_both_of_its_processes_do(tmp_path: Path) -> None:
    first, second = FakeMachine(), FakeMachine()
    machines = Machines(((first, "10.0.0.1"), (second, "10.0.0.2")))
    server = ServerProcess(LAUNCH, TOKEN, tmp_path / "server_0.log", name="server 0", machine=machines)
    server.spawn()
    (head,), (follower,) = first.started, second.started
    assert (head.launch.host, follower.launch.host) == ("10.0.0.1", "10.0.0.2")
    assert (head.log.name, follower.log.name) == ("server_0.log", "server_0_1.log")
    assert _machines(follower.launch) == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:5000"]
    assert _machines(LAUNCH) == []
    assert server.alive
    follower.code = 9
    assert not server.alive
    assert "exit code 9" in str(server.died())
    assert "said on 10.0.0.2" in str(server.died())
    server.end()
    assert head.ended and follower.ended


def test_a_machine_that_is_gone_leaves_no_half_of_a_server(tmp_path: Path) -> None:
    first = FakeMachine()
    machines = Machines(((first, "10.0.0.1"), (FakeMachine(broken=True), "10.0.0.2")))
    with pytest.raises(MachineGone):
        machines.start(LAUNCH, TOKEN, tmp_path / "server_0.log")
    assert first.started[0].ended


def test_a_server_waits_for_its_machine_without_losing_restarts(tmp_path: Path) -> None:
    machine = FakeMachine()
    patience = Supervision(max_restarts=1, rest_s=0.0)
    servers = Servers([LAUNCH.__class__("hf", "/m", port=1)], TOKEN, tmp_path, patience, [machine])
    server = servers._servers[0]
    server.process.spawn()
    server.state = State.SERVING
    machine.started[0].code, machine.broken = -1, True
    assert [event.state for event in servers.poll()] == [State.RESTING]
    for _ in range(5):
        assert servers.poll() == []
    assert servers.states == [State.RESTING]
    machine.broken = False
    servers.poll()
    assert servers.states == [State.STARTING]
    servers.stop()
