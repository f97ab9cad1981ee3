"""Short answers travel in one request; each gets what it would get alone."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pools import until
from tiny_server import Served

from megarl.rollout.pool import joined
from megarl.rollout.pool.joined import SHORT, Joined
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import FailedInside, PieceRequest, Refused, Senseless, ServerFailed
from megarl.rollout.protocol import SamplingParams, generate_body
from megarl.rollout.settings import GenerationSettings
from megarl.samples.sample import Completion


def body(prompt: Sequence[int], seed: int, salt: str | None = None) -> dict[str, Any]:
    return generate_body(prompt, 1, SamplingParams(sampling_seed=seed), f"rid-{seed}", salt)


class Post:
    """Answers a body by its seeds."""

    def __init__(self, hangs: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        self.hangs, self.was_cancelled = hangs, False

    async def __call__(self, url: str, body: dict[str, Any], most_bytes: int) -> Any:
        self.sent.append(body | {"url": url, "most": most_bytes})
        try:
            await asyncio.sleep(600 if self.hangs else 0)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        params = body["sampling_params"]
        return [each["sampling_seed"] for each in params] if isinstance(params, list) else params["sampling_seed"]


async def ask_all(post: Post, *asked: tuple[str, dict[str, Any]], requests: Joined | None = None) -> list[Any]:
    requests = requests or Joined(post)
    tasks = [asyncio.create_task(requests.ask(url, each, 10)) for url, each in asked]
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    return [reply[0] if isinstance(reply, tuple) else reply for reply in replies]


ASKED = [("a", body([1, 2], 5)), ("a", body([1, 2], 6)), ("a", body([3], 7)), ("b", body([1, 2], 8))]


async def test_requests_to_a_server_that_start_at_once_are_one() -> None:
    post = Post()
    assert await ask_all(post, *ASKED) == [5, 6, 7, 8]
    assert [(sent["url"], sent["input_ids"], sent["rid"], sent["most"]) for sent in post.sent] == [
        ("a", [[1, 2], [1, 2], [3]], ["rid-5", "rid-6", "rid-7"], 30),
        ("b", [1, 2], "rid-8", 10),
    ]


class Fails(Post):
    """With `error` where one of the prompts is [3]."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def __call__(self, url: str, body: dict[str, Any], most_bytes: int) -> Any:
        replies = await super().__call__(url, body, most_bytes)
        if 3 in body["input_ids"] or [3] in body["input_ids"]:
            raise self.error
        return replies


@pytest.mark.parametrize("kind", [Refused, FailedInside, Senseless])
async def test_a_prompt_with_which_a_server_fails_fails_alone_and_what_was_sent_again_counts(
    kind: type[Exception],
) -> None:
    post = Fails(kind("too long"))
    requests = Joined(post)
    *well, refused, other = await ask_all(post, *ASKED, requests=requests)
    assert [*well, other] == [5, 6, 8] and str(refused) == "too long"
    assert requests.num_failed == (kind is not Refused), "as a prompt that was sent alone"
    assert [sent["input_ids"] for sent in post.sent] == [[[1, 2], [1, 2], [3]], [1, 2], [[1, 2], [1, 2]], [3]]


async def test_a_server_that_died_is_not_asked_again_prompt_by_prompt() -> None:
    """It may have died of one of them: each has failed once."""
    post = Fails(ServerFailed("the connection ended"))
    failed = await ask_all(post, *ASKED[:3])
    assert [str(each) for each in failed] == ["the connection ended"] * 3 and len(post.sent) == 1


async def test_requests_are_as_few_as_their_limits_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MOST_PARTS", 3)
    monkeypatch.setattr(joined, "MOST_TOKENS", 6)
    post = Post()
    prompts = [[1], [1], [2], [3, 3, 3], [4, 4, 4], [5] * 9, [6], [7], *[[8]] * 5]
    asked = [("a", body(prompt, seed)) for seed, prompt in enumerate(prompts)]
    assert await ask_all(post, *asked) == list(range(13))
    sizes = [len(sent["rid"]) if isinstance(sent["rid"], list) else 1 for sent in post.sent]
    assert sizes == [3, 2, 1, 2, 3, 2], "many answers to one prompt are several requests, too"


