"""What a server of a reward model must answer, and the reward that asks it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
import torch
from spawn import DEVICE
from tiny_server import TOKEN, make_reward_model
from transformers import Qwen3ForSequenceClassification

from megarl.rewards.scorer import Rewards
from megarl.rewards.services.limit import Limit
from megarl.rewards.services.model import RewardModel
from megarl.rollout.protocol import Route, auth_headers
from megarl.sample import Completion, Prompt, VersionSpan
from megarl.servers.launch import EngineLaunch
from megarl.servers.supervisor import Servers

CLOSE = 1e-3 if DEVICE == "cuda" else 1e-5


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
        return {ids: model(input_ids=torch.tensor([ids])).logits.item() for ids in ((5, 6, 7, 8), (9, 4), (5,))}


def classify(url: str, body: object, token: str = TOKEN) -> httpx.Response:
    headers = auth_headers(token)
    return httpx.post(url + Route.CLASSIFY, json=body, headers=headers, timeout=240, trust_env=False)


def test_a_sequence_has_its_score(url: str, expected: dict[tuple[int, ...], float]) -> None:
    for ids, score in expected.items():
        reply = classify(url, {"input_ids": list(ids)})
        assert reply.status_code == 200, reply.text
        assert reply.json()["embedding"] == pytest.approx([score], abs=CLOSE)


def test_several_sequences_have_theirs_in_order(url: str, expected: dict[tuple[int, ...], float]) -> None:
    reply = classify(url, {"input_ids": [list(ids) for ids in expected]})
    assert [one["embedding"][0] for one in reply.json()] == pytest.approx(list(expected.values()), abs=CLOSE)


def test_a_wrong_key_is_refused(url: str) -> None:
    assert classify(url, {"input_ids": [5]}, token="another").status_code == 401


def test_the_reward_is_the_score_of_question_and_answer(
    url: str, folder: str, expected: dict[tuple[int, ...], float]
) -> None:
    """The tiny tokenizer has no chat template, and one token a character: 5 to 8 are "3456"."""
    rewards = Rewards(["model"], services={"model": lambda limit: RewardModel(folder, url, limit=limit, key=TOKEN)})
    answers = [Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text) for text in ("56", "56")]

    async def score() -> list[object]:
        return list(await asyncio.wait_for(rewards.score(Prompt("0-0", [1], "34"), answers), 240))

    for result in asyncio.run(score()):
        assert not isinstance(result, str), result
        assert result.reward == pytest.approx(expected[5, 6, 7, 8], abs=CLOSE)


def test_a_conversation_that_is_too_long_is_unscored_and_hurts_nobody(url: str, folder: str) -> None:
    model = {"model": lambda limit: RewardModel(folder, url, limit=limit, key=TOKEN)}
    rewards = Rewards(["model"], services=model, make_limit=lambda: Limit(retries=0))
    answers = [Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text) for text in ("3" * 5000, "4")]

    async def score() -> list[object]:
        return list(await asyncio.wait_for(rewards.score(Prompt("0-0", [1], "3"), answers), 240))

    first, second = asyncio.run(score())
    assert isinstance(first, str) and "/classify answered 400" in first
    assert not isinstance(second, str)
