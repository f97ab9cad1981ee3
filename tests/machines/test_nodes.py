"""Groups and servers over several machines: each is an agent on a loopback address of its own."""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from echo_messages import Double, Fail, Kill, Meet, Pid, Where

from megarl.arch.layout import Layout
from megarl.group import Group, GroupSettings, RankError
from megarl.io.auth import SERVER_VARIABLE
from megarl.machines import nodes as nodes_module
from megarl.machines.agent import Agent, DriverLost
from megarl.machines.nodes import NodeLost, Nodes, address_of, check_files
from megarl.servers.launch import TOKEN_VARIABLE, EngineLaunch
from megarl.servers.server_process import MachineGone

pytestmark = pytest.mark.dist
WORKERS = Path(__file__).parents[1] / "helpers"  # echo_worker
TOKEN = "the secret of these tests"
HOST = re.escape(socket.gethostname())


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """The worker is found by PYTHONPATH; what agents set in this process is gone afterwards."""
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(WORKERS), prepend=os.pathsep)
        yield


AGENTS = ThreadPoolExecutor(8)


def start_agent(node: int, port: int | Callable[[], str], token: str = TOKEN) -> Future[None]:
    """An agent in a thread; `port`: of the driver, or how the agent finds its address."""
    address = port if callable(port) else f"127.0.0.1:{port}"
    agent = Agent(node, address, token, source=f"127.0.0.{node + 1}", workers=("echo_worker", "no_such_worker"))
    return AGENTS.submit(agent.serve, join_s=5.0)


def ended(agent: Future[None]) -> DriverLost | None:
    error = agent.exception(30)
    assert error is None or isinstance(error, DriverLost)
    return error


@contextmanager
def machines(count: int, ranks_per_node: int) -> Iterator[tuple[Nodes, list[Future[None]]]]:
    with Nodes(count, ranks_per_node, "127.0.0.1", 0, TOKEN) as nodes:
        agents = [start_agent(node, nodes.port) for node in range(1, count)]
        nodes.wait(limit_s=20)
        yield nodes, agents


@pytest.fixture(scope="module")
def two() -> Iterator[Nodes]:
    with machines(2, 2) as (nodes, agents):
        yield nodes
    assert [ended(agent) for agent in agents] == [None], "sent away, it ends well"


@pytest.fixture(scope="module")
def four(two: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two replicas of two ranks, one on each machine."""
    logs = tmp_path_factory.mktemp("logs")
    settings = GroupSettings(device="cpu", worker="echo_worker")
    with Group("four", 4, Layout(tp=2), settings, log_dir=logs, nodes=two) as group:
        group.start()
        yield group
    logs_by_machine = sorted(str(log.relative_to(logs)) for log in logs.glob("node_*/*.log"))
    assert logs_by_machine == [f"node_{rank // 2}/rank_{rank}.log" for rank in range(4)]


@pytest.mark.full
def test_tensors_go_to_ranks_of_both_machines_and_come_back(four: Group) -> None:
    replies = four.call(Double("héllo"), [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0])}])
    assert [reply.result for reply in replies] == [{"rank": 1, "said": "héllo"}, {"rank": 3, "said": "héllo"}]
    assert [reply.tensors["x"].tolist() for reply in replies] == [[2.0, 4.0], [6.0]]
    assert four.call_leader(Double()).result["rank"] == 0


def test_an_exception_on_the_other_machine_has_its_rank(four: Group) -> None:
    where = rf"rank 3 \(machine 1, host {HOST}, pid [0-9]+\)"
    with pytest.raises(RankError, match=rf"group four: {where} failed in fail: Ru"):
        four.call(Fail(3, "runtime"))
    assert [reply.result["rank"] for reply in four.call(Double())] == [1, 3], "ranks that answered go on"


def of_workers(name: str, ranks: int, nodes: Nodes, logs: Path, worker: str = "echo_worker", first: int = 0) -> Group:
    settings = GroupSettings(device="cpu", worker=worker)
    return Group(name, ranks, Layout(), settings, log_dir=logs, nodes=nodes, first_rank=first)


@pytest.mark.full
def test_a_group_takes_a_range_of_ranks_across_the_machines(two: Nodes, tmp_path: Path) -> None:
    """The last GPU of the first machine and the first of the second; the rest is another group's."""
    with of_workers("middle", 2, two, tmp_path, first=1) as group:
        group.start()
        found = [reply.result for reply in group.call(Where())]
    assert found == [{"rank": 0, "first_gpu": 1, "local_rank": 0}, {"rank": 1, "first_gpu": 0, "local_rank": 0}]


@pytest.mark.full
def test_a_rank_that_is_killed_over_there_is_noticed(two: Nodes, tmp_path: Path) -> None:
    """On the second machine alone, where ranks of this group meet too."""
    died = rf"group far: rank 1 \(machine 1, host {HOST}, pid .*\) died in kill; see "
    with of_workers("far", 2, two, tmp_path, first=2) as group:
        group.start()
        with pytest.raises(RankError, match=died):
            group.call(Kill(1))


@pytest.mark.full
def test_ranks_that_cannot_start_over_there_are_named(two: Nodes, tmp_path: Path) -> None:
    ended = rf"none: its ranks on machine [01] \(host {HOST}\) ended with status 1; see "
    with of_workers("none", 4, two, tmp_path, "no_such_worker") as group, pytest.raises(RankError, match=ended):
        group.start()


@pytest.mark.full
def test_a_machine_that_is_lost_takes_its_processes_with_it_and_may_come_back(tmp_path: Path) -> None:
    with machines(2, 1) as (nodes, (agent,)):
        with of_workers("two", 2, nodes, tmp_path) as group:
            group.start()
            pids = [psutil.Process(pid) for pid in [process.pid for process in group._processes]]
            nodes._members[1].connection.close()  # as when the cable is pulled
            lost = rf"group two: machine 1 \(host {HOST}\) is lost in double with ranks 1 to 1: "
            with pytest.raises(RankError, match=lost):
                for _ in range(100):
                    group.call(Double())
        assert "is lost" in str(ended(agent))
        assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in pids)
        with pytest.raises(NodeLost, match=rf"machine 1 \(host {HOST}\) at 127.0.0.2 is lost"):
            nodes.address(1)
        with pytest.raises(MachineGone):
            nodes.machine(1).free_ports(["127.0.0.2"])
        again = start_agent(1, nodes.port)
        nodes.wait(limit_s=20)
        assert nodes.address(1) == "127.0.0.2"
    assert ended(again) is None


