"""What stays when ranks are started again."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megarl.config import Config, resolved
from megarl.group import RankError
from megarl.group.failures import OutOfMemory, PortsBlocked
from megarl.machines.nodes import NodeLost
from megarl.servers.server_process import MachineGone
from megarl.servers.supervisor import ServerDied, Servers
from megarl.trainer import infrastructure as site_module
from megarl.trainer.infrastructure import Infrastructure
from megarl.trainer.servers import colocation as colocation_module

DIED = RankError("rank 3 died", report="what rank 3 said")


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
    infrastructure = Infrastructure(config_of(tmp_path, max_restarts=2))
    for step in (7, 7, 8, 5):
        infrastructure.allow_restart(DIED, step)
    with pytest.raises(RankError, match="rank 3 died"):
        infrastructure.allow_restart(DIED, 8)
    said = capsys.readouterr().err
    assert "warning: rank 3 died" in said
    counts = ["1 of 2", "2 of 2", "1 of 2", "2 of 2"]
    assert [line.partition("(")[2][:6] for line in said.splitlines() if "started again" in line] == counts
    for number in (1, 2, 3, 4):
        assert "what rank 3 said" in (tmp_path / f"run/logs/restart_{number}.txt").read_text()


def test_where_memory_ended_ranks_start_again_once_at_most(tmp_path: Path) -> None:
    infrastructure = Infrastructure(config_of(tmp_path, max_restarts=3))
    killed = OutOfMemory("rank 3 died, killed (oom_kill of this cgroup 0 -> 1)")
    infrastructure.allow_restart(killed, 5)
    with pytest.raises(OutOfMemory):
        infrastructure.allow_restart(killed, 5)


def test_ports_that_were_blocked_from_the_start_stay_so(tmp_path: Path) -> None:
    blocked = PortsBlocked("10.0.0.2:41000 cannot be reached from here")
    infrastructure = Infrastructure(config_of(tmp_path, max_restarts=3))
    with pytest.raises(PortsBlocked):
        infrastructure.allow_restart(blocked, 0)
    infrastructure.allow_restart(DIED, 7)
    infrastructure.allow_restart(blocked, 7)


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
    infrastructure.allow_restart(DIED, 7)
    (report,) = {*tmp_path.glob("megarl_restart_1_*.txt")} - {trap}
    assert victim.read_text() == "of somebody"
    assert report.stat().st_mode & 0o077 == 0
    assert report.read_text().endswith("what rank 3 said")
    assert f"{logs}/restart_1.txt could not be written (File exists); all of it: {report}" in capsys.readouterr().err


def test_failures_are_forgiven_by_default_where_there_are_checkpoints(tmp_path: Path) -> None:
    config = resolved(config_of(tmp_path))
    with pytest.raises(RankError):
        Infrastructure(config).allow_restart(DIED, 9)
    config.trainer.save_freq, config.trainer.max_restarts = 5, None
    Infrastructure(resolved(config)).allow_restart(DIED, 9)


def test_several_machines_want_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGARL_TOKEN", "MEGARL_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="trainer.nnodes=2: the machines of a run must know each other: expected the"):
        Infrastructure(config_of(tmp_path, nnodes=2))


def test_servers_for_which_the_machine_has_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = resolved(Config())
    config.model.path, config.rollout.engine = "/", "sglang"
    config.trainer.n_gpus_per_node, config.rollout.num_servers = 7, 1
    Infrastructure(config)
    config.rollout.num_servers = 2
    with pytest.raises(ValueError, match="^rollout.placement=separate: server 1 would take GPUs 8 to 8 of .* has 8; "):
        Infrastructure(config)
    Infrastructure(config, trains=False)
    Infrastructure(config, serves=False)
    config.rollout.urls = ["http://elsewhere:30000"]
    Infrastructure(config)


def fake(error: Exception | None = None) -> Any:
    """Servers, or a router, that do nothing, or fail at their start."""
    found = mock.MagicMock()
    found.__enter__.return_value = found
    found.start.side_effect = error
    return found


def ended(part: Any) -> bool:
    return part.__exit__.called or part.stop.called


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is made when servers, and then a router, are."""
    found: list[Any] = []
    for maker in ("make_servers", "Router"):
        monkeypatch.setattr(site_module, maker, lambda *_, **__: found.pop(0))
    return found


def test_a_machine_that_goes_while_servers_start_is_one_sentence_and_they_may_start_again(
    tmp_path: Path, made: list[Any]
) -> None:
    first, second = fake(MachineGone("node 1 is lost")), fake()
    made += [first, second]
    with Infrastructure(config_of(tmp_path)) as infrastructure:
        with pytest.raises(NodeLost, match=r"^servers could not be started: node 1 is lost$"):
            infrastructure.serve()
        assert ended(first)
        assert infrastructure.serve() is second
        assert not ended(second)
    assert ended(second)


@pytest.mark.parametrize("waits", [False, True])
def test_servers_that_are_spawned_before_are_waited_for_and_end_with_the_run_even_if_nobody_waits(
    tmp_path: Path, made: list[Any], waits: bool
) -> None:
    servers = fake()
    made.append(servers)
    with Infrastructure(config_of(tmp_path)) as infrastructure:
        infrastructure.spawn_servers()
        assert not waits or infrastructure.serve() is servers
        infrastructure.spawn_servers()
        assert servers.spawn.call_count == 1
        assert not ended(servers)
    assert ended(servers)


def test_the_router_is_watched_with_the_servers_and_looked_at_whenever_they_are(
    tmp_path: Path, made: list[Any]
) -> None:
    parts = servers, router = fake(), fake()
    made += parts
    config = config_of(tmp_path)
    config.rollout.router = True
    with Infrastructure(config) as infrastructure:
        infrastructure.serve()
        servers.watch_too.assert_called_once_with(router.check)
    assert ended(servers) and ended(router)
    router.check.side_effect = ServerDied("the router ended")
    real = Servers([], "token", "/nowhere")
    assert real.poll() == []
    real.watch_too(router.check)
    with pytest.raises(ServerDied, match="the router ended"):
        real.poll()
    real.stop()


def test_what_a_server_had_released_is_forgotten_when_it_is_revived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock SGLang ends if it is to take back memory that it has not released."""
    config = config_of(tmp_path)
    config.rollout.placement = "shared"
    monkeypatch.setattr(site_module, "check_gpus", lambda *_, **__: None)
    infrastructure, asked = Infrastructure(config), list[str]()
    servers = SimpleNamespace(urls=["http://127.0.0.1:1", "http://127.0.0.1:2"], pids=[11, 12])
    servers.revive = lambda: servers.pids.__setitem__(1, 99) or []  # the second starts again
    infrastructure._servers = servers  # type: ignore[assignment]
    monkeypatch.setattr(colocation_module, "ServerClient", lambda url, *_, **__: asked.append(url) or mock.MagicMock())
    for url in servers.urls:
        infrastructure.colocation.release_memory(url)
    infrastructure.serve()
    del asked[:]
    for url in servers.urls:
        infrastructure.colocation.resume_memory(url)
    assert asked == servers.urls[:1]


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
