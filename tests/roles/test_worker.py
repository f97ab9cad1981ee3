"""What a rank does with its roles: how it reaches servers, what passes compute, and what is on the device meanwhile."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algo.distillation import Distillation
from megarl.algo.loss import ActorLoss
from megarl.arch.layout import Layout
from megarl.group.message import Message, Setup
from megarl.mcore.models import execution
from megarl.mcore.models.execution import ExecutionOptions
from megarl.mcore.training.offload import Moved
from megarl.mcore.training.step import Step
from megarl.roles import messages
from megarl.roles import role as role_module
from megarl.roles import worker as worker_module
from megarl.roles.role import Role, build_on
from megarl.roles.settings import LoadSettings
from megarl.roles.worker import Worker
from megarl.weights.push.settings import PushSettings

URLS = ("http://a", "http://b")
Made = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The pushers that were made, each with its arguments."""
    found: Made = []
    for kind in ("Pusher", "AdapterPusher"):
        note = lambda *args, kind=kind, **how: found.append((kind, args, how)) or object()  # noqa: E731
        monkeypatch.setattr(worker_module, kind, note)
    return found


def worker_of(*names: str) -> Worker:
    worker, nothing = Worker(), None
    for name in names:
        worker.roles[name] = Role("actor", [], {"hf": 1}, "folder", *[nothing] * 4)  # type: ignore[arg-type]
    return worker


def connect(worker: Worker, role: str = "actor", **settings: Any) -> None:
    worker.connect(messages.Connect(role, PushSettings(URLS, "secret", **settings)), {})


def test_ranks_are_connected_once_and_whole_weights_pushed_with_the_settings_of_the_driver(made: Made) -> None:
    worker = worker_of("actor")
    connect(worker, dtype="bfloat16", pause_mode="in_place", check_every=3)
    ((kind, args, how),) = made
    settings = PushSettings(URLS, "secret", dtype="bfloat16", pause_mode="in_place", check_every=3)
    assert (kind, args, how) == ("Pusher", (settings, {"hf": 1}), {"source_folder": "folder"})
    with pytest.raises(AssertionError, match="role actor is connected to its servers already"):
        connect(worker)


def test_adapters_alone_are_pushed_where_servers_keep_some_and_the_pushers_of_a_rank_share_a_life(made: Made) -> None:
    worker, other = worker_of("actor", "second"), worker_of("actor")
    connect(worker, adapters_kept=2, timeout_s=7.0)
    connect(worker, "second", adapters_kept=2)
    connect(other, adapters_kept=2)
    assert {kind for kind, *_ in made} == {"AdapterPusher"}
    first, second, third = (how.pop("life") for _, _, how in made)
    assert len(first) == 12
    assert first == second == worker.life != third == other.life
    settings = PushSettings(URLS, "secret", adapters_kept=2, timeout_s=7.0)
    assert made[0][1:] == ((settings, {"hf": 1}), {"base_model": "folder"})


@pytest.mark.parametrize(("asked", "counted"), [(None, 48), (40, 40), (64, 48)])
def test_no_more_tokens_are_counted_than_the_model_has(asked: int | None, counted: int) -> None:
    """The policy's vocabulary may have more padding than its teacher's."""
    worker = Worker()
    worker.layout = Layout()
    role: Any = SimpleNamespace(hf={"vocab_size": 48}, heads=[])
    message = messages.Columns("actor", 1.0, False, None, ("top_ids", "top_log_probs"), top_k=4, vocab_size=asked)
    assert worker._outputs(role, message).vocab_size == counted


UPDATE = messages.Update("actor", 1.0, False, None, ActorLoss(), num_tokens=2, limits=None, notes=())


