"""The fleet over servers and pushes that do what a test says; real ones are in test_ring_faults.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from megarl import fleet as fleet_module
from megarl.fleet import Fleet
from megarl.rollout.supervisor import ServerDied, ServerEvent, State
from megarl.train import Totals, push
from megarl.weights.report import PushReport

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


class FakeServers:
    def __init__(self, *urls: str) -> None:
        self.urls, self.states = list(urls), [State.SERVING for _ in urls]
        self.coming: list[ServerEvent] = []
        self.restarted: list[str] = []

    def event(self, url: str, state: State, reason: str = "") -> ServerEvent:
        self.states[self.urls.index(url)] = state
        return ServerEvent(self.urls.index(url), url, state, 1, reason)

    def happens(self, url: str, state: State, reason: str = "") -> None:
        self.coming.append(self.event(url, state, reason))

    def poll(self) -> list[ServerEvent]:
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

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        self.trusted.setdefault(url, set()).add(version)

    def fence(self, url: str) -> None:
        self.trusted[url] = set()

    def push(self, urls: Sequence[str], version: int) -> dict:
        self.pushes.append((tuple(urls), version))
        failed = {url: "w differs" for url in urls if url in self.bad}
        ways = {url: "gathered" for url in urls if url not in failed}
        report = PushReport(version, 1, 4, len(ways), ways, failed, {}, [], {})
        return asdict(replace(report, fallbacks={url: ["sharded: no"] for url in urls if url in self.slower}))


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
