"""From the configuration to the parts of a run."""

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
from config_helpers import load

from megarl.arch.routed_experts import RoutedExperts
from megarl.config import Config, load_config
from megarl.config.placement import placements
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.metrics.reading.jsonl import read_lines
from megarl.processes import watchdog
from megarl.rollout.engine_columns import EngineRoutes, EngineSupport
from megarl.servers.supervisor import Supervision
from megarl.trainer import stage as stage_module
from megarl.trainer.build import (
    check_ids,
    engine_columns,
    make_group,
    make_mini_model,
    model_folder,
)
from megarl.trainer.resumable import Plan, open_trackers
from megarl.trainer.servers import make_servers as servers_module
from megarl.trainer.servers.make_servers import make_servers, server_launch, server_threads, supervision
from megarl.trainer.sft import Sft


@pytest.mark.parametrize(
    ("words", "ordered"),
    [
        (["trainer.n_gpus_per_node=2", "actor.megatron.tensor_model_parallel_size=2"], True),
        (["trainer.n_gpus_per_node=2", "actor.megatron.context_parallel_size=2"], True),
        (["trainer.n_gpus_per_node=2"], False),
        (["trainer.n_gpus_per_node=4", "actor.megatron.tensor_model_parallel_size=2", "actor.strategy=fsdp"], False),
    ],
)
def test_ranks_that_overlap_communication_get_one_hardware_queue(words: list[str], ordered: bool) -> None:
    config = load(*words)
    group = make_group(config, config.actor, "ranks_0")
    assert not group.settings.has_neighbours
    assert dict(group.settings.environment) == ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ordered else {})
    joined = make_group(config, config.actor, "ranks_0", serves=True)
    more = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert joined.settings.environment == {**group.settings.environment, **more}
    assert group.settings.start_timeout_s == config.trainer.call_timeout_s == 600


@pytest.mark.parametrize(
    ("words", "beside", "mapped"),
    [
        (["rollout.first_gpu=1", "rollout.memory_fraction=0.3"], True, True),
        (["rollout.first_gpu=2"], False, False),
        (["rollout.first_gpu=1", "rollout.placement=shared"], False, True),  # in turns
        (["rollout.urls=['https://a:1']"], False, False),
        (["actor.num_ranks=1", "rollout.first_gpu=1", "rollout.memory_fraction=0.3"], False, False),
        (["actor.num_ranks=1", "rollout.first_gpu=1", "rollout.placement=shared"], False, False),
        (["rollout.placement=shared", "actor.lora.rank=8", "actor.lora.push=merged"], False, True),
        (["rollout.placement=shared", "actor.lora.rank=8", "actor.lora.push=adapter"], False, False),
    ],
)
def test_ranks_learn_of_servers_on_their_gpus(words: list[str], beside: bool, mapped: bool) -> None:
    config = load("trainer.n_gpus_per_node=2", *words)
    settings = make_group(config, config.actor, "ranks_0", serves=True).settings
    assert (settings.has_neighbours, settings.is_mapped) == (beside, mapped)
    alone = make_group(config, config.actor, "ranks_0").settings
    assert not alone.has_neighbours and not alone.is_mapped, "without servers"


def test_only_memory_of_the_actors_ranks_is_mapped() -> None:
    """Roles of the actor's layout on its ranks share its processes."""
    config = load("trainer.n_gpus_per_node=2", "rollout.placement=shared", "critic.num_ranks=1")
    groups = [make_group(config, role, "r", serves=True) for role in (config.ref, config.critic)]
    mapped = [group.settings.is_mapped for group in groups]
    assert mapped == [True, False]


