"""The server_manager over servers and pushes that do what a test says; real ones are in test_ring_faults.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from megarl.rollout.client import ServerError
from megarl.servers.supervisor import ServerDied, ServerEvent, State
from megarl.train import push
from megarl.trainer.observed.run_log import Totals
from megarl.trainer.servers import server_manager as fleet_module
from megarl.trainer.servers.server_manager import ServerManager
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

    def restart(self, index: int, reason: str) -> list[ServerEvent]:
        self.restarted.append(self.urls[index])
        return [self.event(self.urls[index], State.RESTING, reason)]


class Noted:
    """What the collector was told, and what the pushes were asked for."""

    def __init__(self) -> None:
        self.trusted: dict[str, set[int]] = {}
        self.pushes: list[tuple[tuple[str, ...], int]] = []
        self.bad: set[str] = set()
        self.slower: set[str] = set()
        self.warnings: list[str] = []
        self.story: list[tuple[str, ...]] = []  # of pushes and of memory

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        self.trusted.setdefault(url, set()).add(version)

    def hold(self, url: str) -> None:
        self.story.append(("hold", url))

    def fence(self, url: str) -> None:
        self.trusted[url] = set()

    def push(self, urls: Sequence[str], version: int) -> dict:
        self.pushes.append((tuple(urls), version))
        failed = {url: "w differs" for url in urls if url in self.bad}
        transports = {url: "gathered" for url in urls if url not in failed}
        report = PushReport(version, 1, 4, len(transports), transports, failed, {}, [], {})
        out = asdict(replace(report, fallbacks={url: ["sharded: no"] for url in urls if url in self.slower}))
        self.story.append(("push", *urls))
        return out


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[ServerManager, FakeServers, Noted]:
    monkeypatch.setattr(fleet_module, "_TEND_EVERY_S", 0.0)
    servers, said = FakeServers(A, B), Noted()
    return ServerManager(servers, said, said.push, said.warnings.append), servers, said  # type: ignore[arg-type]


def test_a_verified_push_lets_all_servers_write(parts) -> None:
    server_manager, _, said = parts
    server_manager.push(0)
    server_manager.push(1)
    assert said.trusted == {A: {0, 1}, B: {0, 1}}
    assert server_manager.holding == {A, B}


def test_requests_are_held_while_their_servers_are_paused_for_a_push(parts) -> None:
    server_manager, _, said = parts
    server_manager.push(0)
    said.bad = {B}
    server_manager.push(1)
    push = [("hold", A), ("hold", B), ("push", A, B)]
    assert said.story == push * 2
    server_manager.check_servers()
    assert said.story[len(push * 2) :] == [("push", B)], "no request goes to a fenced server"


def test_a_server_that_fails_its_push_is_fenced_and_pushed_again_alone(parts) -> None:
    server_manager, _, said = parts
    server_manager.push(0)
    said.bad = {B}
    server_manager.push(1)
    assert said.trusted == {A: {0, 1}, B: set()}, "it may hold anything"
    assert "failed: w differs" in said.warnings[-1]
    said.bad = set()
    server_manager.check_servers()
    assert said.pushes[-1] == ((B,), 1)
    assert said.trusted[B] == {1}
    assert server_manager.counts == {"failed": 1, "repaired": 1, "servers_died": 0, "fallbacks": 0}


def test_a_server_that_is_back_and_does_not_fit_the_run_gets_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may have started it with other options, and may do so once more."""
    monkeypatch.setattr(fleet_module, "_TEND_EVERY_S", 0.0)
    servers, said, unfit = FakeServers(A, B), Noted(), {B}

    def check(url: str) -> None:
        if url in unfit:
            raise ValueError(f"{url} draws otherwise")

    server_manager = ServerManager(servers, said, said.push, said.warnings.append, check=check)
    server_manager.push(0)
    servers.happens(B, State.RESTING, "died")
    server_manager.check_servers()
    servers.happens(B, State.SERVING)
    server_manager.check_servers()
    assert servers.restarted == [B]
    assert said.warnings[-1] == f"{B} is out of service: {B} draws otherwise"
    assert (said.pushes, server_manager.holding) == ([((A, B), 0)], {A})
    unfit.clear()
    servers.happens(B, State.SERVING)
    server_manager.check_servers()
    assert server_manager.holding == {A, B}


