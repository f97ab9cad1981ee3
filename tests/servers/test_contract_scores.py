"""What every kind of server says of given tokens, as a teacher, and of those that could be drawn; a reward model."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
import torch
from spawn import DEVICE
from tiny_server import BOTH, TOKEN, against, make_reward_model
from transformers import Qwen3ForSequenceClassification

from megarl.algo.distillation import NO_LOG_PROB
from megarl.rewards.scorer import Rewards
from megarl.rewards.services.judge import RewardModel
from megarl.rewards.services.limit import Limit
from megarl.roles.teacher_servers import TeacherServers
from megarl.rollout.client import ServerError
from megarl.rollout.engine_columns import EngineSupport
from megarl.rollout.protocol import Route, SamplingParams, auth_headers, generate_body, parse_replies
from megarl.samples.batch import Batch
from megarl.samples.sample import SUPPORT, Completion, Prompt, VersionSpan
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers

TOKENS = [5, 6, 7, 8, 30, 31, 2, 9]
CLOSE, CLOSE_SCORES = (1e-3, 1e-3) if DEVICE == "cuda" else (1e-4, 1e-5)
ROWS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
LEARNT = [[0, 0, 1, 1], [0, 0, 0], [0, 1, 0, 1, 1]]  # the second row is context alone


@pytest.fixture
def teacher(server: Any) -> Iterator[TeacherServers]:
    with closing(TeacherServers(lambda: server.urls, server.token, concurrency=2, timeout_s=240)) as teacher:
        yield teacher


@torch.inference_mode()
def log_softmax(reference: Any, ids: list[int]) -> torch.Tensor:
    """[tokens - 1, V] of transformers: row t - 1 is what is said of token t."""
    found: torch.Tensor = reference(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return found


@pytest.mark.parametrize("start", [1, 4])
@against(*BOTH, "sglang_old", "sglang_tp2")
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
    alone = server.engine.scores(TOKENS, start)
    assert alone.top_ids == [[]] * len(scores.log_probs), "nobody asked for the likeliest ones"
    assert alone.log_probs == pytest.approx(scores.log_probs, abs=CLOSE)


def test_columns_of_a_batch_are_those_of_the_learnt_tokens(teacher: TeacherServers, reference: Any) -> None:
    mask = torch.tensor([float(learnt) for row in LEARNT for learnt in row])
    batch = Batch(torch.tensor(sum(ROWS, [])), torch.tensor([len(row) for row in ROWS]), {"response_mask": mask})
    log_probs = teacher.log_probs(batch)
    ids, top = teacher.top_log_probs(batch, 3, vocab_size=32)
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


def test_the_longest_row_is_the_longest_that_the_server_scores(server: Any, teacher: TeacherServers) -> None:
    """And a longer one, which the server refuses, is refused at the start."""
    most = server.engine.server_info()["max_req_input_len"] - 1
    assert len(server.engine.scores([5] * most, most - 1).log_probs) == 1
    with pytest.raises(ServerError):
        server.engine.scores([5] * (most + 1), most)
    teacher.require_room(most, "data.max_prompt_length")
    with pytest.raises(ValueError, match=f"data.max_prompt_length={most + 1}: the teacher's server .* at most {most}$"):
        teacher.require_room(most + 1, "data.max_prompt_length")


def test_tokens_that_the_policy_does_not_know_are_left_to_the_tail(teacher: TeacherServers) -> None:
    batch = Batch(torch.tensor(ROWS[0]), torch.tensor([4]), {"response_mask": torch.tensor([0.0, 1.0, 1.0, 1.0])})
    whole, _ = teacher.top_log_probs(batch, 32, vocab_size=32)
    ids, log_probs = teacher.top_log_probs(batch, 32, vocab_size=20)
    beyond = whole >= 20
    assert beyond[1:].sum() == 3 * 12
    assert torch.equal(ids, whole.masked_fill(beyond, -1))
    assert (log_probs[beyond] == NO_LOG_PROB).all()


# ---- the tokens that could be drawn, where top-p and top-k narrow the distribution

PROMPT = ROWS[0]
NARROW = {"temperature": 0.8, "top_p": 0.7, "top_k": 20, "max_new_tokens": 12, "ignore_eos": True}
TOLD = [EngineSupport(0.7, 20)]


def completions(server, columns):
    found = []
    for seed in (4, 5):
        body = generate_body(PROMPT, 1, SamplingParams(**NARROW, sampling_seed=seed), uuid.uuid4().hex, columns=columns)
        reply = server.ask(Route.GENERATE, body)
        assert reply.status_code == 200, reply.text
        ((completion, *_),) = parse_replies(reply.json(), 1, num_asked=len(PROMPT), columns=columns)
        found.append(completion)
    return found


def test_the_support_of_each_token_and_log_probs_over_it(server, reference):
    for completion in completions(server, TOLD):
        column = completion.columns[SUPPORT]
        assert column.shape == (len(PROMPT) + 12, None)
        lists = column.lists()
        assert lists[: len(PROMPT)] == [[]] * len(PROMPT), "the request's tokens were not drawn"
        logits = log_softmax(reference, PROMPT + completion.token_ids)[len(PROMPT) - 1 :].double()
        log_p = (logits / NARROW["temperature"]).log_softmax(-1)
        for ids, token, log_prob, own in zip(
            lists[len(PROMPT) :], completion.token_ids, completion.log_probs, log_p, strict=True
        ):
            assert token in ids
            assert len(set(ids)) == len(ids)
            assert log_prob == pytest.approx(float(own[token] - own[ids].logsumexp(0)), abs=1e-4)
            # The likeliest, as long as those before have less than 0.7: but for the rounding at the border.
            p, order = own.exp().sort(descending=True)
            before = p.cumsum(0) - p
            # SGLang also keeps tokens that are as likely as the 20th.
            sure, possible = before < 0.7 - 1e-4, (before < 0.7 + 1e-4) & (p > p[19] * (1 - 1e-4))
            assert set(order[sure][:20].tolist()) <= set(ids) <= set(order[possible].tolist())


def test_without_the_wish_nothing_is_told_and_its_info_says_of_how_many_tokens_at_most(server):
    told, plain = completions(server, TOLD), completions(server, [])
    assert not [c for c in plain if c.columns]
    assert server.engine.server_info()["sampling_mask_max_tokens"] == (None if server.variant.engine == "hf" else 4096)
    if server.variant.engine == "hf":  # SGLang takes no seed of a request without deterministic inference
        assert [c.token_ids for c in told] == [c.token_ids for c in plain]


@against("sglang_old")
def test_a_server_that_rebuilds_the_support_after_the_draw_is_known_by_its_info(server):
    assert "sampling_mask_max_tokens" not in server.engine.server_info()


# ---- a reward model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_reward_model(tmp_path_factory.mktemp("reward"), seed=3)


@pytest.fixture(scope="module")
def url(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the reward model."""
    gpu = {"first_gpu": 0, "memory_fraction": 0.2} if DEVICE == "cuda" else {}
    launch = EngineLaunch("hf", folder, scores=True, max_running_requests=64, device=DEVICE, **gpu)
    with Servers([launch], TOKEN, tmp_path_factory.mktemp("logs")) as servers:
        servers.start()
        yield servers.urls[0]


