"""Meeting a server in a group when the server does not come, and whether a server is on this machine."""

import os
import threading
from typing import Any

import pytest
import torch.distributed as dist

from megarl.servers import weight_group
from megarl.servers.weight_group import leave_weight_group
from megarl.weights.push.channel import Meeting, is_here, meet

HERE = "http://127.0.0.1:1"


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
            group = meet(*Meeting.host(HERE, 1, "gloo", 30.0), lambda: None)
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
        meet(*Meeting.host(HERE, 2, "gloo", 30.0), refuse)
    assert dist.distributed_c10d._world.pg_map == before


def test_a_meeting_to_which_nobody_comes_ends_by_its_limit() -> None:
    never = threading.Event()
    with pytest.raises(RuntimeError):
        meet(*Meeting.host(HERE, 2, "gloo", 0.5), lambda: never.wait(30))
    never.set()


def test_no_two_meetings_have_one_name() -> None:
    (one, its), (other, others) = (Meeting.host(HERE, 2, "gloo", 1.0) for _ in range(2))
    with its, others:
        assert one.name != other.name
        assert its.getsockname() == ("127.0.0.1", one.port), "for a server on this machine, on loopback alone"


@pytest.mark.parametrize(
    ("url", "here"),
    [(HERE, True), ("http://localhost:1", True), ("http://[::1]:1", True), ("http://192.0.2.1:1", False)],
)
def test_a_server_is_here_when_it_is_reached_from_its_own_address(url: str, here: bool) -> None:
    assert is_here(url) is here