def test_failed_servers_are_out_of_service_before_any_other_is_trusted(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router with a failed server among its workers must not be told that the version is there."""
    server_manager, _, said = parts
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(said, "trust", lambda url, *_: told.append(("trust", url)))
    monkeypatch.setattr(said, "fence", lambda url: told.append(("fence", url)))
    said.bad = {B}
    server_manager.push(0)
    assert told == [("fence", B), ("trust", A)]


def test_slower_ways_are_counted_and_told_those_of_repairs_too(parts) -> None:
    server_manager, _, said = parts
    said.bad, said.slower = {B}, {A, B}
    report = server_manager.push(0)
    assert server_manager.metrics(report)["push/fallbacks"] == 2.0
    said.bad = set()
    server_manager.check_servers()
    assert server_manager.metrics(report)["push/fallbacks"] == 3.0
    assert f"{B} fell back to a slower transport: sharded: no" in said.warnings
    assert server_manager.metrics(report)["push/compared"] == 0.0


@pytest.mark.parametrize(
    ("change", "verified"),
    [
        ({"num_verified": 8}, 1),
        ({"num_verified": 0, "compared": [A, B]}, 1),
        ({"num_verified": 0}, 0),
        ({"num_verified": 4, "unverified": [B]}, 0),
    ],
)
def test_a_push_counts_as_verified_if_its_report_says_so_of_every_server(change, verified) -> None:
    report = asdict(PushReport(3, 1, 4, 0, {A: "gathered", B: "gathered"}, {}, {}, [], {})) | change
    totals = Totals(0.0, {})
    push(3, SimpleNamespace(push=lambda version: report), totals)
    assert (totals.pushes, totals.pushes_verified) == (1, verified)


def test_a_server_that_fails_twice_in_a_row_is_started_again(parts) -> None:
    server_manager, servers, said = parts
    said.bad = {B}
    server_manager.push(0)
    assert servers.restarted == []
    server_manager.check_servers()
    assert servers.restarted == [B]
    said.bad = set()
    server_manager.check_servers()
    assert said.pushes[-1] == ((B,), 0), "it is not serving yet"
    assert len(said.pushes) == 2
    servers.happens(B, State.SERVING)
    server_manager.check_servers()
    assert said.trusted[B] == {0}


def test_a_dead_server_is_out_of_service_until_it_came_back_and_was_pushed(parts) -> None:
    server_manager, servers, said = parts
    server_manager.push(4)
    servers.happens(A, State.RESTING, "killed; its log ends so")
    server_manager.check_servers()
    assert said.trusted[A] == set()
    server_manager.push(5)
    assert said.pushes[-1] == ((B,), 5), "the trainer does not wait for it"
    servers.happens(A, State.SERVING)
    server_manager.check_servers()
    assert said.pushes[-1] == ((A,), 5)
    assert said.trusted == {A: {5}, B: {4, 5}}


def test_a_server_that_a_collector_found_unfit_is_started_again_and_pushed(parts) -> None:
    server_manager, servers, said = parts
    found = [{B: "it hangs"}, {B: "it hangs, says another collector"}, {"http://127.0.0.1:3": "unknown"}]
    server_manager._unfit = lambda: found.pop(0) if found else {}
    server_manager.push(0)
    assert servers.restarted == [], "it holds no weights of this trainer's yet"
    found.insert(0, {B: "it hangs"})
    server_manager.check_servers()
    assert servers.restarted == [B] and server_manager.counts["servers_died"] == 1
    assert said.trusted == {A: {0}, B: set()}
    server_manager.check_servers()
    assert servers.restarted == [B], "once is enough"
    servers.happens(B, State.SERVING)
    server_manager.check_servers()
    assert said.trusted[B] == {0}


def test_a_push_waits_for_the_only_server_to_come_back(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    server_manager, servers, said = parts
    for url in (A, B):
        servers.happens(url, State.RESTING, "killed")
    rests = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            servers.happens(B, State.SERVING)

    clock = SimpleNamespace(sleep=rest, monotonic=time.monotonic)  # this module's alone: other threads sleep too
    monkeypatch.setattr(fleet_module, "time", clock)
    assert server_manager.push(1)["transports"] == {B: "gathered"}
    assert len(rests) == 3


def test_the_run_stops_when_no_server_is_left(parts) -> None:
    server_manager, servers, said = parts
    servers.happens(A, State.OUT, "server 0 died too often")
    server_manager.push(0)
    assert server_manager.holding == {B}, "one is enough to go on"
    servers.happens(B, State.OUT, "server 1 died too often")
    with pytest.raises(ServerDied, match="no server is left; server 1 died too often"):
        server_manager.check_servers()


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


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> tuple[ServerManager, FakeServers, Noted, FakeColocation]:
    monkeypatch.setattr(fleet_module, "_TEND_EVERY_S", 0.0)
    servers, said = FakeServers(A, B), Noted()
    colocation = FakeColocation(said.story)

    def canary() -> Canary:
        said.story.append(("the trainer sings",))
        return CANARY

    server_manager = ServerManager(servers, said, said.push, said.warnings.append, colocation, canary)  # type: ignore[arg-type]
    return server_manager, servers, said, colocation


def phases(story: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """What happened, whatever the order of servers within a phase."""
    first = [step if step[0] in ("push", "examine") else (step[0], *step[2:]) for step in story]
    return [step for at, step in enumerate(first) if at == 0 or step != first[at - 1]]


def test_on_shared_gpus_room_for_the_cache_is_taken_when_the_push_is_over(sharing) -> None:
    server_manager, _, said, _ = sharing
    server_manager.push(0)
    assert phases(said.story) == [
        ("hold",),
        ("release_memory", "weights", "kv_cache", "cuda_graph"),
        ("the trainer sings",),
        ("resume_memory", "weights"),
        ("push", A, B),
        ("resume_memory", "kv_cache", "cuda_graph"),
        ("examine", A, B),
    ]
    assert server_manager.holding == {A, B}
    assert said.trusted == {A: {0}, B: {0}}


def test_on_shared_gpus_a_server_that_fails_the_canary_is_fenced(sharing) -> None:
    server_manager, _, said, colocation = sharing
    colocation.mad = {B}
    report = server_manager.push(0)
    assert said.trusted == {A: {0}, B: set()}
    assert server_manager.holding == {A} == set(report["transports"])
    assert "sings otherwise" in said.warnings[-1]


@pytest.mark.parametrize("what", ["weights", "kv_cache"])
def test_a_server_that_does_not_take_its_memory_is_started_again(sharing, what: str) -> None:
    server_manager, servers, said, colocation = sharing
    colocation.deaf = {B: what}
    server_manager.push(0)
    assert servers.restarted == [B]
    assert said.pushes == [((A,) if what == "weights" else (A, B), 0)]
    assert server_manager.holding == {A}
    assert said.trusted == {A: {0}, B: set()}


def test_a_server_that_is_being_started_is_waited_for_before_the_trainer_takes_the_gpus(sharing) -> None:
    server_manager, servers, said, _ = sharing
    server_manager.push(0)
    servers.states[1] = State.STARTING
    servers.course[B] = [State.STARTING, State.SERVING]
    del said.story[:], servers.polls[:]
    server_manager.release_memory()
    assert {step[:2] for step in said.story if step[0] != "hold"} == {("release_memory", A), ("release_memory", B)}
    assert said.story[:2] == [("hold", A), ("hold", B)], "nothing is asked of a server that sleeps"
    assert servers.polls == [False, False], "none starts now"


def test_on_shared_gpus_none_is_started_between_the_trainers_turn_and_the_push(sharing) -> None:
    server_manager, servers, _, _ = sharing
    server_manager.push(0)
    assert servers.polls == [False]
    server_manager.check_servers()
    assert servers.polls == [False, True], "while completions are written the trainer sleeps"


def test_without_a_server_that_writes_a_push_waits_for_those_that_are_being_started(sharing) -> None:
    server_manager, servers, said, _ = sharing
    server_manager.push(0)
    servers.happens(A, State.RESTING, "died")
    servers.happens(B, State.RESTING, "died")
    server_manager.check_servers()
    servers.happens(A, State.SERVING)
    servers.states[1] = State.STARTING
    server_manager.check_servers()
    assert said.pushes == [((A, B), 0)], "B loads into GPUs of the trainer's"
    servers.happens(B, State.SERVING)
    server_manager.check_servers()
    assert said.pushes == [((A, B), 0)] * 2


def test_servers_lend_what_they_were_said_to(sharing) -> None:
    _, servers, said, colocation = sharing
    ServerManager(
        servers, said, said.push, said.warnings.append, colocation, lambda: CANARY, ["kv_cache"]
    ).release_memory()
    assert {step[2:] for step in said.story if step[0] != "hold"} == {("kv_cache",)}


def test_a_server_that_does_not_give_its_memory_back_is_started_again(sharing) -> None:
    server_manager, servers, said, colocation = sharing
    server_manager.push(0)
    colocation.deaf = {B: "release_memory"}
    server_manager.release_memory()
    assert servers.restarted == [B]
    assert ("forget", B) in colocation.done, "a new process has given nothing"
    assert said.trusted[B] == set()


def test_on_shared_gpus_a_server_that_came_back_waits_for_the_next_push_while_another_writes(sharing) -> None:
    server_manager, servers, said, _ = sharing
    server_manager.push(0)
    servers.happens(B, State.RESTING, "died")
    server_manager.check_servers()
    servers.happens(B, State.SERVING)
    server_manager.check_servers()
    assert said.pushes == [((A, B), 0)]
    server_manager.push(1)
    assert said.pushes[-1] == ((A, B), 1)


def test_without_a_server_that_writes_a_push_may_take_the_shared_gpus(sharing) -> None:
    server_manager, servers, said, _ = sharing
    server_manager.push(0)
    for url in (A, B):
        servers.happens(url, State.RESTING, "died")
    server_manager.check_servers()
    assert server_manager.holding == set()
    servers.happens(A, State.SERVING)
    server_manager.check_servers()
    assert said.pushes == [((A, B), 0), ((A,), 0)]
