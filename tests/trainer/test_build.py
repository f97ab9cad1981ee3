"""From the configuration to the parts of a run."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import huggingface_hub
import pytest
from config_helpers import load

from megarl.data.examples.tiny import write_tiny_model
from megarl.metrics.jsonl import read_lines
from megarl.processes import presence
from megarl.rollout.engine_routes import EngineRoutes
from megarl.rollout.engine_support import EngineSupport
from megarl.routed_experts import RoutedExperts
from megarl.trainer.build import engine_columns, make_group, make_servers, model_folder, start_trackers


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
    assert not group._setup["has_neighbours"]
    assert dict(group._environment) == ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if ordered else {})
    assert group._start_timeout_s == config.trainer.start_timeout_s == 600


@pytest.mark.parametrize(
    ("words", "beside"),
    [
        (["rollout.first_gpu=1", "rollout.memory_fraction=0.3"], True),
        (["rollout.first_gpu=2"], False),
        (["rollout.first_gpu=1", "rollout.placement=shared"], False),  # in turns
        (["rollout.urls=['https://a:1']"], False),
        (["actor.num_ranks=1", "rollout.first_gpu=1", "rollout.memory_fraction=0.3"], False),
    ],
)
def test_ranks_learn_of_servers_that_work_on_their_gpus_at_the_same_time(words: list[str], beside: bool) -> None:
    config = load("trainer.n_gpus_per_node=2", *words)
    assert make_group(config, config.actor, "ranks_0")._setup["has_neighbours"] == beside


def test_a_driver_shows_itself_while_a_model_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """That may take longer than trainer.driver_silence_s, and is no hang."""
    shown = threading.Event()
    monkeypatch.setattr(presence, "_EVERY_S", 0.01)
    monkeypatch.setattr(presence, "show_life", shown.set)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(shown.wait(600)) + name)
    assert model_folder("org/large") == "Trueorg/large", "it ends when the wait has shown itself"

    def refuse(name: str, **_: object) -> str:
        raise OSError(f"{name} is private\nask its owner")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ValueError, match=r"^model.path=org/x: neither a folder nor .* gives \(org/x is private\)$"):
        model_folder("org/x")


def test_a_run_gets_advice_on_its_own_schedule(tmp_path: Path) -> None:
    words = ["rollout.placement=shared", "rollout.turn_s=60", "trainer.logger=[jsonl]"]
    trackers = start_trackers(load(*words, f"trainer.default_local_dir={tmp_path}"), 20, None)
    for step in range(10):
        trackers.log(step, {"rollout/iterations_waiting": 0.6})
    trackers.close()
    (found,) = read_lines(next(tmp_path.rglob("advice.jsonl")))
    assert found["advice"].startswith("turn_too_long: ")


SMALL = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 16, "moe_intermediate_size": 8}


@pytest.mark.parametrize(("chosen", "wants"), [("off", False), ("old", False), ("rollout", True)])
def test_servers_note_the_experts_of_tokens_only_for_a_run_that_wants_them(
    tmp_path: Path, chosen: str, wants: bool
) -> None:
    folder = write_tiny_model(tmp_path / "model", family="mixtral", **SMALL)
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
