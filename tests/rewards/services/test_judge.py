"""A judge behind a real endpoint of a few lines: what it is asked, how it is read, and how it fails; reward models."""

import asyncio
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from answers import completion
from endless_servers import Behaviour, drip, endless, flood
from fake_servers import Writer, serving
from tiny_server import write_tokenizer
from transformers import AutoTokenizer
from virtual_clock import VirtualClock

from megarl.rewards.result import Outcome, RewardResult
from megarl.rewards.scorer import Rewards
from megarl.rewards.services.judge import Judge, RewardModel, _score_in, filled, question_of, reader
from megarl.rewards.services.limit import Limit, ServiceError
from megarl.samples.sample import Prompt

PROMPT = Prompt("0-3", [1], [{"role": "user", "content": "How are you?"}], "well")
TEMPLATE = "Is {answer} a reply to {question}, as {truth}? Reply with {score}"
Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]]


def said(text: str | None) -> Reply:
    return 200, {"choices": [{"message": {"content": text}}]}


class Endpoint(Writer):
    """Gives these replies in turn, the last one for ever."""

    routes = ("/v1/chat/completions",)

    def __init__(self, *replies: Reply) -> None:
        super().__init__()
        self.replies, self.bodies, self.keys = list(replies), list[Any](), list[str | None]()

    async def __call__(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        status, body, headers = (*(self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]), {})[:3]
        return web.json_response(body, status=status, headers=headers)


def judge(url: str, *texts: str, retries: int = 4, **how: Any) -> Awaitable[list[Outcome]]:
    """The outcomes of a group that the judge scores, on a clock that does not wait."""
    clock = how.pop("clock", VirtualClock())
    settings = {"model": "wise", "prompt": TEMPLATE, "read": r"Score: (-?\d+)", "votes": 1}
    made = partial(Judge, **{"url": url, "request": {}} | settings | how)
    limit = partial(Limit, 4, None, retries, clock=clock, sleep=clock.at_once, draw=lambda: 0.0)
    rewards = Rewards(["judge"], make_limit=limit, services={"judge": made})
    return rewards.score(PROMPT, [completion(text) for text in texts])


def outcomes(endpoint: Endpoint, *texts: str, **how: Any) -> list[Outcome]:
    async def test() -> list[Outcome]:
        async with serving(endpoint) as ((url,), _), asyncio.timeout(240):
            return await judge(f"{url}/v1", *texts, **how)

    return asyncio.run(test())


def test_the_judge_sees_question_answer_and_truth_and_its_number_is_the_reward() -> None:
    endpoint = Endpoint(said("Score: 3? No.\nScore: 7"))
    assert outcomes(endpoint, "Fine {truth}", request={"temperature": 0}, key="secret") == [RewardResult(7.0)]
    (body,) = endpoint.bodies
    asked = "Is Fine {truth} a reply to How are you?, as well? Reply with {score}"
    assert body == {"model": "wise", "messages": [{"role": "user", "content": asked}], "temperature": 0}
    assert endpoint.keys == ["Bearer secret"]


def test_the_mean_of_the_votes_counts_and_one_that_cannot_be_read_does_not() -> None:
    endpoint = Endpoint(said("Score: 1"), said("Score: 4"), said("I will not say"))
    assert outcomes(endpoint, "Fine", votes=3, retries=0) == [RewardResult(2.5, {"votes": 2.0})]
    assert len(endpoint.bodies) == 3


def test_a_busy_judge_is_asked_again_when_it_says_so() -> None:
    clock = VirtualClock()
    endpoint = Endpoint((429, {}, {"Retry-After": "17"}), (503, {}), said("Score: 2"))
    assert outcomes(endpoint, "Fine", clock=clock) == [RewardResult(2.0)]
    assert clock.slept == [17.0, 2.0]


def test_a_judge_that_cannot_be_read_is_asked_again() -> None:
    endpoint = Endpoint(said("Hm."), said(None), (200, {"error": "none"}), said("Score: -2"))
    assert outcomes(endpoint, "Fine") == [RewardResult(-2.0)]
    assert endpoint.keys == [None] * 4


