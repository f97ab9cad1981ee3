"""The server manager over servers and pushes that do what a test says; real ones are in test_ring_faults.py."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.rollout.client import ServerError
from megarl.rollout.server_states import Phase, ServerState
from megarl.servers.launch import EngineLaunch, ServerCommand
from megarl.servers.server_process import ENGINES
from megarl.servers.supervisor import ServerDied, ServerEvent, Servers, State, Supervision
from megarl.trainer.run import Run
from megarl.trainer.servers import server_manager as fleet_module
from megarl.trainer.servers.colocation import ALL, Turns
from megarl.trainer.servers.server_manager import ServerManager
from megarl.trainer.telemetry.run_log import Totals
from megarl.weights.push.report import PushReport
from megarl.weights.verify.canary import Canary

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


class FakeServers:
    def __init__(self, *urls: str) -> None:
        self.urls, self.states = list(urls), [State.SERVING for _ in urls]
        self.coming: list[ServerEvent] = []
        self.restarted: list[str] = []
        self.polls: list[bool] = []  # whether each might start servers again
        self.course: dict[str, list[State]] = {}  # url -> its states at the coming polls

    def event(self, url: str, state: State, reason: str = "") -> ServerEvent:
        self.states[self.urls.index(url)] = state
        return ServerEvent(self.urls.index(url), url, state, 1, reason)

    def happens(self, url: str, state: State, reason: str = "") -> None:
        self.coming.append(self.event(url, state, reason))

    def poll(self, *, starts: bool = True) -> list[ServerEvent]:
        self.polls.append(starts)
        for url, states in self.course.items():
            if states:
                self.states[self.urls.index(url)] = states.pop(0)
        events, self.coming = self.coming, []
        return events

    @property
    def serving(self) -> list[str]:
        return [url for url, state in zip(self.urls, self.states, strict=True) if state is State.SERVING]

    def restart(self, url: str, reason: str) -> list[ServerEvent]:
        self.restarted.append(url)
        return [self.event(url, State.RESTING, reason)]


class Noted:
    """What the collector was told, and what the pushes were asked for."""

    def __init__(self) -> None:
        self.trusted: dict[str, set[int]] = {}
        self.pushes: list[tuple[tuple[str, ...], int]] = []
        self.bad: set[str] = set()
        self.slower: set[str] = set()
        self.warnings: list[str] = []
        self.story: list[tuple[str, ...]] = []  # of pushes and of memory
        self.told: list[tuple[str, str]] = []  # whom to trust, and whom not
        self.unfit: list[dict[str, str]] = []  # what is found between two looks

    def take_unfit(self) -> dict[str, str]:
        return self.unfit.pop(0) if self.unfit else {}

    def update(self, state: ServerState) -> None:
        match state.phase:
            case Phase.GENERATING:
                assert state.version is not None
                self.trusted.setdefault(state.url, set()).add(state.version)
                self.told.append(("trust", state.url))
            case Phase.HELD:
                self.story.append(("hold", state.url))
            case Phase.FENCED:
                self.trusted[state.url] = set()
                self.told.append(("fence", state.url))

    def push(self, urls: Sequence[str], version: int) -> PushReport:
        self.pushes.append((tuple(urls), version))
        failed = {url: "w differs" for url in urls if url in self.bad}
        transports = {url: "gathered" for url in urls if url not in failed}
        report = PushReport(version, 1, 4, len(transports), transports, failed, {}, [], {})
        self.story.append(("push", *urls))
        return replace(report, fallbacks={url: ["sharded: no"] for url in urls if url in self.slower})


CANARY = Canary((5, 6))


class FakeColocation:
    def __init__(self, story: list[tuple[str, ...]]) -> None:
        self.done = story
        self.deaf: dict[str, str] = {}  # url -> what it does not do: release_memory, weights, kv_cache
        self.mad: set[str] = set()  # urls that fail the canary

    def release_memory(self, url: str, what: Sequence[str]) -> None:
        self._obey(url, "release_memory")
        self.done.append(("release_memory", url, *what))

    def resume_memory(self, url: str, what: Sequence[str]) -> None:
        self._obey(url, *what)
        self.done.append(("resume_memory", url, *what))

    def _obey(self, url: str, *what: str) -> None:
        if self.deaf.get(url) in what:
            raise ServerError(url, "/x", 0, "it does not answer")

    def forget(self, url: str) -> None:
        self.done.append(("forget", url))

    def examine(self, canary: Canary, urls: Sequence[str], adapter: str | None) -> dict[str, str]:
        assert canary is CANARY
        self.done.append(("examine", *urls))
        return {url: f"{url} sings otherwise" for url in urls if url in self.mad}


class Fleet:
    """A server manager over two servers, and what it did with them."""

    def __init__(self, *, shares: bool = False, lends: Sequence[str] = ALL, **how: Any) -> None:
        self.servers, self.said = FakeServers(A, B), Noted()
        self.colocation = FakeColocation(self.said.story)
        if shares:
            how["turns"] = Turns(cast(Any, self.colocation), self._canary, lends)
        servers = cast(Any, self.servers)
        self.manager = ServerManager(servers, self.said, self.said.push, self.said.warnings.append, **how)

    def _canary(self) -> Canary:
        self.said.story.append(("the trainer sings",))
        return CANARY

    def happen(self, url: str, state: State, reason: str = "died") -> None:
        """The supervisor tells of it, and the manager looks."""
        self.servers.happens(url, state, reason)
        self.manager.check_servers()


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_TEND_EVERY_S", 0.0)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def sharing() -> Fleet:
    return Fleet(shares=True)


def test_a_verified_push_lets_all_servers_write_and_requests_are_held_meanwhile(fleet: Fleet) -> None:
    fleet.manager.push(0)
    fleet.manager.push(1)
    assert fleet.said.trusted == {A: {0, 1}, B: {0, 1}}
    assert fleet.manager.holding == {A, B}
    assert fleet.said.story == [("push", A, B), ("hold", A), ("hold", B), ("push", A, B)]


def test_a_server_that_fails_its_push_is_fenced_and_pushed_again_alone(fleet: Fleet) -> None:
    """Before any other is trusted: a router must not hear of the version while a failed one is among its workers."""
    fleet.manager.push(0)
    fleet.said.bad, fleet.said.told = {B}, []
    fleet.manager.push(1)
    assert fleet.said.told == [("fence", B), ("trust", A)]
    assert fleet.said.trusted == {A: {0, 1}, B: set()}, "it may hold anything"
    assert "failed: w differs" in fleet.said.warnings[-1]
    fleet.said.bad, fleet.said.story = set(), []
    fleet.manager.check_servers()
    assert fleet.said.story == [("push", B)], "no request goes to a fenced server"
    assert fleet.said.pushes[-1] == ((B,), 1)
    assert fleet.said.trusted[B] == {1}
    assert fleet.manager.counts == {"failed": 1, "repaired": 1, "servers_died": 0, "fallbacks": 0}


def test_a_server_that_is_back_and_does_not_fit_the_run_gets_no_weights() -> None:
    """Its owner may have started it with other options, and may do so once more."""
    unfit = {B}

    def check(url: str) -> None:
        if url in unfit:
            raise ValueError(f"{url} draws otherwise")

    fleet = Fleet(check=check)
    fleet.manager.push(0)
    fleet.happen(B, State.RESTING)
    fleet.happen(B, State.SERVING)
    assert fleet.servers.restarted == [B]
    assert fleet.said.warnings[-1] == f"{B} is out of service: {B} draws otherwise"
    assert (fleet.said.pushes, fleet.manager.holding) == ([((A, B), 0)], {A})
    unfit.clear()
    fleet.happen(B, State.SERVING)
    assert fleet.manager.holding == {A, B}


def test_slower_ways_are_counted_and_told_those_of_repairs_too(fleet: Fleet) -> None:
    fleet.said.bad, fleet.said.slower = {B}, {A, B}
    report = fleet.manager.push(0)
    assert fleet.manager.metrics(report)["push/fallbacks"] == 2.0
    fleet.said.bad = set()
    fleet.manager.check_servers()
    assert fleet.manager.metrics(report)["push/fallbacks"] == 3.0
    assert f"{B} fell back to a slower transport: sharded: no" in fleet.said.warnings
    assert fleet.manager.metrics(report)["push/compared"] == 0.0


@pytest.mark.parametrize(
    ("change", "verified"),
    [
        ({"num_verified": 8}, 1),
        ({"num_verified": 0, "compared": [A, B]}, 1),
        ({"num_verified": 0}, 0),
        ({"num_verified": 4, "unverified": [B]}, 0),
    ],
)
def test_a_push_counts_as_verified_if_its_report_says_so_of_every_server(change: dict[str, Any], verified: int) -> None:
    report = replace(PushReport(3, 1, 4, 0, {A: "gathered", B: "gathered"}, {}, {}, [], {}), **change)
    totals = Totals(0.0, {})
    servers = SimpleNamespace(push=lambda version: report)
    Run.push(cast(Any, SimpleNamespace(log=SimpleNamespace(totals=totals), server_manager=servers)), 3)
    assert (totals.pushes, totals.pushes_verified) == (1, verified)


def test_a_server_that_fails_twice_in_a_row_is_started_again(fleet: Fleet) -> None:
    fleet.said.bad = {B}
    fleet.manager.push(0)
    assert fleet.servers.restarted == []
    fleet.manager.check_servers()
    assert fleet.servers.restarted == [B]
    fleet.said.bad = set()
    fleet.manager.check_servers()
    assert len(fleet.said.pushes) == 2, "it is not serving yet"
    fleet.happen(B, State.SERVING)
    assert fleet.said.trusted[B] == {0}


def test_a_dead_server_is_out_of_service_until_it_came_back_and_was_pushed(fleet: Fleet) -> None:
    fleet.manager.push(4)
    fleet.happen(A, State.RESTING, "killed; its log ends so")
    assert fleet.said.trusted[A] == set()
    fleet.manager.push(5)
    assert fleet.said.pushes[-1] == ((B,), 5), "the trainer does not wait for it"
    fleet.happen(A, State.SERVING)
    assert fleet.said.pushes[-1] == ((A,), 5)
    assert fleet.said.trusted == {A: {5}, B: {4, 5}}


def test_a_server_that_a_collector_found_unfit_is_started_again_and_pushed() -> None:
    fleet = Fleet()
    fleet.said.unfit = [{B: "it hangs"}]
    fleet.manager.push(0)
    assert fleet.servers.restarted == [], "it holds no weights of this trainer's yet"
    fleet.said.unfit += [{B: "it hangs"}, {B: "it hangs, says another collector"}, {"http://127.0.0.1:3": "unknown"}]
    fleet.manager.check_servers()
    assert fleet.servers.restarted == [B] and fleet.manager.counts["servers_died"] == 1
    assert fleet.said.trusted == {A: {0}, B: set()}
    fleet.manager.check_servers()
    fleet.manager.check_servers()
    assert fleet.servers.restarted == [B], "once is enough"
    fleet.happen(B, State.SERVING)
    assert fleet.said.trusted[B] == {0}


def test_a_push_waits_for_the_only_server_to_come_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (A, B):
        fleet.servers.happens(url, State.RESTING, "killed")
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            fleet.servers.happens(B, State.SERVING)

    clock = SimpleNamespace(sleep=rest, monotonic=time.monotonic)  # this module's alone: other threads sleep too
    monkeypatch.setattr(fleet_module, "time", clock)
    assert fleet.manager.push(1).transports == {B: "gathered"}
    assert len(rests) == 3


def test_the_run_stops_when_no_server_is_left(fleet: Fleet) -> None:
    fleet.servers.happens(A, State.OUT, "server 0 died too often")
    fleet.manager.push(0)
    assert fleet.manager.holding == {B}, "one is enough to go on"
    with pytest.raises(ServerDied, match="no server is left; server 1 died too often"):
        fleet.happen(B, State.OUT, "server 1 died too often")


def phases(story: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """What happened, whatever the order of servers within a phase."""
    first = [step if step[0] in ("push", "examine") else (step[0], *step[2:]) for step in story]
    return [step for at, step in enumerate(first) if at == 0 or step != first[at - 1]]


def test_on_shared_gpus_room_for_the_cache_is_taken_when_the_push_is_over(sharing: Fleet) -> None:
    some = Fleet(shares=True, lends=["kv_cache"])
    some.manager.release_memory()
    assert phases(some.said.story) == [("release_memory", "kv_cache")], "servers lend what they were said to"
    sharing.manager.push(0)
    assert phases(sharing.said.story) == [
        ("release_memory", "weights", "kv_cache", "cuda_graph"),
        ("the trainer sings",),
        ("resume_memory", "weights"),
        ("push", A, B),
        ("resume_memory", "kv_cache", "cuda_graph"),
        ("examine", A, B),
    ]
    assert sharing.manager.holding == {A, B}
    assert sharing.said.trusted == {A: {0}, B: {0}}


def test_on_shared_gpus_a_server_that_fails_the_canary_is_fenced(sharing: Fleet) -> None:
    sharing.colocation.mad = {B}
    report = sharing.manager.push(0)
    assert sharing.said.trusted == {A: {0}, B: set()}
    assert sharing.manager.holding == {A} == set(report.transports)
    assert "sings otherwise" in sharing.said.warnings[-1]


@pytest.mark.parametrize("what", ["weights", "kv_cache", "release_memory"])
def test_a_server_that_does_not_take_its_memory_or_give_it_back_is_started_again(sharing: Fleet, what: str) -> None:
    sharing.colocation.deaf = {B: what}
    sharing.manager.push(0)
    assert sharing.servers.restarted == [B]
    assert sharing.said.pushes == [((A, B) if what == "kv_cache" else (A,), 0)]
    assert sharing.manager.holding == {A}
    assert sharing.said.trusted == {A: {0}, B: set()}
    assert ("forget", B) in sharing.colocation.done, "a new process has given nothing"


def test_a_server_that_is_being_started_is_waited_for_before_the_trainer_takes_the_gpus(sharing: Fleet) -> None:
    sharing.manager.push(0)
    sharing.manager.check_servers()
    assert sharing.servers.polls == [False, True], "none starts for a push, and some while the trainer sleeps"
    sharing.servers.states[1] = State.STARTING
    sharing.servers.course[B] = [State.STARTING, State.SERVING]
    del sharing.said.story[:], sharing.servers.polls[:]
    sharing.manager.release_memory()
    released = {step[:2] for step in sharing.said.story if step[0] != "hold"}
    assert released == {("release_memory", A), ("release_memory", B)}
    assert sharing.said.story[:2] == [("hold", A), ("hold", B)], "nothing is asked of a server that sleeps"
    assert sharing.servers.polls == [False, False], "none starts now"


def test_on_shared_gpus_a_server_that_came_back_waits_for_the_next_push_while_another_writes(sharing: Fleet) -> None:
    sharing.manager.push(0)
    sharing.happen(B, State.RESTING)
    sharing.happen(B, State.SERVING)
    assert sharing.said.pushes == [((A, B), 0)]
    sharing.manager.push(1)
    assert sharing.said.pushes[-1] == ((A, B), 1)


@pytest.mark.parametrize("other", [State.STARTING, State.RESTING])
def test_without_a_server_that_writes_a_push_may_take_the_shared_gpus(sharing: Fleet, other: State) -> None:
    """But it waits for those that are being started, which load into GPUs of the trainer's."""
    sharing.manager.push(0)
    for url in (A, B):
        sharing.happen(url, State.RESTING)
    assert sharing.manager.holding == set()
    sharing.servers.states[1] = other
    sharing.happen(A, State.SERVING)
    assert sharing.said.pushes[1:] == ([] if other is State.STARTING else [((A,), 0)])
    sharing.happen(B, State.SERVING)
    assert sharing.said.pushes[1:] == ([((A, B), 0)] if other is State.STARTING else [((A,), 0)])


