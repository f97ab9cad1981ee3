"""Calls, answers and failures of a Group, with real processes."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from megarl.group import Group, RankError
from megarl.group.group import GRACE_S
from megarl.layout import Layout
from megarl.processes import presence

pytestmark = pytest.mark.dist
HELPERS = Path(__file__).parents[1] / "helpers"  # echo_worker


@pytest.fixture(scope="module", autouse=True)
def worker_on_path() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HELPERS), *([before] if before else [])])
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


HANG_S = 60  # of the worker's `hang`


def make(tmp: Path, name: str, ranks: int, tp: int, **limits: float) -> Group:
    return Group(name, ranks, Layout(tp=tp), log_dir=tmp / name, device="cpu", worker="echo_worker", **limits)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, worker_on_path: None) -> Iterator[Group]:
    """Two replicas of two ranks."""
    with make(tmp_path_factory.mktemp("logs"), "four", 4, 2) as group:
        group.start()
        yield group


def test_each_replica_gets_its_tensors_and_its_reporter_answers(four: Group) -> None:
    payloads = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0])}]
    replies = four.call("double", {"say": "héllo"}, payloads)
    assert four.num_replicas == 2
    assert [r.result for r in replies] == [{"rank": 1, "said": "héllo"}, {"rank": 3, "said": "héllo"}]
    assert [r.tensors["x"].tolist() for r in replies] == [[2.0, 4.0], [6.0]]


def test_the_leader_is_rank_0(four: Group) -> None:
    assert four.call_leader("double", {}).result["rank"] == 0


def test_a_driver_that_waits_for_ranks_shows_itself(four: Group) -> None:
    with presence.watched(600.0):
        presence._shown = before = time.monotonic() - 10.0  # as after ten seconds
        four.call("double")
        assert presence._shown > before


def test_an_exception_on_one_rank_reaches_the_driver_with_its_rank(four: Group) -> None:
    with pytest.raises(
        RankError, match=r"group four: rank 2 \(machine 0, .*\) failed in fail: RuntimeError: the shelf is empty"
    ) as caught:
        four.call("fail", {"rank": 2, "kind": "runtime"})
    assert "in fail" in caught.value.report, "the remote traceback comes along"
    assert four.call_leader("double", {}).result["rank"] == 0, "ranks that answered go on"


def test_a_mistake_of_the_user_found_on_a_rank_is_a_value_error(four: Group) -> None:
    with pytest.raises(ValueError, match=r"^the shelf is empty$") as caught:
        four.call("fail", {"rank": 3, "kind": "value"})
    assert "in fail" in str(caught.value.__cause__), "the remote traceback comes along, for --debug"


def test_even_what_is_no_exception_reaches_the_driver(four: Group) -> None:
    """torch's CheckpointException is none."""
    with pytest.raises(RankError, match=r"rank 1 \(.*\) failed in fail: Stop: the shelf is empty"):
        four.call("fail", {"rank": 1, "kind": "no exception"})


def test_an_answer_that_comes_after_its_call_has_failed_is_not_taken_for_another(four: Group) -> None:
    with pytest.raises(RankError, match=r"rank 0 \(.*\) failed in fail"):
        four.call("fail", {"rank": 0, "kind": "runtime", "others_sleep_s": 8.0})
    assert [r.result["rank"] for r in four.call("double")] == [1, 3]


def test_the_seconds_of_every_rank_in_every_call_are_there_to_take(four: Group) -> None:
    four.take_calls()
    before = time.perf_counter()
    four.call("double")
    four.call("where", {"role": "actor"})
    first, second = four.take_calls()
    assert (first.group, first.name, second.name) == ("four", "double", "where actor")
    assert before < first.begin < second.begin < time.perf_counter()
    assert set(first.seconds) == {0, 1, 2, 3}, "those that do not report, too"
    assert all(0 < seconds < second.begin - first.begin for seconds in first.seconds.values())
    assert four.take_calls() == []


def test_two_groups_work_at_once(four: Group, tmp_path: Path) -> None:
    with make(tmp_path, "two", 2, 1) as two:
        two.start()
        assert [r.result["rank"] for r in two.call("double")] == [0, 1]
        assert [r.result["rank"] for r in four.call("double")] == [1, 3]
        assert two.call("double", {}, [{"x": torch.ones(1)}, {"x": torch.zeros(1)}])[1].tensors["x"].item() == 0


