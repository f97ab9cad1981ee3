"""What of a role is on the device while a rank does what: who shares its GPU counts on the rest being away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.mcore.training.offload import Moved
from megarl.roles import worker as worker_module
from megarl.roles.worker import Role, Worker

ALL = {"parameters", "gradients", "moments"}


class FakeBed:
    def __init__(self) -> None:
        self.is_offloaded = True

    def offload(self) -> Moved:
        self.is_offloaded = True
        return Moved(1, 1, 1)

    def onload(self) -> None:
        self.is_offloaded = False


def onloaded(role: Role) -> set[str]:
    return {part for part in ALL if not getattr(role, part).is_offloaded}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[Worker, list[set[str]]]:
    """A worker whose actor sleeps, and what is onloaded of it when the work is done."""
    worker, seen = Worker(), []
    role = Role("actor", [], {}, "", None, FakeBed(), FakeBed(), FakeBed())  # type: ignore[arg-type]
    worker.roles["actor"] = role

    class FakePusher:
        def push(self, *_: Any, **__: Any) -> None:
            seen.append(onloaded(role))

    def look(*_: Any, **__: Any) -> None:
        seen.append(onloaded(role))

    role.pusher = FakePusher()  # type: ignore[assignment]
    monkeypatch.setattr(worker_module, "save_hf", look)
    monkeypatch.setattr(worker_module.checkpoint, "save", look)
    monkeypatch.setattr(worker_module.checkpoint, "load", look)
    return worker, seen


WHERE = {"role": "actor", "folder": "/nowhere", "adapter": None, "canary": None, "version": 1, "only": []}


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Worker.push, {"parameters"}),
        (Worker.export, {"parameters"}),
        (Worker.save, ALL),
        (Worker.restore, ALL),
    ],
)
def test_only_what_learns_wakes_more_than_weights(seen: Any, method: Callable[..., Any], wanted: set[str]) -> None:
    worker, found = seen
    method(worker, WHERE, {})
    assert found == [wanted]
    assert onloaded(worker.roles["actor"]) == set(), "it sleeps again"


def test_a_turn_of_the_trainer_wakes_all(seen: Any) -> None:
    worker, _ = seen
    worker.onload({"role": "actor"}, {})
    assert onloaded(worker.roles["actor"]) == ALL
    assert worker.offload({"role": "actor"}, {})[0] == {"num_bytes": 9}
    assert onloaded(worker.roles["actor"]) == set()