def test_megarl_sft_has_no_servers_although_a_recipe_places_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(Exception):
        pass

    def stop(*given: Any, **how: Any) -> None:
        raise Made(make_group(*given, **how).settings)

    monkeypatch.setattr(stage_module, "make_group", stop)
    words = ["recipe=grpo_qwen2_5_7b_1x8h100", "sft.train_files=[a]", f"trainer.default_local_dir={tmp_path}"]
    config, _ = load_config(words, command="sft")
    assert config.rollout.placement == "shared"
    with pytest.raises(Made) as made:
        plan = stage_module.StagePlan(config, 1, None, Sft(), mock.Mock(), None, {})
        with stage_module.open_stage(plan, mock.Mock(nodes=None), mock.Mock()):
            pass
    (settings,) = made.value.args
    assert (settings.has_neighbours, settings.is_mapped) == (False, False)


def test_a_driver_shows_itself_while_a_model_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """That may take longer than the watchdog's limit, and is no hang."""
    shown = threading.Event()
    monkeypatch.setattr(watchdog, "_EVERY_S", 0.01)
    monkeypatch.setattr(watchdog, "heartbeat", shown.set)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(shown.wait(600)) + name)
    assert model_folder("org/large") == "Trueorg/large", "it ends when the wait has shown itself"

    def refuse(name: str, **_: object) -> str:
        raise OSError(f"{name} is private\nask its owner")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"^model.path=runs/models/mine: no such folder; expected a folder with a con"):
        model_folder("runs/models/mine")  # no hub is asked for what can only be a folder
    with pytest.raises(ValueError, match=r"^model.path=org/x: neither a folder nor .* gives \(org/x is private\)$"):
        model_folder("org/x")


def test_a_run_gets_advice_on_its_own_schedule(tmp_path: Path) -> None:
    words = ["rollout.placement=shared", "rollout.turn_s=60", "trainer.logger=[jsonl]"]
    with ExitStack() as stack:
        trackers = open_trackers(Plan(load(*words, f"trainer.default_local_dir={tmp_path}"), 20, None), stack)
        for step in range(10):
            trackers.log(step, {"rollout/iterations_waiting": 0.6})
    (found,) = read_lines(next(tmp_path.rglob("advice.jsonl")))
    assert found["advice"].startswith("turn_too_long: ")


@pytest.mark.parametrize(("chosen", "wants"), [("off", False), ("old", False), ("rollout", True)])
def test_servers_note_the_experts_of_tokens_only_for_a_run_that_wants_them(
    tmp_path: Path, chosen: str, wants: bool
) -> None:
    folder = write_tiny_model(tmp_path / "model", TinySizes(layers=2), family="mixtral", moe_intermediate_size=8)
    config = load(f"actor.router_replay={chosen}", f"model.path={folder}", "rollout.engine=hf")
    of = RoutedExperts(2, (0, 1), num_experts=4, chosen=2)
    assert engine_columns(config) == ((EngineRoutes(of, (1.0, 1.0, -1)),) if wants else ())
    narrowed = load(f"actor.router_replay={chosen}", f"model.path={folder}", "rollout.engine=hf", "rollout.top_p=0.9")
    num_ids = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    expected = (EngineSupport(0.9, -1, num_ids), EngineRoutes(of, (1.0, 0.9, -1)))
    assert engine_columns(narrowed) == (expected if wants else expected[:1])
    for trains in (False, True):
        (server,) = make_servers(config, "", trains=trains)._servers
        assert server.process.launch.returns_routes is (wants and trains)


@pytest.mark.parametrize(
    ("nnodes", "servers", "size", "placement", "first", "wanted"),
    [
        (2, 4, 2, "shared", None, [(0, 0), (0, 2), (1, 0), (1, 2)]),
        (2, 2, 1, "separate", 6, [(0, 6), (1, 6)]),
        (4, 2, 1, "shared", None, [(0, 0), (2, 0)]),
        (2, 3, 1, "shared", None, [(0, 0), (0, 1), (1, 0)]),
        (4, 2, 8, "shared", None, [(0, 1, 0), (2, 3, 0)]),  # each over two machines of four GPUs
        (2, 2, 8, "separate", None, [(0, 4), (1, 4)]),  # never over the trainer's
    ],
)
def test_servers_are_dealt_over_the_machines(
    nnodes: int, servers: int, size: int, placement: str, first: int | None, wanted: list[tuple[int, int]]
) -> None:
    config = Config()
    config.trainer.nnodes, config.trainer.n_gpus_per_node = nnodes, 4
    rollout = config.rollout
    rollout.num_servers, rollout.tensor_model_parallel_size = servers, size
    rollout.placement, rollout.first_gpu = placement, first
    assert [(*machines, gpu) for machines, gpu in placements(config, trains=True)] == wanted