@pytest.fixture(scope="module")
def expected(folder: str) -> dict[tuple[int, ...], float]:
    """transformers' own scores."""
    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return {ids: model(input_ids=torch.tensor([ids])).logits.item() for ids in ((5, 6, 7, 8, 1), (9, 4), (5,))}


def classify(url: str, body: object, token: str = TOKEN) -> httpx.Response:
    headers = auth_headers(token)
    return httpx.post(url + Route.CLASSIFY, json=body, headers=headers, timeout=240, trust_env=False)


def test_sequences_have_their_scores_alone_and_in_order(url: str, expected: dict[tuple[int, ...], float]) -> None:
    for ids, score in expected.items():
        reply = classify(url, {"input_ids": list(ids)})
        assert reply.status_code == 200, reply.text
        assert reply.json()["embedding"] == pytest.approx([score], abs=CLOSE_SCORES)
    reply = classify(url, {"input_ids": [list(ids) for ids in expected]})
    assert [one["embedding"][0] for one in reply.json()] == pytest.approx(list(expected.values()), abs=CLOSE_SCORES)


def test_a_wrong_key_is_refused(url: str) -> None:
    assert classify(url, {"input_ids": [5]}, token="another").status_code == 401


def rewards_of(url: str, folder: str, prompt: str, *answers: str, **how: Any) -> list[Any]:
    rewards = Rewards(
        ["model"], services={"model": lambda limit: RewardModel(folder, url, limit=limit, key=TOKEN)}, **how
    )
    completions = [Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text) for text in answers]
    return list(asyncio.run(asyncio.wait_for(rewards.score(Prompt("0-0", [1], prompt), completions), 240)))


def test_the_reward_is_the_score_of_question_and_answer(
    url: str, folder: str, expected: dict[tuple[int, ...], float]
) -> None:
    """The tiny tokenizer has no chat template, and one token a character: 5 to 8 are "3456"; 1 ends the text."""
    for result in rewards_of(url, folder, "34", "56", "56"):
        assert result.reward == pytest.approx(expected[5, 6, 7, 8, 1], abs=CLOSE_SCORES), result


def test_a_conversation_that_is_too_long_is_unscored_and_hurts_nobody(url: str, folder: str) -> None:
    first, second = rewards_of(url, folder, "3", "3" * 5000, "4", make_limit=lambda: Limit(retries=0))
    assert isinstance(first, str) and "/classify answered 400" in first
    assert not isinstance(second, str)
