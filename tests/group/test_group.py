"""Calls, answers and failures of a Group, with real processes; and what a stranger on their machine achieves."""

import base64
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import torch
from echo_messages import Double, Fail, Gradient, Hang, Kill, Meet, Pid, Where
from small_cgroup import small_cgroup
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
)

from megarl.arch.layout import Layout
from megarl.group import Group, GroupSettings, RankError
from megarl.group import group as group_module
from megarl.io.durable_files import StorageError
from megarl.io.sockets import listen
from megarl.processes import watchdog

pytestmark = pytest.mark.dist
HELPERS = Path(__file__).parents[1] / "helpers"  # echo_worker
HERE = f"machine 0, host {re.escape(socket.gethostname())}, pid [0-9]+"
STRANGER = 65534  # user and group: nobody
HANG_S = 60  # of the worker's `hang`
SILENCE_S = 6.0  # three heartbeats


@pytest.fixture(scope="module", autouse=True)
def surroundings() -> Iterator[None]:
    """The worker is found by PYTHONPATH, and ranks that hang are killed a second after they are asked to end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HELPERS), prepend=os.pathsep)
        patch.setattr(group_module, "END_S", 1.0)
        yield


def make(tmp: Path, name: str, ranks: int, tp: int, **limits: float) -> Group:
    settings = GroupSettings(device="cpu", worker="echo_worker", **limits)
    return Group(name, ranks, Layout(tp=tp), settings, log_dir=tmp / name)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def four(logs: Path) -> Iterator[Group]:
    """Two replicas of two ranks.  The last test that uses them leaves them dead."""
    with make(logs, "four", 4, 2, silence_s=SILENCE_S) as group:
        group.start()
        yield group


def test_each_replica_gets_its_tensors_and_its_reporter_answers(four: Group) -> None:
    payloads = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0])}]
    replies = four.call(Double("héllo"), payloads)
    assert four.num_replicas == 2
    assert [r.result for r in replies] == [{"rank": 1, "said": "héllo"}, {"rank": 3, "said": "héllo"}]
    assert [r.tensors["x"].tolist() for r in replies] == [[2.0, 4.0], [6.0]]
    assert four.call_leader(Double()).result["rank"] == 0


def test_a_driver_that_waits_for_ranks_shows_itself(four: Group) -> None:
    with watchdog.watch(600.0):
        watchdog._shown = before = time.monotonic() - 10.0  # as after ten seconds
        four.call(Double())
        assert watchdog._shown > before


def test_an_exception_on_one_rank_reaches_the_driver_with_its_rank(four: Group) -> None:
    with pytest.raises(
        RankError, match=r"group four: rank 2 \(machine 0, .*\) failed in fail: RuntimeError: the shelf is empty"
    ) as caught:
        four.call(Fail(2, "runtime"))
    assert "in fail" in caught.value.report, "the remote traceback comes along"
    assert four.call_leader(Double()).result["rank"] == 0, "ranks that answered go on"
    # torch's CheckpointException is no exception
    with pytest.raises(RankError, match=r"rank 1 \(.*\) failed in fail: Stop: the shelf is empty"):
        four.call(Fail(1, "no exception"))


def test_full_disk_of_a_rank_is_no_failure_of_it_and_words_of_its_network_are(four: Group) -> None:
    with pytest.raises(StorageError, match=r"^group four: rank 1 \(.*\) failed in fail: RuntimeError: No space"):
        four.call(Fail(1, "runtime", "No space left on device (os error 28)"))
    with pytest.raises(RankError, match="DistBackendError"):
        four.call(Fail(1, "network", "ibv_poll_cq failed with Input/output error"))


def test_a_mistake_of_the_user_found_on_a_rank_is_a_value_error(four: Group) -> None:
    """The other ranks answer later than the driver waits for them: their answers are not taken for others."""
    with pytest.raises(ValueError, match=r"^the shelf is empty$") as caught:
        four.call(Fail(3, "value", others_sleep_s=2.5 * group_module.GRACE_S))
    assert "in fail" in str(caught.value.__cause__), "the remote traceback comes along, for --debug"
    assert [r.result["rank"] for r in four.call(Double())] == [1, 3]


def test_the_seconds_of_every_rank_in_every_call_are_there_to_take(four: Group) -> None:
    four.take_calls()
    before = time.perf_counter()
    four.call(Double())
    four.call(Where("actor"))
    first, second = four.take_calls()
    assert (first.group, first.name, second.name) == ("four", "double", "where actor")
    assert before < first.begin < second.begin < time.perf_counter()
    assert set(first.seconds) == {0, 1, 2, 3}, "those that do not report, too"
    assert all(0 < seconds < second.begin - first.begin for seconds in first.seconds.values())
    assert four.take_calls() == []


def test_ranks_do_not_heed_signals_that_are_meant_for_the_driver(four: Group) -> None:
    for pid in [reply.result["pid"] for reply in four.call(Pid())]:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    assert [reply.result["rank"] for reply in four.call(Double())] == [1, 3]


class Command:
    """Executed by whoever unpickles it."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._mark),)