@pytest.mark.parametrize(("call_s", "answer_s"), [(600.0, 600.0), (30.0, 180.0), (3600.0, 3600.0)])
def test_servers_get_the_time_to_load_and_may_be_busy_with_a_push_as_long_as_a_call_to_the_ranks_may_take(
    call_s: float, answer_s: float
) -> None:
    config = Config()
    config.rollout.start_timeout_s, config.rollout.max_restarts = 7200.0, 5
    config.trainer.call_timeout_s = call_s
    patience = Supervision(start_timeout_s=7200.0, answer_within_s=answer_s, max_restarts=5)
    assert supervision(config) == patience
    assert server_launch(config).longest_pause_s == call_s
    config.rollout.urls = ["http://a:1"]
    assert make_servers(config, "token")._patience == patience


@pytest.mark.parametrize(
    ("words", "trains", "reads"),
    [
        ([], True, False),
        ([], False, True),
        (["actor.lora.rank=4", "actor.lora.push=adapter"], True, True),
        (["rollout.quantization=fp8", "algorithm.rollout_correction.level=token"], True, True),
    ],
)
def test_servers_read_weights_only_if_no_push_brings_all_of_them(words: list[str], trains: bool, reads: bool) -> None:
    config = load("model.path=/m", "model.dtype=bfloat16", "rollout.engine=sglang", "trainer.device=cuda", *words)
    looked_at: list[str] = []
    with (
        mock.patch.object(servers_module, "model_folder", lambda path: path),
        mock.patch.object(servers_module, "check_for_sglang", looked_at.append),
    ):
        servers = make_servers(config, "token", trains=trains)
    assert looked_at == ["/m"] * reads
    assert [server.process.launch.reads_weights for server in servers._servers] == [reads]


def test_a_vocabulary_that_lacks_ids_of_the_tokenizer_is_refused() -> None:
    config = Config()
    config.model.path, config.model.config, config.model.tokenizer_path = "m", {"vocab_size": 152064}, "t"
    config.critic.model.path, config.critic.model.config = "c", {"vocab_size": 151936}
    check_ids(config, 151664)
    with pytest.raises(ValueError, match="^critic.model.path=c: its vocabulary has 151936 tokens, .* of t has ids up"):
        check_ids(config, 151936)
    with pytest.raises(ValueError, match="^model.path=m: its vocabulary has 152064 tokens, .* of t has ids up to 1520"):
        check_ids(config, 152064)


@pytest.mark.parametrize(
    ("words", "trains", "threads"),
    [
        ([], True, 6),
        (["rollout.num_servers=4"], True, 1),
        (["rollout.num_servers=3"], True, 2),
        (["rollout.ahead=1"], True, 1),
        (["rollout.ahead=1"], False, 6),
        (["trainer.eval_beside=true"], True, 1),
    ],
)
def test_a_server_of_ours_has_the_cores_unless_the_trainer_uses_them_too(
    words: list[str], trains: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    config, _ = load_config(["recipe=quickstart_grpo", *words])
    assert server_threads(config, trains=trains) == threads


def test_the_folder_of_a_very_small_preset_is_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft.train_files=[a.jsonl]", "model=qwen3_mini"]
    config, _ = load_config(words, command="sft")
    make_mini_model(config)
    assert capsys.readouterr().err.startswith("warning: model.path=runs/models/qwen3_mini: this model of random ")
    found = json.loads(Path("runs/models/qwen3_mini/config.json").read_text())
    assert (found["hidden_size"], found["vocab_size"], found["model_type"]) == (64, 256, "qwen3")
    make_mini_model(load_config(words, command="sft")[0])  # the folder is checked against the preset
    assert capsys.readouterr().err == ""
