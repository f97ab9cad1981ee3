"""What a teacher's servers are asked again, and what they are not."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.roles import teacher_servers
from megarl.roles.teacher_servers import TeacherServers
from megarl.rollout.client import Scores, ServerError, parse_scores, score_body
from megarl.samples.batch import Batch

BATCH = Batch(torch.tensor([1, 2, 3]), torch.tensor([3]), {"response_mask": torch.tensor([0.0, 1.0, 1.0])})


class Client:
    """Fails with these statuses before it answers."""

    def __init__(self, *statuses: int, is_gone: bool = False) -> None:
        self.left, self.asked, self.is_gone = list(statuses), 0, is_gone

    def scores(self, token_ids: list[int], start: int, top_k: int) -> Scores:
        self.asked += 1
        if self.is_gone:
            raise ServerError("http://teacher", "/generate", 0, "no")
        if self.left:
            raise ServerError("http://teacher", "/generate", self.left.pop(0), "no")
        return Scores(
            [-0.5] * (len(token_ids) - start), [[]] * (len(token_ids) - start), [[]] * (len(token_ids) - start)
        )


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(teacher_servers, "time", SimpleNamespace(sleep=found.append, monotonic=time.monotonic))
    return found


def teacher_of(*clients: Any, look_after: Callable[[], None] | None = None) -> TeacherServers:
    """`look_after`: what the driver does while requests wait for servers that are gone."""
    teacher = TeacherServers(list, "")
    teacher._clients = list(clients)
    if look_after is not None:
        teacher.comes_back_s, teacher.look_after = 600.0, look_after
    return teacher


def test_what_may_pass_is_asked_of_the_next_server(rests: list[float]) -> None:
    one, other = Client(503, 0), Client(429)
    assert teacher_of(one, other).log_probs(BATCH).tolist() == [0.0, -0.5, -0.5]
    assert (one.asked, other.asked) == (2, 2)
    assert rests == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(("statuses", "asked"), [((400,), 1), ((503,) * 9, 5)])
def test_a_refusal_is_final_and_so_is_the_last_try(rests: list[float], statuses: tuple[int, ...], asked: int) -> None:
    client = Client(*statuses)
    with pytest.raises(ServerError, match=f"answered {statuses[0]}: no"):
        teacher_of(client).log_probs(BATCH)
    assert client.asked == asked and len(rests) == asked - 1


def test_requests_wait_until_a_server_that_died_is_there_again(rests: list[float]) -> None:
    """Longer than five tries; it comes back only if the driver looks after it meanwhile."""
    client = Client(is_gone=True)

    def look_after() -> None:
        client.is_gone = client.asked <= 5

    teacher = teacher_of(client, look_after=look_after)
    assert teacher.log_probs(BATCH).tolist() == [0.0, -0.5, -0.5]
    assert client.asked > 6


def test_one_refusal_or_a_server_that_may_not_start_again_ends_the_wait_for_the_others(rests: list[float]) -> None:
    def gone() -> None:
        raise RuntimeError("the server of teachers.math is gone")

    two = Batch(BATCH.tokens.repeat(2), BATCH.lengths.repeat(2), {"response_mask": torch.tensor([0.0, 1.0, 1.0] * 2)})
    with pytest.raises(ServerError, match="answered 400: no"):
        teacher_of(Client(is_gone=True), Client(400), look_after=lambda: None).log_probs(two)
    with pytest.raises(RuntimeError, match="is gone"):
        teacher_of(Client(is_gone=True), look_after=gone).log_probs(BATCH)


def reply(log_probs: list[list[Any]], top: list[Any] | None = None) -> dict[str, Any]:
    meta: dict[str, Any] = {"input_token_logprobs": log_probs}
    return {"meta_info": meta if top is None else meta | {"input_top_logprobs": top}}


def test_the_first_entry_of_a_reply_is_what_no_token_predicts() -> None:
    body = score_body([5, 6, 7], 2, 2)
    assert (body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]) == ([5, 6, 7], 1, 2)
    found = parse_scores(reply([[None, 6, None], [-0.5, 7, None]], [None, [[-0.25, 9, None], [-0.5, 7, None]]]), 1, 2)
    assert found == Scores([-0.5], [[9, 7]], [[-0.25, -0.5]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "has no log-probs of its prompt"),
        (reply([[None, 6, None]]), "has no log-probs of its prompt"),
        (reply([[None, 6, None]], [None]), "0 log-probs and 0 lists of tokens; expected 1 with 2 tokens each"),
        (reply([[None, 6, None], [-0.5, 7, None]], [None, [[-0.25, 9, None]]]), "expected 1 with 2 tokens each"),
        (reply([[None, 6, None], [None, 7, None]], [None, [[-0.2, 9, None], [-1, 7, None]]]), "it is not a number"),
        (reply([[None, 6, None], [-0.5, 7, None]], [None, [[-0.2, 9, None], [None, 7, None]]]), "it is not a number"),
    ],
)
def test_a_reply_of_another_shape_is_an_error(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_scores(given, 1, 2)
