"""What stays when ranks are started again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from megarl.config import Config, load_config, resolved
from megarl.config.placement import placements
from megarl.group import RankError
from megarl.machines import NodeLost
from megarl.rollout.client import ServerClient
from megarl.servers.server_process import MachineGone
from megarl.servers.supervisor import ServerDied, Servers, Supervision
from megarl.trainer import build as build_module
from megarl.trainer import infrastructure as site_module
from megarl.trainer.build import (
    check_ids,
    make_servers,
    server_launch,
    server_threads,
    supervision,
)
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.servers import colocation as colocation_module


def config_of(tmp_path: Path, **trainer: object) -> Config:
    config = Config()
    config.trainer.default_local_dir = str(tmp_path)
    for name, value in trainer.items():
        setattr(config.trainer, name, value)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return config


def test_so_many_failures_without_a_new_step_are_forgiven_and_the_next_one_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that were made before, and again after a restart, are no progress."""
    infrastructure, error = (
        Infrastructure(config_of(tmp_path, max_restarts=2)),
        RankError("rank 3 died", report="what rank 3 said"),
    )
    for step in (7, 7, 8, 5):
        infrastructure.forgive(error, step)
    with pytest.raises(RankError, match="rank 3 died"):
        infrastructure.forgive(error, 8)
    said = capsys.readouterr().err
    assert "warning: rank 3 died" in said
    counts = ["1 of 2", "2 of 2", "1 of 2", "2 of 2"]
    assert [line.partition("(")[2][:6] for line in said.splitlines() if "started again" in line] == counts
    for number in (1, 2, 3, 4):
        assert "what rank 3 said" in (tmp_path / f"run/logs/restart_{number}.txt").read_text()


def test_a_report_that_cannot_be_written_does_not_stop_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk.  A link under a name that others can guess leads it nowhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trap, victim = tmp_path / f"megarl_restart_1_{os.getpid()}.txt", tmp_path / "somebody's file"
    victim.write_text("of somebody")
    trap.symlink_to(victim)
    infrastructure = Infrastructure(config_of(tmp_path, max_restarts=1))
    logs = tmp_path / "run" / "logs"
    logs.rmdir()
    logs.touch()
    infrastructure.forgive(RankError("rank 3 died", report="what rank 3 said"), 7)
    (report,) = {*tmp_path.glob("megarl_restart_1_*.txt")} - {trap}
    assert victim.read_text() == "of somebody"
    assert report.stat().st_mode & 0o077 == 0
    assert report.read_text().endswith("what rank 3 said")
    assert f"{logs}/restart_1.txt could not be written (File exists); all of it: {report}" in capsys.readouterr().err


def test_failures_are_forgiven_by_default_where_there_are_checkpoints(tmp_path: Path) -> None:
    config = resolved(config_of(tmp_path))
    with pytest.raises(RankError):
        Infrastructure(config).forgive(RankError("rank 3 died"), 9)
    config.trainer.save_freq, config.trainer.max_restarts = 5, None
    Infrastructure(resolved(config)).forgive(RankError("rank 3 died"), 9)


def test_several_machines_want_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGARL_TOKEN", "MEGARL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ValueError, match=r"trainer.nnodes=2: the machines of a run must know each other: expected the run's"
    ):
        Infrastructure(config_of(tmp_path, nnodes=2))