def begun(requests: Joined, *seeds: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(requests.ask("a", body([seed], seed), 10)) for seed in seeds]


async def test_what_nobody_waits_for_is_not_sent() -> None:
    post = Post()
    requests = Joined(post)
    first, *others = begun(requests, 5, 6, 7)
    await asyncio.sleep(0)  # they have asked, and nothing is sent yet
    first.cancel()
    assert [reply for reply, _ in await asyncio.gather(*others)] == [6, 7]
    assert requests.beside("rid-6") == {"rid-6"}, "it has ended"
    assert [sent["rid"] for sent in post.sent] == [["rid-6", "rid-7"]]
    assert (await requests.ask("a", body([1], 8), 10))[0] == 8, "a later request is another one"
    assert post.sent[-1]["rid"] == "rid-8"


async def test_one_that_is_cancelled_leaves_the_others_and_the_last_one_ends_the_request() -> None:
    post = Post(hangs=True)
    requests = Joined(post)
    first, last = begun(requests, 5, 6)
    await until(lambda: post.sent)
    assert requests.beside("rid-5") == {"rid-5", "rid-6"}
    assert requests.beside("rid-9") == {"rid-9"}
    first.cancel()
    await asyncio.wait([first])
    await asyncio.sleep(0.05)
    assert not post.was_cancelled and not last.done()
    last.cancel()
    await until(lambda: post.was_cancelled)


@pytest.mark.parametrize(
    ("answer", "said"),
    [(lambda replies: replies[:1], "1 completions"), (lambda replies: {"of": replies}, "no list of completions")],
    ids=["too_few", "no_list"],
)
async def test_a_reply_of_another_form_is_a_reply_to_none_of_them(answer: Callable[..., Any], said: str) -> None:
    class Other(Post):
        async def __call__(self, url: str, body: dict[str, Any], most_bytes: int) -> Any:
            replies = await super().__call__(url, body, most_bytes)
            return answer(replies) if isinstance(replies, list) else replies

    failed = await ask_all(Other(), ("a", body([1], 5)), ("a", body([1], 6)))
    assert [str(each) for each in failed] == [f"the reply to 2 requests holds {said}"] * 2
    assert await ask_all(Other(), ("a", body([1], 5)), ("a", body([2], 6))) == [5, 6], "each prompt again, alone"


async def test_bodies_that_want_other_things_are_not_joined() -> None:
    """A greedy answer beside others wants no columns of the support, or of experts."""
    post, wanted = Post(), {"return_sampling_mask": True}
    asked = [("a", body([1], seed) | wanted) for seed in (5, 6)]
    assert await ask_all(post, *asked, ("a", body([1], 7))) == [5, 6, 7]
    assert [isinstance(sent["sampling_params"], list) for sent in post.sent] == [True, False]


async def test_the_server_writes_in_one_request_what_it_writes_in_several(server: Served) -> None:
    """Prompts of several lengths, seeds of their own, and greedy ones beside them."""
    params = [SamplingParams(sampling_seed=seed, max_new_tokens=12) for seed in range(5)]
    params.append(SamplingParams(temperature=0.0, max_new_tokens=SHORT))
    prompts = ([7, 8, 9], [5], [9, 8, 7, 6, 5, 4, 3])

    async def written(joins: bool) -> list[Completion]:
        async with EnginePool([server.url], server.token, GenerationSettings(timeout_s=120, joins=joins)) as pool:
            found = await asyncio.gather(
                *(pool.generate(PieceRequest(prompt, each)) for prompt in prompts for each in params)
            )
            return [piece.completion for piece in found]

    for ours, theirs in zip(await written(True), await written(False), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