def torchs_own_store() -> TCPStore:
    fd = listen("127.0.0.1").detach()
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def poison(port: int, mark: Path) -> None:
    """What any user of this machine can do: put a pickle where torchrun's rendezvous looks for its state."""
    stranger = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    for run_id in ("none", "0", ""):
        stranger.set(f"torch.rendezvous.{run_id}", base64.b64encode(pickle.dumps(Command(mark))).decode())


def test_torchruns_rendezvous_executes_what_a_stranger_puts_there(tmp_path: Path) -> None:
    """So ranks are not started by it."""
    store = torchs_own_store()
    poison(store.port, tmp_path / "executed")
    settings = RendezvousSettings("none", 1, 1, RendezvousTimeout(), timedelta(seconds=5), 3)
    with pytest.raises(AttributeError):  # of what it got in the place of its state
        _BackendRendezvousStateHolder(C10dRendezvousBackend(store, "none"), settings).sync()
    assert (tmp_path / "executed").is_dir()


# Where gloo's ranks say their addresses, in the world and in later groups.
KEYS = [f"{first}0//{group}cpu//0/{rank}" for first in ("", "default_pg/") for group in ("", "1//") for rank in "01"]


def overwrite(port: int, found: Path) -> None:
    """As a client of torch's store: say something else in the place of each address of a rank."""
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
        for key in KEYS:
            store.set(key, b"\x07" * 200)
    except RuntimeError:
        return  # it is no store
    with found.open("a") as ports:
        ports.write(f"{port}\n")


def listening(pid: int) -> set[int]:
    """The ports of a process, and of those that it started."""
    parent, found = psutil.Process(pid), set[int]()
    for process in (parent, *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has ended
            found |= {e.laddr.port for e in process.net_connections("tcp") if e.status == psutil.CONN_LISTEN}
    return found


def tell(pid: int, ports: Path) -> NoReturn:
    while True:
        with ports.open("a") as file:
            file.write("".join(f"{port}\n" for port in listening(pid)))
        time.sleep(0.02)


def attack(ports: Path, found: Path) -> NoReturn:
    """A stranger: try each port of this file, as soon as it is there."""
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    known: set[str] = set()
    while True:
        for port in set(ports.read_text().splitlines()) - known:
            known.add(port)
            threading.Thread(target=overwrite, args=(int(port), found), daemon=True).start()
        time.sleep(0.002)


@contextmanager
def forked(run: Callable[..., NoReturn], *arguments: object) -> Iterator[int]:
    """Calls it in another process; gives its number."""
    if not (pid := os.fork()):
        try:
            run(*arguments)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def attacked(ports: Path, found: Path) -> Iterator[None]:
    """Returns when the stranger has overwritten the keys of a store of torch's, so that the attack is one.

    He is told the ports on which this test listens, because tests that run beside it have stores of torch's, too.
    """
    for file in (ports, found):
        file.touch()
        file.chmod(0o666)
    with forked(tell, os.getpid(), ports), forked(attack, ports, found) as stranger:
        store = torchs_own_store()
        while str(store.port) not in found.read_text():
            assert os.waitpid(stranger, os.WNOHANG) == (0, 0), "the stranger has ended"
            time.sleep(0.01)
        assert store.get(KEYS[0]) == b"\x07" * 200
        found.write_text("")
        yield


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a second user")
def test_strangers_find_no_store_and_ranks_that_start_meanwhile_have_right_gradients(tmp_path: Path) -> None:
    common = Path(tempfile.mkdtemp())  # the stranger may enter it
    common.chmod(0o777)
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    with attacked(common / "ports", common / "found"), make(tmp_path, "beset", 2, 1) as group:
        group.start()
        replies = group.call(Gradient(), [{"row": row} for row in rows])
        ours = {int(address.rpartition(":")[2]) for address in (group._home, group._store.place.address)}
        assert not ours & listening(os.getpid()), "all ranks are in, so nobody listens any more"
    assert str(group._store.place.address.rpartition(":")[2]) in (common / "ports").read_text(), "it was attacked"
    assert [reply.tensors["gradient"].tolist() for reply in replies] == 2 * [[2.5, 3.5, 4.5]]
    assert (common / "found").read_text() == ""
    shutil.rmtree(common)


@pytest.mark.full
def test_two_groups_work_at_once_and_the_later_calls_of_one_have_limits_of_their_own(
    four: Group, tmp_path: Path
) -> None:
    with make(tmp_path, "two", 2, 1, call_timeout_s=1e6, call_factor=3.0, call_floor_s=3.0) as two:
        two.start()
        replies = two.call(Double(), [{"x": torch.ones(1)}, {"x": torch.zeros(1)}])
        assert [reply.tensors["x"].item() for reply in replies] == [2.0, 0.0]
        assert [r.result["rank"] for r in four.call(Double())] == [1, 3], "both work at once"
        two.call(Hang(-1))
        with pytest.raises(RankError, match=rf"rank 0 \({HERE}\) did not end hang within 3 s; its stack is then in"):
            two.call(Hang(0))
    assert re.search(r'File ".*echo_worker.py", line \d+ in hang', (tmp_path / "two/rank_0.log").read_text())


def test_a_killed_rank_is_noticed_while_the_others_work(tmp_path: Path) -> None:
    with make(tmp_path, "killed", 2, 1) as group:
        group.start()
        began = time.monotonic()
        with pytest.raises(RankError, match=rf"group killed: rank 1 \({HERE}\) died in kill; see .*rank_1.log"):
            group.call(Kill(1))
        assert time.monotonic() - began < HANG_S / 2


EATEN = """
import sys, threading
from pathlib import Path
from echo_messages import Eat
from megarl.group import Group, GroupSettings, RankError
from megarl.arch.layout import Layout
from megarl.machines.nodes import Nodes
from megarl.machines.agent import Agent
with Nodes(2, 1, "127.0.0.1", 0, "a token") as nodes:
    agent = Agent(1, f"127.0.0.1:{nodes.port}", "a token", source="127.0.0.2", workers=("echo_worker",))
    threading.Thread(target=agent.serve).start()
    nodes.wait(limit_s=60)
    for name, ranks, eater, where in (("far", 2, 1, nodes), ("near", 1, 0, None)):
        settings = GroupSettings(device="cpu", worker="echo_worker")
        with Group(name, ranks, Layout(), settings, log_dir=Path(sys.argv[1]), nodes=where) as group:
            group.start()
            try:
                group.call(Eat(eater))
            except RankError as error:
                print(type(error).__name__, error)
"""


@pytest.mark.full
def test_a_rank_that_the_kernel_kills_for_its_cgroups_limit_is_named_with_it(tmp_path: Path) -> None:
    """On another machine, whose agent looks, and on this one."""
    with small_cgroup(2_000_000_000) as enter:
        command = [sys.executable, "-c", EATEN, str(tmp_path)]
        driver = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, timeout=300)
    said = driver.stdout.splitlines()
    assert len(said) == 2, driver.stdout + driver.stderr
    for rank, kills, sentence in ((1, "0 -> 1", said[0]), (0, "1 -> 2", said[1])):
        ended = (
            rf"OutOfMemory group \w+: rank {rank} \(machine {rank}, .*\) died in eat, killed by SIGKILL, as the kernel "
        )
        ends = (
            rf"does when memory ends \(oom_kill of this cgroup {kills}, limit 2,000 MB\); `megarl plan` .*; see \S+log"
        )
        assert re.fullmatch(ended + ends, sentence), sentence


