"""Servers that give memory back, and take what they gave."""

from __future__ import annotations

import pytest
from config_helpers import load

from megarl.rollout.client import ServerError
from megarl.trainer.servers import colocation as turns_module
from megarl.trainer.servers.colocation import CACHE, GENERATION, GRAPHS, WEIGHTS, Colocation, check_shared_gpus
from megarl.weights.verify.canary import Canary

URL, OTHER, DEAF = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))
SHARED = ["rollout.engine=sglang", "rollout.placement=shared", "trainer.device=cuda", "trainer.n_gpus_per_node=4"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What a server is told."""
    words: list[tuple] = []

    class Server:
        def __init__(self, url: str, token: str, *, timeout_s: float) -> None:
            self.url = url
            words.append(("open", url, token))

        def pause(self, mode: str) -> None:
            words.append(("pause", mode))

        def wait_until_idle(self) -> None:
            words.append(("idle",))

        def resume(self) -> None:
            words.append(("resume",))

        def release_memory(self, tags: tuple[str, ...]) -> None:
            words.append(("release", *tags))

        def resume_memory(self, tags: tuple[str, ...]) -> None:
            words.append(("take", *tags))

        def prompt_log_probs(self, prompt_ids: tuple[int, ...], adapter: str | None) -> list[float]:
            if self.url == DEAF:
                raise ServerError(self.url, "/generate", 0, "no answer")
            return [-0.5 if self.url == URL else -1.5]

        def close(self) -> None:
            words.append(("close",))

    monkeypatch.setattr(turns_module, "ServerClient", Server)
    return words


def test_a_server_that_sleeps_writes_nothing_any_more_and_then_gives_all_back(said) -> None:
    Colocation("secret", timeout_s=1.0).release_memory(URL)
    assert said == [
        ("open", URL, "secret"),
        ("pause", "abort"),
        ("idle",),
        ("release", WEIGHTS, CACHE, GRAPHS),
        ("close",),
    ]


def test_it_takes_what_it_gave_and_serves_again(said) -> None:
    colocation = Colocation("secret", timeout_s=1.0)
    colocation.release_memory(URL, [CACHE])
    del said[:]
    colocation.resume_memory(URL)
    assert said[1:] == [("take", CACHE), ("resume",), ("close",)]
    del said[:]
    colocation.resume_memory(URL)
    assert said == [], "stock SGLang dies of taking what it never gave"


def test_what_was_given_is_not_given_twice(said) -> None:
    colocation = Colocation("secret", timeout_s=1.0)
    colocation.release_memory(URL, [CACHE])
    colocation.release_memory(URL)
    colocation.release_memory(URL)
    assert [words for words in said if words[0] == "release"] == [("release", CACHE), ("release", WEIGHTS, GRAPHS)]
    colocation.resume_memory(URL)
    assert ("take", CACHE, WEIGHTS, GRAPHS) in said


def test_it_takes_room_for_weights_first_and_serves_when_it_has_all(said) -> None:
    colocation = Colocation("secret", timeout_s=1.0)
    colocation.release_memory(URL)
    del said[:]
    colocation.resume_memory(URL, [WEIGHTS])
    assert said[1:] == [("take", WEIGHTS), ("close",)]
    del said[:]
    colocation.resume_memory(URL, [WEIGHTS])
    assert said == []
    colocation.resume_memory(URL, GENERATION)
    assert said[1:] == [("take", CACHE, GRAPHS), ("resume",), ("close",)]


def test_a_canary_is_asked_of_each_and_what_differs_or_says_nothing_is_named(said) -> None:
    canary = Canary((5, 6), (-0.5,))
    found = Colocation("secret", timeout_s=1.0).examine(canary, [URL, OTHER, DEAF])
    assert found.keys() == {OTHER, DEAF}
    assert "log-probs that differ by" in found[OTHER]


def test_a_new_process_has_given_nothing(said) -> None:
    colocation = Colocation("secret", timeout_s=1.0)
    colocation.release_memory(URL)
    colocation.forget(URL)
    del said[:]
    colocation.resume_memory(URL)
    assert said == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["rollout.push=sharded"], "^rollout.push=sharded: NCCL joins no two processes of one GPU"),
        (
            ["rollout.tensor_model_parallel_size=4", "actor.num_ranks=2"],
            "^rollout.tensor_model_parallel_size=4: server 0 stands on 2 GPUs of the actor's and 2 others",
        ),
    ],
)
def test_a_server_into_which_no_push_leads_is_refused_before_the_start(words: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_shared_gpus(load(*SHARED, *words))
    check_shared_gpus(load(*[word.replace("cuda", "cpu") for word in SHARED], *words))


def test_servers_beside_the_actor_take_any_way() -> None:
    where = ["actor.first_rank=2", "actor.num_ranks=2", "rollout.num_servers=2", "rollout.push=sharded"]
    check_shared_gpus(load(*SHARED, *where))
