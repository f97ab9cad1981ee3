"""What of a role is on the device while a rank does what: who shares its GPU counts on the rest being away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megarl.layout import Layout
from megarl.mcore.training.execution import ExecutionOptions
from megarl.mcore.training.offload import Moved
from megarl.mcore.training.step import Step
from megarl.roles import role as role_module
from megarl.roles import worker as worker_module
from megarl.roles.worker import Role, Worker

ALL = {"parameters", "gradients", "moments"}


class FakeBed:
    def __init__(self) -> None:
        self.is_offloaded, self.is_written, self.is_under_way = True, False, False

    def offload(self) -> Moved:
        self.is_offloaded = True
        return Moved(1, 1, 1, 2)

    def onload(self, *, to_read: bool, beside: bool) -> None:
        assert to_read, "who writes says so"
        self.is_offloaded, self.is_under_way = False, beside

    def wait(self) -> None:
        self.is_under_way = False

    def written(self) -> None:
        self.is_written = True


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
    monkeypatch.setattr(worker_module, "gather_json", lambda value: [value])  # of a world of one rank
    monkeypatch.setattr(worker_module, "save_hf", look)
    monkeypatch.setattr(worker_module.checkpoint, "save", look)
    monkeypatch.setattr(worker_module.checkpoint, "load", look)
    return worker, seen


WHERE = {
    "role": "actor",
    "folder": "/nowhere",
    "adapter": None,
    "canary": None,
    "version": 1,
    "only": [],
    "in_background": True,
}


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Worker.push, {"parameters"}),
        (Worker.export, {"parameters"}),
        (Worker.save, {"parameters", "moments"}),
        (Worker.restore, {"parameters", "moments"}),
    ],
)
@pytest.mark.parametrize("gathers_late", [False, True])
def test_a_call_onloads_only_what_it_needs_and_says_what_it_writes(
    seen: Any, method: Callable[..., Any], wanted: set[str], gathers_late: bool
) -> None:
    worker, found = seen
    role = worker.roles["actor"]
    if gathers_late:  # a pass that only reads gathers parameters that the step before has left, and so writes them
        role.engine = ExecutionOptions(overlap_param_gather=True, overlap_grad_reduce=True)
    method(worker, WHERE, {})
    assert found == [wanted]
    assert onloaded(role) == set(), "it sleeps again"
    assert role.parameters.is_written is (gathers_late or method is Worker.restore)


@pytest.mark.parametrize(
    ("device", "neighbours", "onloaded", "freed"),
    [("cuda", False, False, 1), ("cuda", False, True, 0), ("cuda", True, True, 1), ("cpu", True, False, 0)],
)
def test_memory_that_torch_keeps_goes_back_where_a_server_needs_it(
    seen: Any, monkeypatch: pytest.MonkeyPatch, device: str, neighbours: bool, onloaded: bool, freed: int
) -> None:
    """With turns when no role is on the GPU, beside a server after every call; also after a call that failed."""
    worker, _ = seen
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("freed"))
    worker.device, worker.has_neighbours = torch.device(device), neighbours
    if onloaded:
        worker.onload({"role": "actor", "by_default": False, "moments": None}, {})
    worker.handlers()["export"](WHERE, {})
    assert len(calls) == freed
    with pytest.raises(KeyError):
        worker.handlers()["export"](WHERE | {"role": "nobody"}, {})
    assert len(calls) == 2 * freed


def test_a_turn_of_the_trainer_wakes_all(seen: Any) -> None:
    worker, _ = seen
    worker.onload({"role": "actor", "by_default": True, "moments": None}, {})
    assert onloaded(worker.roles["actor"]) == ALL
    assert worker.offload({"role": "actor", "by_default": False}, {})[0] == {"num_bytes": 6}
    assert onloaded(worker.roles["actor"]) == set()


def test_after_an_update_a_role_is_where_its_options_say(seen: Any) -> None:
    worker, _ = seen
    role = worker.roles["actor"]
    role.engine = ExecutionOptions(optimizer_offload=True)
    worker.onload({"role": "actor", "by_default": False, "moments": None}, {})
    assert worker.offload({"role": "actor", "by_default": True}, {})[0] == {"num_bytes": 2}
    assert onloaded(role) == {"parameters", "gradients"}


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        ({}, ALL),
        ({"param_offload": True}, {"moments"}),
        ({"optimizer_offload": True}, {"parameters", "gradients"}),
        ({"param_offload": True, "optimizer_offload": True}, set()),
    ],
)
def test_a_turn_of_the_trainer_wakes_what_the_options_leave_on_the_device(
    seen: Any, options: dict[str, bool], stays: set[str]
) -> None:
    """The planner counts no more beside the work of other roles."""
    worker, _ = seen
    worker.roles["actor"].engine = ExecutionOptions(**options)
    worker.onload({"role": "actor", "by_default": True, "moments": None}, {})
    assert onloaded(worker.roles["actor"]) == stays


def test_a_turn_may_wake_all_but_moments_and_then_these(seen: Any) -> None:
    worker, _ = seen
    worker.onload({"role": "actor", "by_default": True, "moments": False}, {})
    assert onloaded(worker.roles["actor"]) == {"parameters", "gradients"}
    worker.onload({"role": "actor", "by_default": True, "moments": True}, {})
    assert onloaded(worker.roles["actor"]) == ALL


@pytest.mark.parametrize("comes", ["with the update", "before it"])
def test_an_update_waits_for_moments_before_its_step_and_not_earlier(
    seen: Any, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    worker, _ = seen
    role, story = worker.roles["actor"], list[tuple[str, bool]]()
    role.optimizer, role.hf, role.last_loss, worker.layout = object(), {"vocab_size": 8}, ({}, None), Layout()

    def step(*_: Any, before_step: Callable[[], None], **__: Any) -> Step:
        assert not any(bed.is_under_way for bed in (role.parameters, role.gradients))
        story.append(("forward", role.moments.is_under_way))
        before_step()
        story.append(("step", role.moments.is_under_way))
        return Step({}, 1.0, 0.1, 0.0, True, None, [])

    monkeypatch.setattr(worker_module, "train_step", step)
    if comes == "before it":
        worker.onload({"role": "actor", "by_default": False, "moments": None}, {})
    arguments = {"role": "actor", "reference": None, "limits": None, "shares_prefixes": False, "names": []}
    arguments |= {"temperature": 1.0, "loss": {}, "num_tokens": 2, "notes": []}
    lengths = torch.tensor([2])
    frame = {"tokens": torch.tensor([1, 2]), "lengths": lengths, "rows": torch.ones_like(lengths)}
    worker.update(arguments, frame | {"micro_sizes": torch.tensor([1])})
    assert story == [("forward", True), ("step", False)]


@pytest.mark.parametrize("method", [Worker.save, Worker.restore])
def test_whoever_reads_moments_waits_for_them(
    seen: Any, monkeypatch: pytest.MonkeyPatch, method: Callable[..., Any]
) -> None:
    worker, _ = seen
    worker.onload({"role": "actor", "by_default": False, "moments": None}, {})
    moments, there = worker.roles["actor"].moments, list[bool]()
    for name in ("save", "load"):
        monkeypatch.setattr(worker_module.checkpoint, name, lambda *_, **__: there.append(not moments.is_under_way))
    assert moments.is_under_way
    worker.push(WHERE, {})
    assert moments.is_under_way, "a push does not read them"
    method(worker, WHERE, {})
    assert there == [True]


def test_a_role_with_local_layers_and_context_parallelism_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters make the layers local."""
    worker = Worker()
    worker.layout = Layout(cp=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(role_module, "read_hf_config", lambda folder: {})  # noqa: ARG005
    role: dict[str, Any] = {
        "kind": "actor",
        "optim": None,
        "lora": {"rank": 2},
        "engine": {},
        "plugins": [],
        "folder": "/nowhere",
    }
    with pytest.raises(ValueError, match=r"^context_parallel_size=2: on GPUs it needs Transformer Engine's layers"):
        worker.load(role, {})