@pytest.mark.parametrize(
    ("nnodes", "servers", "size", "placement", "first", "wanted"),
    [
        (1, 2, 1, "separate", None, [(0, 4), (0, 5)]),
        (1, 2, 2, "shared", None, [(0, 0), (0, 2)]),
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


def test_servers_for_which_the_machine_has_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = resolved(Config())
    config.model.path, config.rollout.engine = "/", "sglang"
    config.trainer.n_gpus_per_node, config.rollout.num_servers = 7, 1
    Infrastructure(config)
    config.rollout.num_servers = 2
    with pytest.raises(
        ValueError,
        match=r"^rollout.placement=separate: server 1 would take GPUs 8 to 8 of a machine that has 8; use",
    ):
        Infrastructure(config)
    Infrastructure(config, trains=False)
    Infrastructure(config, serves=False)
    config.rollout.urls = ["http://elsewhere:30000"]
    Infrastructure(config)


def test_servers_get_the_time_to_load_that_the_settings_give() -> None:
    config = Config()
    config.rollout.start_timeout_s, config.rollout.max_restarts = 7200.0, 5
    assert supervision(config) == Supervision(start_timeout_s=7200.0, answer_within_s=600.0, max_restarts=5)
    config.rollout.urls = ["http://a:1"]
    assert make_servers(config, "token")._patience == supervision(config)


@pytest.mark.parametrize(("call_s", "answer_s"), [(30.0, 180.0), (3600.0, 3600.0)])
def test_a_server_may_be_busy_with_a_push_as_long_as_a_call_to_the_ranks_may_take(
    call_s: float, answer_s: float
) -> None:
    config = Config()
    config.trainer.call_timeout_s = call_s
    assert supervision(config).answer_within_s == answer_s
    assert server_launch(config).longest_pause_s == call_s


@pytest.mark.parametrize(
    ("changes", "trains", "reads"),
    [({}, True, False), ({}, False, True), ({"lora": "adapter"}, True, True), ({"quantization": "fp8"}, True, True)],
)
def test_servers_read_weights_only_if_no_push_brings_all_of_them(
    changes: dict[str, str], trains: bool, reads: bool
) -> None:
    config = Config()
    config.model.path, config.rollout.engine, config.trainer.device = "/m", "sglang", "cuda"
    config.rollout.quantization = changes.get("quantization", "none")
    if "lora" in changes:
        config.actor.lora.rank, config.actor.lora.push = 4, changes["lora"]
    with mock.patch.object(build_module, "model_folder", lambda path: path):
        servers = make_servers(resolved(config), "token", trains=trains)
    assert [server.process.launch.reads_weights for server in servers._servers] == [reads]


class Fake:
    """Servers and a router that do nothing, or fail at their start."""

    def __init__(self, *_: object, error: Exception | None = None, **__: object) -> None:
        self.error, self.ended, self.spawned = error, False, 0
        self.checks: list[object] = []

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True

    def spawn(self) -> None:
        self.spawned += 1

    def stop(self) -> None:
        self.ended = True

    def start(self, *_: object) -> None:
        if self.error is not None:
            raise self.error

    def check(self) -> None:
        raise ServerDied("the router ended")

    def watch_too(self, check: object) -> None:
        self.checks.append(check)


def test_a_machine_that_goes_while_servers_start_is_one_sentence_and_they_may_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [Fake(error=MachineGone("node 1 is lost")), Fake()]
    monkeypatch.setattr(site_module, "make_servers", lambda *_, **__: made.pop(0))
    first, second = made
    with Infrastructure(config_of(tmp_path)) as infrastructure:
        with pytest.raises(NodeLost, match=r"^servers could not be started: node 1 is lost$"):
            infrastructure.serve()
        assert first.ended
        assert infrastructure.serve() is second  # type: ignore[comparison-overlap]
        assert not second.ended
    assert second.ended


def test_servers_that_are_spawned_before_are_waited_for_and_end_with_the_run_even_if_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, config = Fake(), config_of(tmp_path)
    monkeypatch.setattr(site_module, "make_servers", lambda *_, **__: servers)
    with Infrastructure(config) as infrastructure:
        infrastructure.spawn_servers()
        infrastructure.spawn_servers()
        assert servers.spawned == 1
    assert servers.ended
    servers.ended = False
    with Infrastructure(config) as infrastructure:
        infrastructure.spawn_servers()
        assert infrastructure.serve() is servers  # type: ignore[comparison-overlap]
        infrastructure.spawn_servers()
        assert servers.spawned == 2
        assert not servers.ended
    assert servers.ended


def test_the_router_is_watched_with_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers, router = Fake(), Fake()
    monkeypatch.setattr(site_module, "make_servers", lambda *_, **__: servers)
    monkeypatch.setattr(site_module, "Router", lambda *_, **__: router)
    config = config_of(tmp_path)
    config.rollout.router = True
    with Infrastructure(config) as infrastructure:
        infrastructure.serve()
        assert servers.checks == [router.check]
    assert servers.ended
    assert router.ended


def test_what_the_servers_are_reached_through_is_looked_at_whenever_they_are() -> None:
    servers = Servers([], "token", "/nowhere")
    assert servers.poll() == []
    servers.watch_too(Fake().check)
    with pytest.raises(ServerDied, match="the router ended"):
        servers.poll()
    servers.stop()


def test_a_vocabulary_that_lacks_ids_of_the_tokenizer_is_refused() -> None:
    config = Config()
    config.model.path, config.model.config, config.model.tokenizer_path = "m", {"vocab_size": 152064}, "t"
    config.critic.model.path, config.critic.model.config = "c", {"vocab_size": 151936}
    check_ids(config, 151664)
    with pytest.raises(
        ValueError, match=r"^critic.model.path=c: its vocabulary has 151936 tokens, and the tokenizer of t has ids up t"
    ):
        check_ids(config, 151936)


class Revived:
    """Servers of which `revive` starts the second again."""

    def __init__(self) -> None:
        self.urls, self.pids = ["http://127.0.0.1:1", "http://127.0.0.1:2"], [11, 12]

    def revive(self) -> list[str]:
        self.pids[1] = 99
        return []


def test_what_a_server_had_released_is_forgotten_when_it_is_revived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock SGLang ends if it is to take back memory that it has not released."""
    config = config_of(tmp_path)
    config.rollout.placement = "shared"
    monkeypatch.setattr(site_module, "check_gpus", lambda *_, **__: None)
    infrastructure, servers = Infrastructure(config), Revived()
    asked: list[str] = []
    monkeypatch.setattr(
        colocation_module, "ServerClient", lambda url, *_, **__: asked.append(url) or mock.create_autospec(ServerClient)
    )
    for url in servers.urls:
        infrastructure.colocation.release_memory(url)
    infrastructure._servers = servers  # type: ignore[assignment]
    infrastructure.serve()
    del asked[:]
    for url in servers.urls:
        infrastructure.colocation.resume_memory(url)
    assert asked == ["http://127.0.0.1:1"]


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


@pytest.mark.parametrize(("device", "during"), [("cpu", 1), ("cuda", 2)])
def test_without_gpus_the_driver_leaves_the_cores_to_ranks_and_servers(
    tmp_path: Path, device: str, during: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Infrastructure(config_of(tmp_path, device=device), serves=False):
            assert torch.get_num_threads() == during
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
