"""How a rank reaches the servers: settled once, with the settings of the driver, before the first push."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from megarl.roles import worker as worker_module
from megarl.roles.push_settings import PushSettings
from megarl.roles.worker import Role, Worker

URLS = ("http://a", "http://b")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The pushers that were made, each with its arguments."""
    found: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for kind in ("Pusher", "AdapterPusher"):
        note = lambda *args, kind=kind, **how: found.append((kind, args, how)) or object()  # noqa: E731
        monkeypatch.setattr(worker_module, kind, note)
    return found


def worker_with_actor() -> Worker:
    worker, nothing = Worker(), None
    worker.roles["actor"] = Role("actor", [], {"hf": 1}, "folder", *[nothing] * 4)  # type: ignore[arg-type]
    return worker


def connect(worker: Worker, **settings: Any) -> None:
    worker.connect({"role": "actor", "settings": asdict(PushSettings(URLS, "secret", **settings))}, {})


def test_whole_weights_are_pushed_with_the_settings_of_the_driver(made: Any) -> None:
    connect(worker_with_actor(), dtype="bfloat16", pause_mode="in_place", check_every=3)
    ((kind, args, how),) = made
    assert (kind, args) == ("Pusher", (URLS, "secret", {"hf": 1}))
    assert (how["dtype"], how["pause_mode"], how["check_every"]) == (torch.bfloat16, "in_place", 3)
    assert how["source_folder"] == "folder"


def test_adapters_alone_are_pushed_where_servers_keep_some(made: Any) -> None:
    connect(worker_with_actor(), adapters_kept=2, timeout_s=7.0)
    ((kind, args, how),) = made
    assert (kind, args) == ("AdapterPusher", (URLS, "secret", {"hf": 1}))
    assert len(how.pop("life")) == 12
    assert how == {"base_model": "folder", "keep": 2, "timeout_s": 7.0}


def test_the_pushers_of_a_rank_share_a_life(made: Any) -> None:
    worker = worker_with_actor()
    worker.roles["second"] = Role("actor", [], {"hf": 1}, "folder", *[None] * 4)  # type: ignore[arg-type]
    for role in ("actor", "second"):
        worker.connect({"role": role, "settings": asdict(PushSettings(URLS, "secret", adapters_kept=2))}, {})
    connect(other := worker_with_actor(), adapters_kept=2)
    first, second, third = (how["life"] for _, _, how in made)
    assert first == second == worker.life != third == other.life


def test_ranks_are_connected_once(made: Any) -> None:
    worker = worker_with_actor()
    connect(worker)
    with pytest.raises(AssertionError, match="role actor is connected to its servers already"):
        connect(worker)
