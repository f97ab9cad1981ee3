"""How the ranks of a group lie over machines, how they are started, and how they end."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from megarl.io.sockets import interface_of
from megarl.processes.ranks import (
    FIRST_GPU,
    OWN_ADDRESS,
    STORE,
    STORE_TOKEN,
    RanksLaunch,
    RanksProcess,
    Share,
    _environment,
    _world,
    shares,
)

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def workers_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize(
    ("first", "count", "per_node", "wanted"),
    [
        (0, 4, 4, [Share(0, 0, 0, 4)]),
        (0, 8, 4, [Share(0, 0, 0, 4), Share(1, 0, 4, 4)]),
        (6, 8, 8, [Share(0, 6, 0, 2), Share(1, 0, 2, 6)]),
        (16, 4, 8, [Share(2, 0, 0, 4)]),
        (3, 1, 4, [Share(0, 3, 0, 1)]),
        (1, 3, 1, [Share(1, 0, 0, 1), Share(2, 0, 1, 1), Share(3, 0, 2, 1)]),
    ],
)
def test_ranks_take_the_gpus_of_one_machine_after_the_other(
    first: int, count: int, per_node: int, wanted: list[Share]
) -> None:
    assert shares(first, count, per_node) == wanted


def test_each_rank_knows_its_number_and_where_the_store_is() -> None:
    launch = RanksLaunch("worker", "cuda", "logs", 6, 0, 2, 8, "10.0.0.2", "10.0.0.1:7", "the store's token")
    world = _world(launch, 1)
    assert (world["RANK"], world["LOCAL_RANK"], world["WORLD_SIZE"], world["LOCAL_WORLD_SIZE"]) == ("3", "1", "8", "6")
    assert (world[STORE], world[STORE_TOKEN], world[OWN_ADDRESS]) == ("10.0.0.1:7", "the store's token", "10.0.0.2")
    assert "the store's token" not in repr(launch)


def test_ranks_know_their_first_gpu_and_not_the_runs_token_and_a_users_variables_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one machine they listen on loopback unless the user chose an interface."""
    connections = "CUDA_DEVICE_MAX_CONNECTIONS"
    launch = RanksLaunch("worker", "cpu", "logs", 2, first_gpu=6, environment=((connections, "1"),))
    monkeypatch.setenv("MEGARL_TOKEN", "a secret of the whole run")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", connections):
        monkeypatch.delenv(name, raising=False)
    env = _environment(launch)
    assert (env[FIRST_GPU], env["CUDA_VISIBLE_DEVICES"], env[connections]) == ("6", "", "1")
    assert env["OMP_NUM_THREADS"] == str(max(1, (os.cpu_count() or 1) // 2))
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == (interface_of("127.0.0.1"), "eth7")
    assert "a secret of the whole run" not in env.values()
    monkeypatch.setenv(connections, "8")
    assert _environment(launch)[connections] == "8"


def test_when_a_rank_fails_the_others_are_ended_and_its_log_is_the_one_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = RanksLaunch("one_that_fails", "cpu", str(tmp_path), 3)
    ranks = RanksProcess(launch, "127.0.0.1:1", "no token")
    while ranks.exit_code() is None:
        time.sleep(0.01)
    assert ranks.exit_code() == 3, "that of the rank which failed; the others sleep"
    assert ranks.log == tmp_path / "rank_1.log"
    assert "the shelf is empty" in ranks.log_tail()
    ranks.end(1.0)  # the others would sleep for longer than this test may take
    monkeypatch.setattr("os.killpg", lambda *_: pytest.fail("these numbers may be other processes' by now"))
    ranks.end(1.0)


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Killed, it can tell nobody; and a rank that hangs in a call cannot see that its connection is closed."""
    script = f"""
        import sys, time
        from megarl.processes.ranks import RanksLaunch, RanksProcess
        from megarl.processes.channels.connection import greet
        from megarl.io.sockets import listen
        listener = listen("127.0.0.1")
        home = f"127.0.0.1:{{listener.getsockname()[1]}}"
        ranks = RanksProcess(RanksLaunch("one_that_hangs", "cpu", {str(tmp_path)!r}, 1), home, "a token")
        wire, _ = greet(listener.accept()[0], "a token")
        wire.send({{"id": 0, "method": "hang", "arguments": {{}}, "has_payload": False}})
        while not ranks.log.read_text():
            time.sleep(0.01)
        print(ranks.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    rank = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    rank.wait(240)
