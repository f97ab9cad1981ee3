"""A server as a teacher: its log-probs of given tokens and the most likely tokens there, on every kind of server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from spawn import DEVICE

from megarl.algo.distillation import NO_LOG_PROB
from megarl.batch import Batch
from megarl.roles.teacher_servers import TeacherServers
from megarl.rollout.client import ServerError

TOKENS = [5, 6, 7, 8, 30, 31, 2, 9]
CLOSE = 1e-3 if DEVICE == "cuda" else 1e-4
ROWS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
LEARNT = [[0, 0, 1, 1], [0, 0, 0], [0, 1, 0, 1, 1]]  # the second row is context alone


@pytest.fixture
def server(any_server: Any) -> Any:
    return any_server


@torch.inference_mode()
def log_softmax(reference: Any, ids: list[int]) -> torch.Tensor:
    """[tokens - 1, V] of transformers: row t - 1 is what is said of token t."""
    found: torch.Tensor = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return found


@pytest.mark.parametrize("start", [1, 4])
def test_scores_of_given_tokens_are_those_of_transformers(server: Any, reference: Any, start: int) -> None:
    scores = server.engine.scores(TOKENS, start, 4)
    theirs = log_softmax(reference, TOKENS)[start - 1 :]
    expected = theirs.gather(1, torch.tensor(TOKENS[start:])[:, None])[:, 0]
    assert scores.log_probs == pytest.approx(expected.tolist(), abs=CLOSE)
    for place, (ids, log_probs) in enumerate(zip(scores.top_ids, scores.top_log_probs, strict=True)):
        top = theirs[place].topk(4)
        assert log_probs == pytest.approx(top.values.tolist(), abs=CLOSE)
        assert theirs[place][ids].tolist() == pytest.approx(log_probs, abs=CLOSE)
    assert len(scores.top_ids) == len(TOKENS) - start


def test_without_a_number_no_top_tokens_come(server: Any) -> None:
    scores = server.engine.scores(TOKENS, 2)
    assert len(scores.log_probs) == len(TOKENS) - 2
    assert scores.top_ids == [[]] * len(scores.log_probs)


def test_columns_of_a_batch_are_those_of_the_learnt_tokens(server: Any, reference: Any) -> None:
    mask = torch.tensor([float(learnt) for row in LEARNT for learnt in row])
    batch = Batch(torch.tensor(sum(ROWS, [])), torch.tensor([len(row) for row in ROWS]), {"response_mask": mask})
    teacher = TeacherServers(lambda: server.urls, server.token, concurrency=2, timeout_s=240)
    log_probs = teacher.log_probs(batch)
    ids, top = teacher.top_log_probs(batch, 3, vocab_size=32)
    teacher.close()
    assert (ids.shape, ids.dtype, top.shape) == ((12, 3), torch.int32, (12, 3))
    for row, begin in ((0, 0), (2, 7)):
        theirs = log_softmax(reference, ROWS[row])
        for t, learnt in enumerate(LEARNT[row]):
            if learnt:
                said = theirs[t - 1]
                assert log_probs[begin + t].item() == pytest.approx(said[ROWS[row][t]].item(), abs=CLOSE)
                assert top[begin + t].tolist() == pytest.approx(said.topk(3).values.tolist(), abs=CLOSE)
                assert said[ids[begin + t].long()].tolist() == pytest.approx(top[begin + t].tolist(), abs=CLOSE)
    assert not log_probs[4:7].any() and (ids[4:7] == -1).all() and (top[4:7] == NO_LOG_PROB).all()


def test_the_longest_row_is_the_longest_that_the_server_scores(server: Any) -> None:
    """And a longer one, which the server refuses, is refused at the start."""
    most = server.engine.server_info()["max_req_input_len"] - 1
    assert len(server.engine.scores([5] * most, most - 1).log_probs) == 1
    with pytest.raises(ServerError):
        server.engine.scores([5] * (most + 1), most)
    teacher = TeacherServers(lambda: server.urls, server.token, timeout_s=240)
    teacher.require_room(most, "data.max_prompt_length")
    with pytest.raises(ValueError, match=f"data.max_prompt_length={most + 1}: the teacher's server .* at most {most}$"):
        teacher.require_room(most + 1, "data.max_prompt_length")
    teacher.close()


def test_tokens_that_the_policy_does_not_know_are_left_to_the_tail(server: Any) -> None:
    batch = Batch(torch.tensor(ROWS[0]), torch.tensor([4]), {"response_mask": torch.tensor([0.0, 1.0, 1.0, 1.0])})
    teacher = TeacherServers(lambda: server.urls, server.token, timeout_s=240)
    whole, _ = teacher.top_log_probs(batch, 32, vocab_size=32)
    ids, log_probs = teacher.top_log_probs(batch, 32, vocab_size=20)
    teacher.close()
    beyond = whole >= 20
    assert beyond[1:].sum() == 3 * 12
    assert torch.equal(ids, whole.masked_fill(beyond, -1))
    assert (log_probs[beyond] == NO_LOG_PROB).all()