@pytest.mark.parametrize(
    ("reply", "tries", "reason"),
    [
        ((500, {"error": "out of order"}), 3, 'answered 500: {"error": "out of order"}'),
        ((401, {"error": "wrong key"}), 1, 'answered 401: {"error": "wrong key"}'),
        (said("I will not say"), 3, "no number that reward.judge.read finds: 'I will not say'"),
        ((200, {"choices": []}), 3, "the judge's reply has no answer: {'choices': []}"),
    ],
)
def test_what_the_judge_cannot_say_is_unscored(reply: Reply, tries: int, reason: str) -> None:
    endpoint = Endpoint(reply)
    (outcome,) = outcomes(endpoint, "Fine", retries=2)
    assert isinstance(outcome, str) and outcome.startswith("reward judge, sample 0-3#0: ") and reason in outcome
    assert len(endpoint.bodies) == tries


def test_connections_are_closed_when_the_loop_ends_and_a_judge_that_is_away_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcomes(Endpoint(said("Score: 1")), "Fine", "Well")
    (outcome,) = asyncio.run(asyncio.wait_for(judge("http://127.0.0.1:9/v1", "Fine", retries=1), 240))
    assert isinstance(outcome, str) and "127.0.0.1:9/v1/chat/completions: ClientConnectorError" in outcome
    assert "Unclosed" not in caplog.text


def test_a_template_needs_the_truth_only_where_it_names_it_and_shows_messages_with_their_roles() -> None:
    bare = Prompt("0-0", [1], "x")
    assert filled('{"a": "{answer}"}', bare, completion("{question}")) == '{"a": "{question}"}'
    with pytest.raises(ValueError, match="the prompt has no ground truth"):
        filled("{truth}", bare, completion("y"))
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert question_of(Prompt("0-0", [1], messages)) == "system: Be kind.\nuser: Hi"


@pytest.mark.parametrize(
    ("read", "text", "number"),
    [
        (r"(?i)score:?\s*(-?\d+(?:\.\d+)?)", "SCORE 0.5", 0.5),
        (r"Score: (\S+)", "Score: 4 Score: four", 4.0),
        (r"Score: (\S+)", "Score: nan", None),
        (r"Score: (\d)", "", None),
        ("json:score", 'I see {this}. {"score": 1} {"score": {"score": 3}} {"why": {}}', 1.0),
        ("json:score", '```json\n{"score": "2.5"}\n```', 2.5),
        ("json:score", '{"score": 1', None),
        ("json:score", "[1]", None),
    ],
)
def test_the_last_number_that_fits_is_read(read: str, text: str, number: float | None) -> None:
    assert reader(read)(text) == number


@pytest.mark.parametrize(
    ("behave", "timeout_s", "said"),
    [(drip, 0.3, "no answer within 0.3 s"), (flood, 600.0, "more than 4,202,496 bytes")],
)
def test_a_judge_whose_reply_does_not_end_has_a_limit_of_time_and_of_bytes(
    behave: Behaviour, timeout_s: float, said: str
) -> None:
    """4 MiB, and 512 bytes for each of 16 tokens."""

    async def ask(url: str) -> None:
        limit = Limit(1, retries=0, timeout_s=timeout_s)
        await Judge(url, "wise", TEMPLATE, r"(\d)", 1, {"max_tokens": 16}, limit=limit)(PROMPT, completion("well"))

    with endless(behave) as url, pytest.raises(ServiceError, match=said):
        asyncio.run(ask(url))


# how a conversation is written for a reward model; tests/servers/test_contract_scores.py asks real ones


CHAT_TEMPLATE = "{% for m in messages %}{{ '?' if m.role == 'user' else '=' }}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def written(folder: Path, text: str | list[dict[str, str]]) -> str:
    ids = RewardModel(str(folder), "http://h", limit=Limit()).token_ids(Prompt("0-0", [1], text), completion("46"))
    return str(AutoTokenizer.from_pretrained(folder).decode(ids))


def test_its_own_template_writes_the_conversation(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert written(folder, "12+34") == "?12+34=46"
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert written(folder, [*messages, {"role": "user", "content": "12+34"}]) == "?1+1=2?12+34=46"


def test_without_a_template_question_and_answer_are_joined_and_ended(folder: Path) -> None:
    assert written(folder, "12+34=") == "12+34=46" + AutoTokenizer.from_pretrained(folder).eos_token


def test_a_reply_without_a_score_is_told() -> None:
    assert _score_in({"embedding": [0.5, 1.0]}) == 0.5
    for reply in ([], {"embedding": []}, {"embedding": None}, "no"):
        with pytest.raises(ServiceError, match="the reward model's reply has no score"):
            _score_in(reply)