def test_heads_of_teachers_are_on_the_device_for_a_divergence_over_the_vocabulary() -> None:
    """Between the calls they wait in host memory."""
    worker = Worker()
    worker.layout, worker.device = Layout(), torch.device("meta")
    role: Any = SimpleNamespace(hf={"vocab_size": 48}, heads=[torch.zeros(48, 3), torch.zeros(48, 5)])
    found = worker._outputs_of_loss(role, replace(UPDATE, loss=ActorLoss(distillation=Distillation())))
    assert [head.device.type for head in (*found.heads, *role.heads)] == ["meta", "meta", "cpu", "cpu"]
    for distillation in (None, Distillation(top_k=True)):
        assert not worker._outputs_of_loss(role, replace(UPDATE, loss=ActorLoss(distillation=distillation))).heads


LORA = {"rank": 2, "alpha": 4.0, "targets": ["all-linear"], "seed": 0}
SAME = LoadSettings("bfloat16", optim={}, lora=LORA, base="first")


def owner(engine: ExecutionOptions) -> Role:
    """A frozen role in bfloat16."""
    chunks: Any = [SimpleNamespace(config=SimpleNamespace(params_dtype=torch.bfloat16))]
    nothing: Any = None
    return Role("actor", chunks, {}, "folder", *[nothing] * 4, engine=engine, chunks=chunks)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "float32"}, "dtype bfloat16, not float32; expected the same$"),
        (
            {"engine": {"transformer_impl": "auto", "param_offload": False}},
            "param_offload True, not False; expected the same$",
        ),
        ({"reads_weights": False}, "no restore brings them; expected reads_weights=True$"),
        ({"owner": ExecutionOptions()}, "Transformer Engine's .*; expected one that was loaded with .*=local$"),
    ],
)
def test_what_a_shared_base_cannot_be_otherwise_is_refused(
    change: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of Transformer Engine take no adapters."""
    monkeypatch.setattr(execution, "has_transformer_engine", lambda: True)
    change = dict(change)
    options = change.pop("owner", ExecutionOptions(transformer_impl="local", param_offload=True))
    with pytest.raises(ValueError, match=f"^base=first: .*{sentence}"):
        build_on(owner(options), messages.Load("second", "actor", "folder", replace(SAME, **change)), Layout())


def test_a_base_that_is_not_loaded_is_refused_with_the_roles_that_are() -> None:
    worker = Worker()
    for there in ("none", "actor"):
        with pytest.raises(ValueError, match=rf"^base=first: there is no such role; expected one of {there}$"):
            worker.load(messages.Load("second", "actor", "folder", SAME), {})
        worker.roles["actor"] = owner(ExecutionOptions())


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


def onload(worker: Worker, *, by_default: bool = False, moments: bool | None = None) -> None:
    worker.onload(messages.Onload("actor", by_default, moments), {})


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


PUSH = messages.Push("actor", 1, only=(), canary=None)
EXPORT = messages.Export("actor", "/nowhere", adapter=None)
SAVE, RESTORE = messages.Save("actor", "/nowhere", in_background=True), messages.Restore("actor", "/nowhere")


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        *[(message, {"parameters"}) for message in (PUSH, EXPORT)],
        *[(message, {"parameters", "moments"}) for message in (SAVE, RESTORE)],
    ],
)
@pytest.mark.parametrize("gathers_late", [False, True])
def test_a_call_onloads_only_what_it_needs_and_says_what_it_writes(
    seen: Any, message: Message, wanted: set[str], gathers_late: bool
) -> None:
    worker, found = seen
    role = worker.roles["actor"]
    if gathers_late:  # a pass that only reads gathers parameters that the step before has left, and so writes them
        role.engine = ExecutionOptions(overlap_param_gather=True, overlap_grad_reduce=True)
    worker.handlers()[type(message)](message, {})
    assert found == [wanted]
    assert onloaded(role) == set(), "it sleeps again"
    assert role.parameters.is_written is (gathers_late or message is RESTORE)


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
        onload(worker)
    export = worker.handlers()[messages.Export]
    export(EXPORT, {})
    assert len(calls) == freed
    with pytest.raises(KeyError):
        export(replace(EXPORT, role="nobody"), {})
    assert len(calls) == 2 * freed


@pytest.mark.parametrize(("device", "mapped"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_a_rank_refuses_memory_of_its_machine_that_servers_may_not_open(
    monkeypatch: pytest.MonkeyPatch, device: str, mapped: bool
) -> None:
    """The driver sees the variables of its own machine only."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(worker_module, "device_for", torch.device)
    monkeypatch.delattr(worker_module, "RankProfiler")  # what comes next
    refused = device == "cuda" and mapped
    with pytest.raises(ValueError if refused else NameError, match="PYTORCH_CUDA_ALLOC_CONF|RankProfiler"):
        Worker().setup(Setup(Layout(), device, 0, 60.0, is_mapped=mapped), {})


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        ({}, ALL),
        ({"param_offload": True}, {"moments"}),
        ({"optimizer_offload": True}, {"parameters", "gradients"}),
        ({"param_offload": True, "optimizer_offload": True}, set()),
    ],
)
def test_a_turn_wakes_what_the_options_leave_on_the_device_and_an_update_leaves_it_there(
    seen: Any, options: dict[str, bool], stays: set[str]
) -> None:
    """The planner counts no more beside the work of other roles."""
    worker, _ = seen
    role = worker.roles["actor"]
    role.engine = ExecutionOptions(**options)
    onload(worker, by_default=True)
    assert onloaded(role) == stays
    onload(worker)
    assert onloaded(role) == ALL
    worker.offload(messages.Offload("actor", by_default=True), {})
    assert onloaded(role) == stays
    worker.offload(messages.Offload("actor", by_default=False), {})
    assert onloaded(role) == set()


