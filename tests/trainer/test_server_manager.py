"""The fleet over servers and pushes that do what a test says; real ones are in test_ring_faults.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from megarl.rollout.client import EngineError
from megarl.servers.supervisor import ServerDied, ServerEvent, State
from megarl.train import Totals, push
from megarl.trainer import server_manager as fleet_module
from megarl.trainer.server_manager import Fleet
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


class Said:
    """What the collector was told, and what the pushes were asked for."""

    def __init__(self) -> None:
        self.trusted: dict[str, set[int]] = {}
        self.pushes: list[tuple[tuple[str, ...], int]] = []
        self.bad: set[str] = set()
        self.slower: set[str] = set()
        self.warnings: list[str] = []
        self.story: list[tuple[str, ...]] = []  # of pushes and turns

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        self.trusted.setdefault(url, set()).add(version)

    def fence(self, url: str) -> None:
        self.trusted[url] = set()

    def push(self, urls: Sequence[str], version: int) -> dict:
        self.pushes.append((tuple(urls), version))
        failed = {url: "w differs" for url in urls if url in self.bad}
        ways = {url: "gathered" for url in urls if url not in failed}
        report = PushReport(version, 1, 4, len(ways), ways, failed, {}, [], {})
        out = asdict(replace(report, fallbacks={url: ["sharded: no"] for url in urls if url in self.slower}))
        self.story.append(("push", *urls))
        return out


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> tuple[Fleet, FakeServers, Said]:
    monkeypatch.setattr(fleet_module, "_TEND_EVERY_S", 0.0)
    servers, said = FakeServers(A, B), Said()
    return Fleet(servers, said, said.push, said.warnings.append), servers, said  # type: ignore[arg-type]


def test_a_verified_push_lets_all_servers_write(parts) -> None:
    fleet, _, said = parts
    fleet.push(0)
    fleet.push(1)
    assert said.trusted == {A: {0, 1}, B: {0, 1}}
    assert fleet.holding == {A, B}


def test_a_server_that_fails_its_push_is_fenced_and_pushed_again_alone(parts) -> None:
    fleet, _, said = parts
    fleet.push(0)
    said.bad = {B}
    fleet.push(1)
    assert said.trusted == {A: {0, 1}, B: set()}, "it may hold anything"
    assert "failed: w differs" in said.warnings[-1]
    said.bad = set()
    fleet.tend()
    assert said.pushes[-1] == ((B,), 1)
    assert said.trusted[B] == {1}
    assert fleet.counts == {"failed": 1, "repaired": 1, "servers_died": 0, "fallbacks": 0}


def test_slower_ways_are_counted_and_told_those_of_repairs_too(parts) -> None:
    fleet, _, said = parts
    said.bad, said.slower = {B}, {A, B}
    report = fleet.push(0)
    assert fleet.metrics(report)["push/fallbacks"] == 2.0
    said.bad = set()
    fleet.tend()
    assert fleet.metrics(report)["push/fallbacks"] == 3.0
    assert f"{B} took a slower way of the push: sharded: no" in said.warnings
    assert fleet.metrics(report)["push/compared"] == 0.0


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
    push(SimpleNamespace(fleet=SimpleNamespace(push=lambda version: report)), 3, totals)
    assert (totals.pushes, totals.pushes_verified) == (1, verified)


def test_a_server_that_fails_twice_in_a_row_is_started_again(parts) -> None:
    fleet, servers, said = parts
    said.bad = {B}
    fleet.push(0)
    assert servers.restarted == []
    fleet.tend()
    assert servers.restarted == [B]
    said.bad = set()
    fleet.tend()
    assert said.pushes[-1] == ((B,), 0), "it is not serving yet"
    assert len(said.pushes) == 2
    servers.happens(B, State.SERVING)
    fleet.tend()
    assert said.trusted[B] == {0}


def test_a_dead_server_is_out_of_service_until_it_came_back_and_was_pushed(parts) -> None:
    fleet, servers, said = parts
    fleet.push(4)
    servers.happens(A, State.RESTING, "killed; its log ends so")
    fleet.tend()
    assert said.trusted[A] == set()
    fleet.push(5)
    assert said.pushes[-1] == ((B,), 5), "the trainer does not wait for it"
    servers.happens(A, State.SERVING)
    fleet.tend()
    assert said.pushes[-1] == ((A,), 5)
    assert said.trusted == {A: {5}, B: {4, 5}}


def test_a_push_waits_for_the_only_server_to_come_back(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, servers, said = parts
    for url in (A, B):
        servers.happens(url, State.RESTING, "killed")
    rests = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            servers.happens(B, State.SERVING)

    monkeypatch.setattr(fleet_module.time, "sleep", rest)
    assert fleet.push(1)["ways"] == {B: "gathered"}
    assert len(rests) == 3


def test_the_run_stops_when_no_server_is_left(parts) -> None:
    fleet, servers, said = parts
    servers.happens(A, State.OUT, "server 0 died too often")
    fleet.push(0)
    assert fleet.holding == {B}, "one is enough to go on"
    servers.happens(B, State.OUT, "server 1 died too often")
    with pytest.raises(ServerDied, match="no server is left; server 1 died too often"):
        fleet.tend()


CANARY = Canary((5, 6))


class FakeTurns:
    def __init__(self, story: list[tuple[str, ...]]) -> None:
        self.done = story
        self.deaf: dict[str, str] = {}  # url -> what it does not do: sleep, weights, kv_cache
        self.mad: set[str] = set()  # urls that fail the canary

    def sleep(self, url: str, what: Sequence[str]) -> None:
        self._obey(url, "sleep")
        self.done.append(("sleep", url, *what))

    def wake(self, url: str, what: Sequence[str]) -> None:
        self._obey(url, *what)
        self.done.append(("wake", url, *what))

    def _obey(self, url: str, *what: str) -> None:
        if self.deaf.get(url) in what:
            raise EngineError(url, "/x", 0, "it does not answer")

    def forget(self, url: str) -> None:
        self.done.append(("forget", url))

    def examine(self, canary: Canary, urls: Sequence[str], adapter: str | None) -> dict[str, str]:
        assert canary is CANARY
        self.done.append(("examine", *urls))
        return {url: f"{url} sings otherwise" for url in urls if url in self.mad}


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> tuple[Fleet, FakeServers, Said, FakeTurns]:
    monkeypatch.setattr(fleet_module, "_TEND_EVERY_S", 0.0)
    servers, said = FakeServers(A, B), Said()
    turns = FakeTurns(said.story)

    def canary() -> Canary:
        said.story.append(("the trainer sings",))
        return CANARY

    fleet = Fleet(servers, said, said.push, said.warnings.append, turns, canary)  # type: ignore[arg-type]
    return fleet, servers, said, turns


def phases(story: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """What happened, whatever the order of servers within a phase."""
    first = [step if step[0] in ("push", "examine") else (step[0], *step[2:]) for step in story]
    return [step for at, step in enumerate(first) if at == 0 or step != first[at - 1]]


def test_on_shared_gpus_room_for_the_cache_is_taken_when_the_push_is_over(sharing) -> None:
    fleet, _, said, _ = sharing
    fleet.push(0)
    assert phases(said.story) == [
        ("sleep", "weights", "kv_cache"),
        ("the trainer sings",),
        ("wake", "weights"),
        ("push", A, B),
        ("wake", "kv_cache"),
        ("examine", A, B),
    ]
    assert fleet.holding == {A, B}
    assert said.trusted == {A: {0}, B: {0}}


def test_on_shared_gpus_a_server_that_fails_the_canary_is_fenced(sharing) -> None:
    fleet, _, said, turns = sharing
    turns.mad = {B}
    report = fleet.push(0)
    assert said.trusted == {A: {0}, B: set()}
    assert fleet.holding == {A} == set(report["ways"])
    assert "sings otherwise" in said.warnings[-1]


@pytest.mark.parametrize("what", ["weights", "kv_cache"])
def test_a_server_that_does_not_take_its_memory_is_started_again(sharing, what: str) -> None:
    fleet, servers, said, turns = sharing
    turns.deaf = {B: what}
    fleet.push(0)
    assert servers.restarted == [B]
    assert said.pushes == [((A,) if what == "weights" else (A, B), 0)]
    assert fleet.holding == {A}
    assert said.trusted == {A: {0}, B: set()}


def test_a_server_that_is_being_started_is_waited_for_before_the_trainer_takes_the_gpus(sharing) -> None:
    fleet, servers, said, _ = sharing
    fleet.push(0)
    servers.states[1] = State.STARTING
    servers.course[B] = [State.STARTING, State.SERVING]
    del said.story[:], servers.polls[:]
    fleet.sleep()
    assert {step[:2] for step in said.story} == {("sleep", A), ("sleep", B)}
    assert servers.polls == [False, False], "none starts now"


def test_on_shared_gpus_none_is_started_between_the_trainers_turn_and_the_push(sharing) -> None:
    fleet, servers, _, _ = sharing
    fleet.push(0)
    assert servers.polls == [False]
    fleet.tend()
    assert servers.polls == [False, True], "while completions are written the trainer sleeps"


def test_without_a_server_that_writes_a_push_waits_for_those_that_are_being_started(sharing) -> None:
    fleet, servers, said, _ = sharing
    fleet.push(0)
    servers.happens(A, State.RESTING, "died")
    servers.happens(B, State.RESTING, "died")
    fleet.tend()
    servers.happens(A, State.SERVING)
    servers.states[1] = State.STARTING
    fleet.tend()
    assert said.pushes == [((A, B), 0)], "B loads into GPUs of the trainer's"
    servers.happens(B, State.SERVING)
    fleet.tend()
    assert said.pushes == [((A, B), 0)] * 2


def test_servers_lend_what_they_were_said_to(sharing) -> None:
    _, servers, said, turns = sharing
    Fleet(servers, said, said.push, said.warnings.append, turns, lambda: CANARY, ["kv_cache"]).sleep()
    assert {step[2:] for step in said.story} == {("kv_cache",)}


def test_a_server_that_does_not_give_its_memory_back_is_started_again(sharing) -> None:
    fleet, servers, said, turns = sharing
    fleet.push(0)
    turns.deaf = {B: "sleep"}
    fleet.sleep()
    assert servers.restarted == [B]
    assert ("forget", B) in turns.done, "a new process has given nothing"
    assert said.trusted[B] == set()


def test_on_shared_gpus_a_server_that_came_back_waits_for_the_next_push_while_another_writes(sharing) -> None:
    fleet, servers, said, _ = sharing
    fleet.push(0)
    servers.happens(B, State.RESTING, "died")
    fleet.tend()
    servers.happens(B, State.SERVING)
    fleet.tend()
    assert said.pushes == [((A, B), 0)]
    fleet.push(1)
    assert said.pushes[-1] == ((A, B), 1)


def test_without_a_server_that_writes_a_push_may_take_the_shared_gpus(sharing) -> None:
    fleet, servers, said, _ = sharing
    fleet.push(0)
    for url in (A, B):
        servers.happens(url, State.RESTING, "died")
    fleet.tend()
    assert fleet.holding == set()
    servers.happens(A, State.SERVING)
    fleet.tend()
    assert said.pushes == [((A, B), 0), ((A,), 0)]