@pytest.mark.full
def test_a_hung_rank_over_there_shows_its_stack_and_is_killed(two: Nodes, tmp_path: Path) -> None:
    """One is stopped, the other waits for it in a collective."""
    with of_workers("hung", 2, two, tmp_path, first=2) as group:
        group.start()
        pids = [reply.result["pid"] for reply in group.call(Pid())]
        both = rf"rank 0 \(machine 1, host {HOST}, pid {pids[0]}\), rank 1 .* did not end"
        with pytest.raises(RankError, match=both):
            group.call(Meet(stopped=0), timeout_s=2.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    stopped, waits = ((tmp_path / f"rank_{rank}.log").read_text() for rank in range(2))
    assert f"pid {pids[0]} is killed. It has no whole stacks to show: it is stopped" in stopped
    assert "in barrier" in waits


def test_a_spare_machine_takes_the_place_of_a_lost_one_which_may_come_back_as_a_spare() -> None:
    told: list[str] = []
    with Nodes(2, 1, "127.0.0.1", 0, TOKEN, spares=1) as nodes:
        agents = [start_agent(node, nodes.port) for node in (2, 1)]
        nodes.wait(limit_s=20, on_replaced=told.append)
        assert nodes.address(1) == "127.0.0.2", "a spare machine takes no place that is nobody's yet"
        while not nodes._spares:
            time.sleep(0.01)
        first = nodes._members[1]
        first.connection.close()
        assert "is lost" in str(ended(agents[1]))
        while not first.lost:
            time.sleep(0.01)
        nodes.wait(limit_s=20, on_replaced=told.append)
        assert nodes.address(1) == "127.0.0.3"
        assert re.fullmatch(rf"machine 1 \(host {HOST}\) takes the place of host {HOST}, which is lost", told[0])
        assert nodes.machine(1).free_ports(["127.0.0.3"])
        assert "trainer.node_rank=2: that machine is here already" in str(ended(start_agent(2, nodes.port)))
        agents.append(start_agent(1, nodes.port))
        while not nodes._spares:
            time.sleep(0.01)
        assert nodes.address(1) == "127.0.0.3"
    assert [ended(agents[0]), ended(agents[2])] == [None, None]
    assert len(told) == 1


def test_runs_that_name_no_port_get_different_ones_and_agents_find_theirs(tmp_path: Path) -> None:
    """The second run finds the usual port taken, and its agent at first the port of a run that has ended."""
    one, two = tmp_path / "one", tmp_path / "two"
    with (
        Nodes(2, 1, "127.0.0.1", None, "another run's token") as first,
        Nodes(2, 1, "127.0.0.1", None, TOKEN) as second,
    ):
        assert first.port != second.port
        nodes_module.announce(one, first.port)
        nodes_module.announce(two, first.port)
        agent = start_agent(1, lambda: f"127.0.0.1:{nodes_module.announced(two)}")
        time.sleep(0.2)  # most likely it has tried by then
        nodes_module.announce(two, second.port)
        second.wait(limit_s=20)
        assert second.address(1) == "127.0.0.2"
    assert ended(agent) is None
    nodes_module.forget(two)
    nodes_module.forget(two)
    with pytest.raises(OSError):
        nodes_module.announced(two)


@pytest.mark.full
def test_a_server_of_another_machine_is_started_watched_and_ended_there(
    two: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the servers' own key, where they have one, as the driver's clients do."""
    monkeypatch.setenv(SERVER_VARIABLE, "the key of the servers")
    machine = two.machine(1)
    (port,) = machine.free_ports(["127.0.0.2"])
    launch = EngineLaunch("hf", "/no/such/model", host="127.0.0.2", port=port)
    log = tmp_path / "server.log"
    server = machine.start(launch, "not used there", log)
    deadline = time.monotonic() + 60
    # The system fills it in a moment after the start, and it is the agent's until then.
    while TOKEN_VARIABLE not in (environment := psutil.Process(server.pid).environ()):
        assert time.monotonic() < deadline
    assert environment[TOKEN_VARIABLE] == "the key of the servers"
    while server.exit_code() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.exit_code() == 2, "it refuses a folder that is not there"
    assert "/no/such/model" in server.log_tail()
    assert "/no/such/model" in log.read_text()
    server.end(0)


def test_an_agent_is_refused_with_a_reason(two: Nodes) -> None:
    assert "has another token" in str(ended(start_agent(1, two.port, token="not the secret of these")))
    assert "trainer.node_rank=1: that machine is here already" in str(ended(start_agent(1, two.port)))
    assert "this run has machines 0 to 1" in str(ended(start_agent(2, two.port)))


def test_a_node_that_does_not_come_is_named() -> None:
    told: list[str] = []
    absent = pytest.raises(NodeLost, match=r"machines \[1, 2\] of 3 at 127.0.0.1:\d+ did not come")
    with Nodes(3, 1, "127.0.0.1", 0, TOKEN) as nodes, absent:
        nodes.wait(limit_s=0.3, on_wait=told.append)
    where = rf"waiting for machines \[1, 2\] of 3 at 127.0.0.1:{nodes.port}, until \d\d:\d\d"
    assert len(told) == 1 and re.fullmatch(where, told[0])


def test_the_driver_needs_a_file_for_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
    check_files(50, 8)
    with pytest.raises(ValueError, match="trainer.nnodes=1000: node 0 may open 4096 files; expected .* of 40512"):
        check_files(1000, 8)


def test_the_driver_listens_at_one_free_address_of_its_own_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with Nodes(2, 1, "127.0.0.1", 0, TOKEN) as nodes:
        assert nodes._listener._listener.getsockname()[0] == "127.0.0.1"
        refused = {
            ("203.0.113.9", 0): "trainer.master_addr=203.0.113.9 .*expected an address of this machine",
            ("127.0.0.1", nodes.port): f"trainer.master_port={nodes.port}: Address already in use.*; expected .* a fr",
            # Images of Debian's kind map the own name to it: the others would wait for a machine that hears nobody.
            ("node-0", 0): "trainer.master_addr=node-0: on this machine the name means 127.0.1.1, which",
        }
        for (address, port), words in refused.items():
            with monkeypatch.context() as patch, pytest.raises(ValueError, match=words):
                if address == "node-0":
                    patch.setattr(nodes_module, "address_of", lambda name, limit_s: "127.0.1.1")
                Nodes(2, 1, address, port, TOKEN).__enter__()


@pytest.mark.full
def test_a_name_that_is_not_known_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a pod in its first seconds."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def late(host: str, *more: Any, **options: Any) -> Any:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1" if host == "megarl-mine-0.megarl-mine" else host, *more, **options)

    monkeypatch.setattr(nodes_module, "_ASK_S", 0.01)
    monkeypatch.setattr("socket.getaddrinfo", late)
    assert address_of("megarl-mine-0.megarl-mine", limit_s=60.0) == "127.0.0.1"
    assert len(asked) == 3
    asked.clear()
    monkeypatch.setattr(nodes_module, "_NAME_S", 0.0)
    with pytest.raises(ValueError, match=r"trainer.master_addr=nowhere: Name or service not known; expected an addr"):
        Nodes(2, 1, "nowhere", None, TOKEN).__enter__()
