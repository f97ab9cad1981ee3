"""Trust and fences of servers behind a router."""

from __future__ import annotations

from typing import Any

from megarl.servers.routed import Routed

A, B, ROUTER = "http://a:1", "http://b:1", "http://router:1"


class Notes:
    """A router and a collector that write down what they are told."""

    url = ROUTER

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def add(self, url: str) -> None:
        self.said.append(("add", url))

    def remove(self, url: str) -> None:
        self.said.append(("remove", url))

    def trust(self, url: str, version: int, adapter: str | None = None) -> None:
        self.said.append(("trust", url, version, adapter))

    def fence(self, url: str) -> None:
        self.said.append(("fence", url))


def test_a_server_gets_work_before_its_version_counts() -> None:
    notes: Any = Notes()
    Routed(notes, notes).trust(A, 7)
    assert notes.said == [("add", A), ("trust", ROUTER, 7, None)]


def test_the_work_of_a_fenced_server_is_asked_for_again_of_the_others() -> None:
    notes: Any = Notes()
    routed = Routed(notes, notes)
    routed.trust(A, 7)
    routed.trust(B, 7)
    notes.said.clear()
    routed.fence(A)
    assert notes.said == [("remove", A), ("fence", ROUTER), ("trust", ROUTER, 7, None)]


def test_a_server_that_was_never_trusted_takes_nothing_with_it() -> None:
    notes: Any = Notes()
    routed = Routed(notes, notes)
    routed.trust(B, 7)
    notes.said.clear()
    routed.fence(A)
    assert notes.said == [("remove", A)]


def test_without_any_server_nothing_is_asked_for() -> None:
    notes: Any = Notes()
    routed = Routed(notes, notes)
    routed.trust(A, 7)
    notes.said.clear()
    routed.fence(A)
    assert notes.said == [("remove", A), ("fence", ROUTER)]