@pytest.mark.full
def test_an_end_that_is_noticed_after_the_error_that_follows_from_it_is_the_reason(tmp_path: Path) -> None:
    """As when a machine is lost: rank 1 gives no more signs, rank 0's collective fails, then a connection ends."""
    with make(tmp_path, "late", 3, 1) as group:
        group.start()
        victim = group.call(Pid())[1].result["pid"]

        def end() -> None:
            while psutil.Process(victim).status() != psutil.STATUS_STOPPED:
                time.sleep(0.05)
            time.sleep(3 * group_module.GRACE_S)  # rank 0 has failed long ago, and rank 2 waits in its collective
            os.kill(victim, signal.SIGKILL)

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(
            RankError, match=rf"group late: rank 1 \(machine 0, .*pid {victim}\) died in meet"
        ) as caught:
            group.call(Meet(stopped=1, fails=0))
        thread.join()
    assert "RuntimeError: Connection reset by peer" in caught.value.report, "what followed from it comes along"


def test_ranks_that_cannot_start_are_reported_with_their_log(tmp_path: Path) -> None:
    group = Group("none", 1, Layout(), GroupSettings(device="cpu", worker="no_such_worker"), log_dir=tmp_path)
    with group, pytest.raises(RankError, match=r"group none: its ranks ended with status 1; see "):
        group.start()


@pytest.mark.full
def test_hung_ranks_of_every_kind_are_named_show_their_stacks_and_are_killed(four: Group, logs: Path) -> None:
    """One is stopped, one holds the interpreter's lock, one loops in Python; the fourth waits in a collective."""
    pids = [result["pid"] for result in four.call_each(Pid())]
    first = rf"rank 0 \(machine 0, host .*, pid {pids[0]}\), rank 1 \({HERE}\)"
    with pytest.raises(RankError, match=rf"group four: {first} gave no sign for 6 s in meet; their stacks are then"):
        four.call(Meet(stopped=0, holds=1, loops=2))
    four.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    stopped, holds, loops, waits = ((logs / f"four/rank_{rank}.log").read_text() for rank in range(4))
    assert f"pid {pids[0]} is killed. It has no whole stacks to show: it is stopped" in stopped
    assert re.search(r'File ".*echo_worker.py", line \d+ in hold', holds)
    assert "none of its threads could run Python code" in holds
    assert re.search(r'File ".*echo_worker.py", line \d+ in loop', loops)
    assert re.search(r'File ".*distributed_c10d.py", line \d+ in barrier', waits)
    assert "in _beat" in waits, "of all threads"
    record = pickle.loads((logs / "four/flight_record_rank_3").read_bytes())
    assert "barrier" in record["entries"][-1]["profiling_name"]
    assert record["entries"][-1]["state"] != "completed"
