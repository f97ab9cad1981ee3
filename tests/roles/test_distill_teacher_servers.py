"""What a teacher's servers are asked again, and what they are not."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.batch import Batch
from megarl.roles import teacher_servers
from megarl.roles.teacher_servers import TeacherServers
from megarl.rollout.client import ServerError
from megarl.rollout.scores import Scores, parse_scores, score_body

BATCH = Batch(torch.tensor([1, 2, 3]), torch.tensor([3]), {"response_mask": torch.tensor([0.0, 1.0, 1.0])})


class Client:
    """Fails with these statuses before it answers."""

    def __init__(self, *statuses: int) -> None:
        self.left, self.asked, self.is_gone = list(statuses), 0, False

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


def teacher_of(*clients: Any) -> TeacherServers:
    teacher = TeacherServers(list, "")
    teacher._clients = list(clients)
    return teacher


def test_what_may_pass_is_asked_of_the_next_server(rests: list[float]) -> None:
    one, other = Client(503, 0), Client(429)
    assert teacher_of(one, other).log_probs(BATCH).tolist() == [0.0, -0.5, -0.5]
    assert (one.asked, other.asked) == (2, 2)
    assert rests == [1.0, 2.0, 4.0]


def test_a_refusal_is_final(rests: list[float]) -> None:
    client = Client(400)
    with pytest.raises(ServerError, match="answered 400: no"):
        teacher_of(client).log_probs(BATCH)
    assert client.asked == 1 and not rests


def test_the_last_try_raises(rests: list[float]) -> None:
    client = Client(*[503] * 9)
    with pytest.raises(ServerError, match="answered 503: no"):
        teacher_of(client).log_probs(BATCH)
    assert client.asked == 5 and len(rests) == 4


def test_requests_wait_until_a_server_that_died_is_there_again(rests: list[float]) -> None:
    """Longer than five tries; it comes back only if the driver looks after it meanwhile."""
    client = Client()
    client.is_gone = True

    def look_after() -> None:
        client.is_gone = client.asked <= 5

    teacher = teacher_of(client)
    teacher.comes_back_s, teacher.look_after = 600.0, look_after
    assert teacher.log_probs(BATCH).tolist() == [0.0, -0.5, -0.5]
    assert client.asked > 6


def test_one_refusal_ends_the_wait_for_the_others(rests: list[float]) -> None:
    gone, other = Client(), Client(400)
    gone.is_gone = True
    teacher = teacher_of(gone, other)
    teacher.comes_back_s = 600.0
    mask = BATCH.columns["response_mask"].repeat(2)
    two = Batch(BATCH.tokens.repeat(2), BATCH.lengths.repeat(2), {"response_mask": mask})
    with pytest.raises(ServerError, match="answered 400: no"):
        teacher.log_probs(two)


def test_a_server_that_may_not_start_again_ends_the_wait(rests: list[float]) -> None:
    def gone() -> None:
        raise RuntimeError("the server of teachers.math is gone")

    client = Client()
    client.is_gone = True
    teacher = teacher_of(client)
    teacher.comes_back_s, teacher.look_after = 600.0, gone
    with pytest.raises(RuntimeError, match="is gone"):
        teacher.log_probs(BATCH)


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
