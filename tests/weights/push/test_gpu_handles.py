"""On which GPUs the ranks of servers stand, and whose handles they are given."""

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.weights.push.gpu_handles import gpus_of, take, wanted_handles


def server(*gpus: str, first_gpu: int | None = 0) -> Any:
    return SimpleNamespace(url="http://a", gpus=gpus, nature=SimpleNamespace(first_gpu=first_gpu, coordinates=(0, 1)))


def test_a_server_stands_where_it_was_said_to_stand() -> None:
    assert gpus_of(server("1/0", "1/1")) == ["1/0", "1/1"]
    assert gpus_of(server("1/0", "1/1", first_gpu=None)) == [], "it has no GPU"


def test_one_of_which_nothing_was_said_stands_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert gpus_of(server(first_gpu=4)) == ["here/4", "here/5"]


def test_each_rank_is_given_a_handle_of_its_own_gpu_on_its_own_machine() -> None:
    first, second, over_both = server("0/0", "0/1"), server("1/0", "1/1"), server("0/1", "1/0")
    assert wanted_handles([first, second, over_both]) == {"0/0": 1, "0/1": 2, "1/0": 2, "1/1": 1}
    handles = {"0/0": ["a"], "0/1": ["b", "c"], "1/0": ["d", "e"], "1/1": ["f"]}
    assert take(handles, first) == ["a", "c"]
    assert take(handles, second) == ["e", "f"]
    assert take(handles, over_both) == ["b", "d"]
    with pytest.raises(ValueError, match="no rank of the trainer uses 0/0, where http://a has a rank"):
        take(handles, first)
