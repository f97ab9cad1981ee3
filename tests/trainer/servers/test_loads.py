"""The queues and KV caches of servers, looked at while a run goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.rollout.client import Load, ServerClient, ServerError
from megarl.trainer.servers.loads import ServerLoads


def part(running: int, waiting: int, used: int) -> dict[str, Any]:
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
    return dict(zip(names, (running, waiting, used, 1000), strict=True))


@contextmanager
def telling(say: Callable[[], Any]) -> Iterator[str]:
    """The url of a server whose load is what `say` returns."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(say()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def looked(loads: ServerLoads) -> dict[str, float]:
    """The metrics of a step that has at least one look."""
    deadline = time.monotonic() + 60
    while not (found := loads.of_step()):
        assert time.monotonic() < deadline, "no look"
        time.sleep(0.01)
    return found


def test_requests_are_summed_over_servers_and_the_fullest_cache_counts() -> None:
    two_parts = {"loads": [part(3, 0, 100), part(1, 2, 300)]}
    with (
        telling(lambda: two_parts) as a,
        telling(lambda: {"loads": [part(2, 4, 250)]}) as b,
        ServerLoads("", 0.01) as loads,
    ):
        loads.servers = (a, b)
        assert looked(loads) == {"servers/running": 6, "servers/waiting": 6, "servers/kv_share": 0.3}


def test_the_numbers_of_a_step_are_means_and_its_most_and_begin_anew_with_the_next() -> None:
    said = iter([{"loads": [part(4, 0, 900)]}, {"loads": [part(1, 2, 100)]}])
    done = threading.Event()

    def say() -> Any:
        found = next(said, None)
        if found is None:
            done.set()
        return found or {"loads": []}

    with telling(say) as url, ServerLoads("", 0.01) as loads:
        loads.servers = (url,)
        assert done.wait(60)
        assert loads.of_step() == {"servers/running": 2.5, "servers/waiting": 1.0, "servers/kv_share": 0.9}
        assert loads.of_step() == {}


def test_a_server_that_answers_nonsense_or_not_at_all_is_left_out() -> None:
    with (
        telling(lambda: {"loads": [{"num_running_reqs": "many"}]}) as bad,
        telling(lambda: {"loads": [part(1, 0, 5)]}) as good,
    ):
        with pytest.raises(ServerError, match="the reply cannot be read"):
            ServerClient(bad, "").loads()
        assert ServerClient(good, "").loads() == [Load(1, 0, 0.005)]
        with ServerLoads("", 0.01) as loads:
            loads.servers = (bad, "http://127.0.0.1:9", good)
            assert looked(loads)["servers/running"] == 1


def test_without_servers_there_are_no_numbers() -> None:
    with ServerLoads("", 0.01) as loads:
        assert loads.of_step() == {}
