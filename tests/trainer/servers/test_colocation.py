"""Servers that give memory back, and take what they gave."""

from collections.abc import Callable
from typing import Any

import pytest
from config_helpers import load

from megarl.rollout.client import ServerError
from megarl.trainer.servers import colocation as turns_module
from megarl.trainer.servers.colocation import CACHE, GENERATION, GRAPHS, WEIGHTS, Colocation, check_shared_gpus
from megarl.weights.verify.canary import Canary

URL, OTHER, DEAF = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))
CUDA = ["trainer.device=cuda", "model.dtype=bfloat16"]
SHARED = ["rollout.engine=sglang", "rollout.placement=shared", *CUDA, "trainer.n_gpus_per_node=4"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What a server is told."""
    words: list[tuple[Any, ...]] = []

    class Server:
        def __init__(self, url: str, token: str, *, timeout_s: float) -> None:
            self.url = url
            words.append(("open", url, token))

        def __getattr__(self, what: str) -> Callable[..., None]:
            return lambda *given: words.append((what, *given))

        def prompt_log_probs(self, prompt_ids: tuple[int, ...], adapter: str | None) -> list[float]:
            if self.url == DEAF:
                raise ServerError(self.url, "/generate", 0, "no answer")
            return [-0.5 if self.url == URL else -1.5]

    monkeypatch.setattr(turns_module, "ServerClient", Server)
    return words


Said = list[tuple[Any, ...]]


@pytest.fixture
def colocation(said: Said) -> Colocation:
    return Colocation("secret", timeout_s=1.0)


def taken(colocation: Colocation, said: Said, *what: list[str]) -> Said:
    """What a server is told when it is to take memory, but for the beginning and the end of the connection."""
    del said[:]
    colocation.resume_memory(URL, *what)
    assert not said or (said[0][0], said[-1]) == ("open", ("close",))
    return said[1:-1]


def test_a_server_that_sleeps_writes_nothing_any_more_and_then_gives_all_back(
    colocation: Colocation, said: Said
) -> None:
    colocation.release_memory(URL)
    given = ("release_memory", (WEIGHTS, CACHE, GRAPHS))
    assert said == [("open", URL, "secret"), ("pause", "abort"), ("wait_until_idle",), given, ("close",)]


def test_it_takes_what_it_gave_and_serves_again_when_it_has_all(colocation: Colocation, said: Said) -> None:
    """Weights first.  Stock SGLang dies of taking what it never gave; a new process has given nothing."""
    colocation.release_memory(URL, [CACHE])
    assert taken(colocation, said) == [("resume_memory", (CACHE,)), ("resume",)]
    assert taken(colocation, said) == []
    colocation.release_memory(URL)
    assert taken(colocation, said, [WEIGHTS]) == [("resume_memory", (WEIGHTS,))]
    assert taken(colocation, said, [WEIGHTS]) == []
    assert taken(colocation, said, GENERATION) == [("resume_memory", (CACHE, GRAPHS)), ("resume",)]
    colocation.release_memory(URL)
    colocation.forget(URL)
    assert taken(colocation, said) == []


def test_what_was_given_is_not_given_twice(colocation: Colocation, said: Said) -> None:
    colocation.release_memory(URL, [CACHE])
    colocation.release_memory(URL)
    colocation.release_memory(URL)
    given = [words[1] for words in said if words[0] == "release_memory"]
    assert given == [(CACHE,), (WEIGHTS, GRAPHS)]
    assert ("resume_memory", (CACHE, WEIGHTS, GRAPHS)) in taken(colocation, said)


def test_a_canary_is_asked_of_each_and_what_differs_or_says_nothing_is_named(colocation: Colocation) -> None:
    found = colocation.examine(Canary((5, 6), (-0.5,)), [URL, OTHER, DEAF])
    assert found.keys() == {OTHER, DEAF}
    assert "log-probs that differ by" in found[OTHER]


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


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    "given",
    ["max_split_size_mb:64,expandable_segments:True", "expandable_segments : True", "backend: cudaMallocAsync"],
)
def test_ranks_whose_memory_servers_may_not_open_are_refused(
    name: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those beside servers that use the same GPUs at the same time."""
    beside = ["rollout.placement=separate", "rollout.first_gpu=0", "rollout.memory_fraction=0.3"]
    monkeypatch.setenv(name, given)
    for words in ([], beside):
        with pytest.raises(ValueError, match=f"^{name}={given} on .*: servers on the actor's GPUs map memory of its"):
            check_shared_gpus(load(*SHARED, *words))
    for words in (
        ["rollout.placement=separate"],
        ["actor.first_rank=2", "actor.num_ranks=2", "rollout.num_servers=2"],
        ["actor.lora.rank=8", "actor.lora.push=adapter"],
    ):
        check_shared_gpus(load(*SHARED, *words))
    monkeypatch.setenv(name, "expandable_segments:False,backend:native")
    check_shared_gpus(load(*SHARED))


def test_servers_beside_the_actor_take_any_way() -> None:
    where = ["actor.first_rank=2", "actor.num_ranks=2", "rollout.num_servers=2", "rollout.push=sharded"]
    check_shared_gpus(load(*SHARED, *where))
