"""A driver whose main thread hangs ends itself, and the other machines end with it."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from megarl.machines.agent import Agent, DriverLost
from megarl.machines.nodes import NodeLost, Nodes
from megarl.processes import watchdog
from megarl.servers.external import RunningServer
from megarl.servers.server_process import ServerDied

DRIVER = Path(__file__).parent / "one_that_drives.py"
TOKEN = "the secret of these tests"
LIMIT_S = 3.0  # the loop of the driver shows itself ten times a second
STACKS = {"lock": "in waits_for_a_lock", "python": "in keeps_the_lock_of_python"}


@pytest.mark.full
def test_a_driver_that_hangs_ends_with_its_stacks_and_its_agents_do_not_wait_for_ever() -> None:
    """In a lock, where the threads that tell the others that it is there go on, and in a library that stops all.

    Before, its waits are as long as they like.
    """
    with ThreadPoolExecutor(len(STACKS)) as threads, ExitStack() as stack:
        drivers = {}
        for kind in STACKS:
            command = [sys.executable, str(DRIVER), str(LIMIT_S), kind]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            drivers[kind] = stack.enter_context(process)
            stack.callback(process.kill)
        agents = {}
        for kind, process in drivers.items():
            assert process.stdout is not None
            agent = Agent(1, f"127.0.0.1:{int(process.stdout.readline())}", TOKEN, silence_s=600.0)
            agents[kind] = threads.submit(agent.serve)
        for kind, process in drivers.items():
            out, said = process.communicate(timeout=200)
            assert (process.returncode, out) == (1, "goes on\n"), said
            assert said.startswith("Timeout (0:00:03)!\n")
            assert STACKS[kind] in said
            with pytest.raises(DriverLost, match=r"^the driver at 127\.0\.0\.1:"):
                agents[kind].result(200)  # long before its own limit of silence


def test_only_the_thread_that_drives_shows_itself() -> None:
    with watchdog.watch(600.0):
        watchdog._shown = before = time.monotonic() - 10.0  # as after ten seconds
        with ThreadPoolExecutor(1) as threads:
            threads.submit(watchdog.heartbeat).result()
            assert watchdog._shown == before
        watchdog.heartbeat()
        assert watchdog._shown > before
    watchdog._shown = before
    watchdog.heartbeat()
    assert watchdog._shown == before, "nobody is watched any more"


@pytest.mark.parametrize("what", ["machines", "a server"])
def test_a_driver_that_waits_shows_itself(what: str) -> None:
    with watchdog.watch(600.0):
        watchdog._shown = before = time.monotonic() - 10.0
        if what == "machines":
            with Nodes(2, 1, "127.0.0.1", 0, TOKEN) as nodes, pytest.raises(NodeLost):
                nodes.wait(limit_s=0.0)
        else:
            server = RunningServer("http://127.0.0.1:9", TOKEN, 0)  # where nobody listens
            server.spawn()
            with pytest.raises(ServerDied):
                server.wait_until_serving(0.1)
        assert watchdog._shown > before


def test_a_wait_for_others_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = threading.Event()
    monkeypatch.setattr(watchdog, "_EVERY_S", 0.01)
    monkeypatch.setattr(watchdog, "heartbeat", shown.set)
    with ThreadPoolExecutor(1) as threads:
        watchdog.wait_for([job := threads.submit(shown.wait, 200.0)])
    assert job.result(), "it ends when the wait has shown itself"