def test_a_turn_may_wake_all_but_moments_and_then_these(seen: Any) -> None:
    worker, _ = seen
    for moments, wanted in ((False, {"parameters", "gradients"}), (True, ALL)):
        onload(worker, by_default=True, moments=moments)
        assert onloaded(worker.roles["actor"]) == wanted


@pytest.mark.parametrize("comes", ["with the update", "before it"])
def test_an_update_waits_for_moments_before_its_step_and_not_earlier(
    seen: Any, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    worker, _ = seen
    role, story = worker.roles["actor"], list[tuple[str, bool]]()
    role.optimizer, role.hf, worker.layout = object(), {"vocab_size": 8}, Layout()

    def step(*_: Any, before_step: Callable[[], None], **__: Any) -> Step:
        assert not any(bed.is_under_way for bed in (role.parameters, role.gradients))
        story.append(("forward", role.moments.is_under_way))
        before_step()
        story.append(("step", role.moments.is_under_way))
        return Step({}, 1.0, 0.1, 0.0, True, None, [])

    monkeypatch.setattr(worker_module, "train_step", step)
    if comes == "before it":
        onload(worker)
    lengths = torch.tensor([2])
    frame = {"tokens": torch.tensor([1, 2]), "lengths": lengths, "rows": torch.ones_like(lengths)}
    worker.update(UPDATE, frame | {"micro_sizes": torch.tensor([1])})
    assert story == [("forward", True), ("step", False)]


@pytest.mark.parametrize("message", [SAVE, RESTORE])
def test_whoever_reads_moments_waits_for_them(seen: Any, monkeypatch: pytest.MonkeyPatch, message: Message) -> None:
    worker, _ = seen
    onload(worker)
    moments, there = worker.roles["actor"].moments, list[bool]()
    for name in ("save", "load"):
        monkeypatch.setattr(worker_module.checkpoint, name, lambda *_, **__: there.append(not moments.is_under_way))
    assert moments.is_under_way
    worker.push(PUSH, {})
    assert moments.is_under_way, "a push does not read them"
    worker.handlers()[type(message)](message, {})
    assert there == [True]


def test_a_role_with_local_layers_and_context_parallelism_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters make the layers local."""
    worker = Worker()
    worker.layout = Layout(cp=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(role_module, "read_hf_config", lambda folder: {})  # noqa: ARG005
    settings = LoadSettings("bfloat16", lora={"rank": 2})
    with pytest.raises(ValueError, match=r"^context_parallel_size=2: on GPUs it needs Transformer Engine's layers"):
        worker.load(messages.Load("actor", "actor", "/nowhere", settings), {})