SERVER = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
        while os.path.exists(sys.argv[2]):
            self.wfile.write(b" ")
            time.sleep(0.02)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_whose_replies_do_not_end_is_fenced_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those to the questions of the supervisor: a real one, and a process that drips."""
    never_ends, said = tmp_path / "never_ends", Noted()

    def command(launch: EngineLaunch, folder: Path) -> ServerCommand:
        return ServerCommand([sys.executable, "-c", SERVER, str(launch.port), str(never_ends)], dict(os.environ))

    monkeypatch.setitem(ENGINES, "hf", command)
    patience = Supervision(answer_within_s=0.5, ask_every_s=0, rest_s=0.01)
    with Servers([EngineLaunch("hf", "/m")], "", tmp_path, patience) as servers:
        servers.start()
        (url,), (pid,) = servers.urls, servers.pids
        manager = ServerManager(servers, said, said.push, said.warnings.append)
        manager.push(0)
        never_ends.touch()
        while manager.holding:
            manager.check_servers()
            time.sleep(0.01)
        assert said.trusted == {url: set()}
        assert said.warnings[0].startswith(f"{url} is out of service: server 0 did not answer within 0.5 s (")
        assert "no whole reply within 0.5 s" in said.warnings[0]
        never_ends.unlink()
        while not manager.holding:
            manager.check_servers()
            time.sleep(0.01)
        assert said.trusted == {url: {0}} and servers.pids != [pid]
