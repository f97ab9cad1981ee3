"""Meeting a server in a group when the server does not come, and whether a server is on this machine."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend `fake`

from megarl.servers import weight_group
from megarl.servers.weight_group import join_store, leave_weight_group
from megarl.weights.push.channel import Host, Meeting, is_here, meet

HERE = "http://127.0.0.1:1"
KEY = "the key of the stores of weight groups"


def meet_with(hosted: tuple[Meeting, Host], invite: Callable[[], Any]) -> dist.ProcessGroup:
    meeting, host = hosted
    return meet(meeting, host, invite)


def test_a_failed_transfer_over_nccl_does_not_end_the_trainers_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the variable when it makes the group; the trainer's own groups keep theirs."""
    make, seen = dist.distributed_c10d._new_process_group_helper, []

    def helper(*args: Any, **how: Any) -> Any:
        seen.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
        return make(*args, **how)

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", helper)
    for own in (None, "3"):
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", own or "")
        if own is None:
            monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        with weight_group._failures_survived():
            group = meet_with(Meeting.host(HERE, 1, "gloo", 30.0, KEY), lambda: None)
        assert (group.size(), group.rank()) == (1, 0)
        leave_weight_group(group)
        assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == own
    assert seen == ["0", "0"]


def test_a_group_over_nccl_is_aborted_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[object] = []
    group = object()
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", aborted.append)
    leave_weight_group(group)  # type: ignore[arg-type]
    assert aborted == [group]


def test_a_refused_invitation_is_an_error_at_once_and_no_group_is_left() -> None:
    def refuse() -> None:
        raise ValueError("no")

    before = dist.distributed_c10d._world.pg_map.copy()
    with pytest.raises(ValueError, match="no"):
        meet_with(Meeting.host(HERE, 2, "gloo", 30.0, KEY), refuse)
    assert dist.distributed_c10d._world.pg_map == before


def test_no_member_comes_too_late_over_a_backend_that_makes_groups_without_meeting() -> None:
    """As NCCL: its groups are there before anybody has come, and rank 0 closes the store's door then."""
    meeting, host = Meeting.host(HERE, 2, "fake", 60.0, KEY)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(meeting.join, 0, host)
        time.sleep(0.3)
        assert not first.done()
        join_store(meeting.address, meeting.port, meeting.name, 2, 60.0, KEY)
        leave_weight_group(first.result(60))


def test_a_store_that_cannot_be_reached_is_an_error_as_all_of_a_meeting() -> None:
    meeting, host = Meeting.host(HERE, 2, "gloo", 60.0, KEY)
    host.close()
    with pytest.raises(RuntimeError, match="cannot be reached from here"):
        meeting.join(1, KEY)


@pytest.mark.parametrize("key", [KEY, None])
def test_a_meeting_to_which_nobody_comes_ends_by_its_limit(key: str | None) -> None:
    never = threading.Event()
    with pytest.raises(RuntimeError):
        meet_with(Meeting.host(HERE, 2, "gloo", 0.5, key), lambda: never.wait(30))
    never.set()


def test_no_two_meetings_have_one_name_or_one_token() -> None:
    (one, its), (other, others) = (Meeting.host(HERE, 2, "gloo", 1.0, KEY) for _ in range(2))
    assert one.name != other.name
    assert its.place.address == f"127.0.0.1:{one.port}", "for a server on this machine, on loopback alone"
    assert its.place.token != others.place.token
    for host in (its, others):
        host.close()


@pytest.mark.parametrize(
    ("url", "here"),
    [(HERE, True), ("http://localhost:1", True), ("http://[::1]:1", True), ("http://192.0.2.1:1", False)],
)
def test_a_server_is_here_when_it_is_reached_from_its_own_address(url: str, here: bool) -> None:
    assert is_here(url) is here
