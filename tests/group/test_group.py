"""Calls, answers and failures of a Group, with real processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.group import Group, RankError
from megarl.layout import Layout

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


def test_an_exception_on_one_rank_reaches_the_driver_with_its_rank(four: Group) -> None:
    with pytest.raises(
        RankError, match=r"group four: rank 2 failed in fail: RuntimeError: the shelf is empty"
    ) as caught:
        four.call("fail", {"rank": 2, "kind": "runtime"})
    assert "in fail" in caught.value.report, "the remote traceback comes along"
    assert four.call_leader("double", {}).result["rank"] == 0, "ranks that answered go on"


def test_an_exception_brings_its_kind_and_its_plain_details(four: Group) -> None:
    with pytest.raises(RankError, match="EmptyShelf: the shelf is empty") as caught:
        four.call("fail", {"rank": 1, "kind": "detailed"})
    assert caught.value.kind == "EmptyShelf"
    assert caught.value.details["shelf"] == 3
    assert caught.value.details["height"] != caught.value.details["height"], "NaN travels too"
    with pytest.raises(RankError) as caught:
        four.call("fail", {"rank": 1, "kind": "runtime"})
    assert (caught.value.kind, caught.value.details) == ("RuntimeError", {})


def test_a_mistake_of_the_user_found_on_a_rank_is_a_value_error(four: Group) -> None:
    with pytest.raises(ValueError, match=r"^the shelf is empty$") as caught:
        four.call("fail", {"rank": 3, "kind": "value"})
    assert "in fail" in str(caught.value.__cause__), "the remote traceback comes along, for --debug"


def test_even_what_is_no_exception_reaches_the_driver(four: Group) -> None:
    """torch's CheckpointException is none."""
    with pytest.raises(RankError, match=r"rank 1 failed in fail: Stop: the shelf is empty"):
        four.call("fail", {"rank": 1, "kind": "no exception"})


def test_an_answer_that_comes_after_its_call_has_failed_is_not_taken_for_another(four: Group) -> None:
    with pytest.raises(RankError, match=r"rank 0 failed in fail"):
        four.call("fail", {"rank": 0, "kind": "runtime", "others_sleep_s": 2.0})
    assert [r.result["rank"] for r in four.call("double")] == [1, 3]


def test_two_groups_work_at_once(four: Group, tmp_path: Path) -> None:
    with make(tmp_path, "two", 2, 1) as two:
        two.start()
        assert [r.result["rank"] for r in two.call("double")] == [0, 1]
        assert [r.result["rank"] for r in four.call("double")] == [1, 3]
        assert two.call("double", {}, [{"x": torch.ones(1)}, {"x": torch.zeros(1)}])[1].tensors["x"].item() == 0


def test_a_call_has_a_limit_and_names_the_late_ranks(tmp_path: Path) -> None:
    with make(tmp_path, "late", 2, 1) as group:
        group.start()
        began = time.monotonic()
        with pytest.raises(RankError, match=r"hang took over 5 s on ranks \[1\]"):
            group.call("hang", {"rank": 1}, timeout_s=5.0)
        assert time.monotonic() - began < HANG_S / 2


def test_a_killed_rank_is_noticed_while_the_others_work(tmp_path: Path) -> None:
    with make(tmp_path, "killed", 2, 1) as group:
        group.start()
        began = time.monotonic()
        with pytest.raises(RankError, match=r"group killed: rank 1 died in kill; see "):
            group.call("kill", {"rank": 1})
        assert time.monotonic() - began < HANG_S / 2


def test_ranks_that_cannot_start_are_reported_with_their_log(tmp_path: Path) -> None:
    group = Group("none", 1, Layout(), log_dir=tmp_path, device="cpu", worker="no_such_worker")
    with group, pytest.raises(RankError, match=r"group none: its ranks ended with status 1; see "):
        group.start()