HERE = f"machine 0, host {re.escape(socket.gethostname())}, pid [0-9]+"


def test_hung_ranks_of_every_kind_are_named_show_their_stacks_and_are_killed(tmp_path: Path) -> None:
    """One is stopped, one holds the interpreter's lock, one loops in Python; the fourth waits in a collective."""
    how = {"stopped": 0, "holds": 1, "loops": 2}
    with make(tmp_path, "hung", 4, 1, silence_s=8.0) as group:
        group.start()
        pids = [reply.result["pid"] for reply in group.call("pid")]
        first = rf"rank 0 \(machine 0, host .*, pid {pids[0]}\), rank 1 \({HERE}\)"
        with pytest.raises(
            RankError, match=rf"group hung: {first} gave no sign for 8 s in meet; their stacks are then"
        ):
            group.call("meet", how)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    stopped, holds, loops, waits = ((tmp_path / f"hung/rank_{rank}.log").read_text() for rank in range(4))
    assert f"pid {pids[0]} is killed. It has no whole stacks to show: it is stopped" in stopped
    assert re.search(r'File ".*echo_worker.py", line \d+ in hold', holds)
    assert "none of its threads could run Python code" in holds
    assert re.search(r'File ".*echo_worker.py", line \d+ in loop', loops)
    assert re.search(r'File ".*distributed_c10d.py", line \d+ in barrier', waits)
    assert "in _beat" in waits, "of all threads"
    record = pickle.loads((tmp_path / "hung/flight_record_rank_3").read_bytes())
    assert "barrier" in record["entries"][-1]["profiling_name"]
    assert record["entries"][-1]["state"] != "completed"


def test_a_later_call_has_a_limit_of_its_own_kind_and_size(tmp_path: Path) -> None:
    with make(tmp_path, "limits", 1, 1, call_timeout_s=1e6, call_factor=3.0, call_floor_s=4.0) as group:
        group.start()
        group.call("double", {}, [{"x": torch.zeros(8)}])
        group.call("hang", {"rank": -1})
        with pytest.raises(RankError, match=rf"rank 0 \({HERE}\) did not end hang within 4 s; its stack is then in"):
            group.call("hang", {"rank": 0})
    assert re.search(r'File ".*echo_worker.py", line \d+ in hang', (tmp_path / "limits/rank_0.log").read_text())


def test_ranks_do_not_heed_signals_that_are_meant_for_the_driver(four: Group) -> None:
    for pid in [reply.result["pid"] for reply in four.call("pid")]:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(pid, number)
    assert [reply.result["rank"] for reply in four.call("double")] == [1, 3]


def test_a_killed_rank_is_noticed_while_the_others_work(tmp_path: Path) -> None:
    with make(tmp_path, "killed", 2, 1) as group:
        group.start()
        began = time.monotonic()
        with pytest.raises(RankError, match=rf"group killed: rank 1 \({HERE}\) died in kill; see .*rank_1.log"):
            group.call("kill", {"rank": 1})
        assert time.monotonic() - began < HANG_S / 2


def test_an_end_that_is_noticed_after_the_error_that_follows_from_it_is_the_reason(tmp_path: Path) -> None:
    """As when a machine is lost: rank 1 gives no more signs, rank 0's collective fails, then a connection ends."""
    with make(tmp_path, "late", 3, 1) as group:
        group.start()
        victim = group.call("pid")[1].result["pid"]

        def end() -> None:
            while psutil.Process(victim).status() != psutil.STATUS_STOPPED:
                time.sleep(0.05)
            time.sleep(3 * GRACE_S)  # rank 0 has failed long ago, and rank 2 waits in its collective
            os.kill(victim, signal.SIGKILL)

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(
            RankError, match=rf"group late: rank 1 \(machine 0, .*pid {victim}\) died in meet"
        ) as caught:
            group.call("meet", {"stopped": 1, "fails": 0})
        thread.join()
    assert "RuntimeError: Connection reset by peer" in caught.value.report, "what followed from it comes along"


def test_ranks_that_cannot_start_are_reported_with_their_log(tmp_path: Path) -> None:
    group = Group("none", 1, Layout(), log_dir=tmp_path, device="cpu", worker="no_such_worker")
    with group, pytest.raises(RankError, match=r"group none: its ranks ended with status 1; see "):
        group.start()
