"""The queues and KV caches of servers, looked at while a run goes on."""

import threading
import time
from contextlib import AbstractContextManager
from typing import Any

import pytest
from fake_servers import Telling, serving_in_a_thread

from megarl.rollout.client import Load, ServerClient, ServerError
from megarl.rollout.protocol import Route
from megarl.trainer.servers.loads import ServerLoads


def part(running: int, waiting: int, used: int) -> dict[str, Any]:
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
    return dict(zip(names, (running, waiting, used, 1000), strict=True))


def servers_of(*answers: Any) -> AbstractContextManager[Any]:
    return serving_in_a_thread(*(Telling(Route.LOADS, lambda answer=answer: answer) for answer in answers))


def looked(loads: ServerLoads) -> dict[str, float]:
    """The metrics of a step that has at least one look."""
    deadline = time.monotonic() + 60
    while not (found := loads.of_step()):
        assert time.monotonic() < deadline, "no look"
        time.sleep(0.01)
    return found


def test_requests_are_summed_over_servers_and_the_fullest_cache_counts() -> None:
    a, b = {"loads": [part(3, 0, 100), part(1, 2, 300)]}, {"loads": [part(2, 4, 250)]}
    with servers_of(a, b) as (urls, _), ServerLoads("", 0.01) as loads:
        assert loads.of_step() == {}, "without servers there are no numbers"
        loads.servers = tuple(urls)
        assert looked(loads) == {"servers/running": 6, "servers/waiting": 6, "servers/kv_share": 0.3}


def test_the_numbers_of_a_step_are_means_and_its_most_and_begin_anew_with_the_next() -> None:
    said = iter([{"loads": [part(4, 0, 900)]}, {"loads": [part(1, 2, 100)]}])
    done = threading.Event()

    def say() -> Any:
        found = next(said, None)
        if found is None:
            done.set()
        return found or {"loads": []}

    with serving_in_a_thread(Telling(Route.LOADS, say)) as (urls, _), ServerLoads("", 0.01) as loads:
        loads.servers = tuple(urls)
        assert done.wait(60)
        assert loads.of_step() == {"servers/running": 2.5, "servers/waiting": 1.0, "servers/kv_share": 0.9}
        assert loads.of_step() == {}


def test_a_server_that_answers_nonsense_or_not_at_all_is_left_out() -> None:
    answers = ({"loads": [{"num_running_reqs": "many"}]}, {"loads": [part(1, 0, 5)]})
    with serving_in_a_thread(*(Telling(Route.LOADS, lambda answer=answer: answer) for answer in answers)) as (
        (bad, good),
        _,
    ):
        with pytest.raises(ServerError, match="the reply cannot be read"):
            ServerClient(bad, "").loads()
        assert ServerClient(good, "").loads() == [Load(1, 0, 0.005)]
        with ServerLoads("", 0.01) as loads:
            loads.servers = (bad, "http://127.0.0.1:9", good)
            assert looked(loads)["servers/running"] == 1
