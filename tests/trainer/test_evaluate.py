"""Who is asked for the completions of an evaluation, and who looks after the servers meanwhile."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Config, resolved
from megarl.sample import Completion, LostRollout, Prompt, Sample, VersionSpan
from megarl.servers.supervisor import ServerDied, ServerEvent, State
from megarl.trainer import evaluate
from megarl.trainer.evaluate import Evaluation, look_after

PROMPTS = SimpleNamespace(all=lambda _: ["a prompt"], some=lambda _: [])
A, B, ROUTER = "http://a:1", "http://b:1", "http://router:1"


class Router:
    url = ROUTER

    def __init__(self) -> None:
        self.working: list[str] = []

    def add(self, url: str) -> None:
        self.working.append(url)

    def remove(self, url: str) -> None:
        self.working.remove(url)


class Servers:
    """They tell of one event after another."""

    urls = [A, B]

    def __init__(self, *events: ServerEvent) -> None:
        self._events = list(events)
        self.states = [State.SERVING, State.SERVING]

    def poll(self) -> list[ServerEvent]:
        if not self._events:
            return []
        event = self._events.pop(0)
        self.states[event.index] = event.state
        return [event]


class Stopped(Exception):
    """Far enough."""


@pytest.mark.parametrize("router", [None, Router()])
def test_completions_are_asked_of_the_router_where_there_is_one(
    router: Router | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Infrastructure:
        server_token, reward_url = "token", None

        def __init__(self, config: Config, *, trains: bool) -> None:
            assert not trains, "the GPUs are the servers'"
            self.router = router

        def __enter__(self) -> Infrastructure:
            return self

        def __exit__(self, *_: object) -> None: ...

        def serve(self) -> Servers:
            return Servers()

    def make_collectors(config: Config, urls: list[str], token: str, *, reward_url: str | None) -> None:
        asked.extend(urls)
        raise Stopped

    monkeypatch.setattr(evaluate, "Infrastructure", Infrastructure)
    monkeypatch.setattr(evaluate, "make_collectors", make_collectors)
    monkeypatch.setattr(evaluate, "read_prompts", lambda *_, **__: PROMPTS)
    config = Config()
    config.data.val_files, config.reward.try_rows = ["a.jsonl"], 0
    with pytest.raises(Stopped):
        evaluate.main(config)
    assert asked == ([A, B] if router is None else [ROUTER])
    if router is not None:
        assert router.working == [A, B]


def test_the_servers_are_looked_after_while_their_completions_are_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits, looks, how = [], [], {}
    sample = SimpleNamespace(reward=0.5, prompt=SimpleNamespace(data_source=""))
    ticket = SimpleNamespace(group=None)

    def wait() -> None:
        waits.append("waited")
        if len(waits) == 3:
            ticket.group = [sample]

    def submit(prompts: list[str], **options: Any) -> list[Any]:
        how.update(options)
        return [ticket]

    collectors = SimpleNamespace(submit=submit, wait=wait, close=lambda: None)
    infrastructure = nullcontext(SimpleNamespace(serve=Servers, router=None, server_token="token", reward_url=None))
    monkeypatch.setattr(evaluate, "Infrastructure", lambda *_, **__: infrastructure)
    monkeypatch.setattr(evaluate, "make_collectors", lambda *_, **__: collectors)
    monkeypatch.setattr(evaluate, "read_prompts", lambda *_, **__: PROMPTS)
    monkeypatch.setattr(evaluate, "look_after", lambda servers, router: looks.append(servers.urls))
    config = resolved(Config())
    config.data.val_files, config.reward.try_rows = ["a.jsonl"], 0
    assert evaluate.main(config) == 0
    assert looks == [[A, B]] * 2
    assert how["urgent"], "in a run nothing that is generated ahead may come before it"
    assert "val/score 0.5000" in capsys.readouterr().out


def test_a_server_that_died_gets_no_work_until_it_is_back_and_without_any_it_ends() -> None:
    router: Any = Router()
    router.working = [A, B]
    servers: Any = Servers(
        ServerEvent(0, A, State.RESTING, 1, "it ended"),
        ServerEvent(0, A, State.SERVING, 2),
        ServerEvent(1, B, State.OUT, 3, "after 3 restarts, it ended"),
        ServerEvent(0, A, State.OUT, 4, "after 3 restarts, it broke"),
    )
    states = []
    for _ in range(3):
        look_after(servers, router)
        states.append(sorted(router.working))
    assert states == [[B], [A, B], [A]]
    with pytest.raises(ServerDied, match="no server is left; after 3 restarts, it broke"):
        look_after(servers, None)


def test_what_could_not_be_scored_is_counted_and_is_no_zero_in_the_score() -> None:
    def samples(uid: str, *rewards: float) -> list[Sample]:
        prompt, completion = Prompt(uid, [1], ""), Completion([1], [-1.0], "stop", (VersionSpan(0, 0, 1),))
        return [Sample.of(prompt, completion, reward) for reward in rewards]

    unscored = LostRollout(Prompt("2", [1], ""), "2 of 2 completions could not be scored", unscored=2)
    found = Evaluation([samples("0", 1.0, 0.0), samples("1", 1.0), unscored], n=2)
    assert found.metrics() == {"val/score": 0.75, "val/unscored": 3.0, "val/lost": 1.0}
    lost = LostRollout(Prompt("3", [1], ""), "no server")
    assert Evaluation([*found.groups, lost], n=2).metrics() == {"val/score": 0.5, "val/unscored": 3.0, "val/lost": 2.0}
