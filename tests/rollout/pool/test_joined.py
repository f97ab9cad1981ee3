"""Short answers travel in one request; each gets what it would get alone."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tiny_server import Served

from megarl.rollout.pool import joined
from megarl.rollout.pool.joined import SHORT, Joined
from megarl.rollout.pool.pool import EnginePool
from megarl.rollout.pool.pool_server import FailedInside, Refused, Senseless, ServerFailed
from megarl.rollout.protocol import SamplingParams, generate_body


def body(prompt: Sequence[int], seed: int, salt: str | None = None) -> dict[str, Any]:
    return generate_body(prompt, 1, SamplingParams(sampling_seed=seed), f"rid-{seed}", salt)


class Post:
    """Answers a body by its seeds; `fails` is raised instead."""

    def __init__(self, fails: Exception | None = None, hangs: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        self.fails, self.hangs, self.was_cancelled = fails, hangs, False

    async def __call__(self, url: str, body: dict[str, Any], most_bytes: int) -> Any:
        self.sent.append(body | {"url": url, "most": most_bytes})
        try:
            await asyncio.sleep(600 if self.hangs else 0)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.fails is not None:
            raise self.fails
        params = body["sampling_params"]
        return [each["sampling_seed"] for each in params] if isinstance(params, list) else params["sampling_seed"]


async def ask_all(post: Post, *asked: tuple[str, dict[str, Any]], is_crowded: bool = False) -> list[Any]:
    requests = Joined(post, lambda: is_crowded)
    tasks = [asyncio.create_task(requests.ask(url, each, 10)) for url, each in asked]
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    return [reply[0] if isinstance(reply, tuple) else reply for reply in replies]


ASKED = [("a", body([1, 2], 5)), ("a", body([1, 2], 6)), ("a", body([3], 7)), ("b", body([1, 2], 8))]


def test_requests_to_a_server_that_start_at_once_are_one() -> None:
    post = Post()
    assert asyncio.run(ask_all(post, *ASKED)) == [5, 6, 7, 8]
    assert [(sent["url"], sent["input_ids"], sent["rid"], sent["most"]) for sent in post.sent] == [
        ("a", [[1, 2], [1, 2], [3]], ["rid-5", "rid-6", "rid-7"], 30),
        ("b", [1, 2], "rid-8", 10),
    ]


def test_while_others_wait_for_slots_the_answers_to_one_prompt_are_one() -> None:
    """A slot is not to wait for answers to other prompts, which may be longer."""
    post = Post()
    assert asyncio.run(ask_all(post, *ASKED, is_crowded=True)) == [5, 6, 7, 8]
    assert [(sent["url"], sent["input_ids"], sent["rid"], sent["most"]) for sent in post.sent] == [
        ("a", [[1, 2], [1, 2]], ["rid-5", "rid-6"], 20),
        ("a", [3], "rid-7", 10),
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
def test_a_prompt_with_which_a_server_fails_fails_alone(kind: type[Exception]) -> None:
    post = Fails(kind("too long"))
    *well, refused, other = asyncio.run(ask_all(post, *ASKED))
    assert [*well, other] == [5, 6, 8] and str(refused) == "too long"
    assert [sent["input_ids"] for sent in post.sent] == [[[1, 2], [1, 2], [3]], [1, 2], [[1, 2], [1, 2]], [3]]


def test_a_server_that_died_is_not_asked_again_prompt_by_prompt() -> None:
    """It may have died of one of them: each has failed once."""
    post = Fails(ServerFailed("the connection ended"))
    failed = asyncio.run(ask_all(post, *ASKED[:3]))
    assert [str(each) for each in failed] == ["the connection ended"] * 3 and len(post.sent) == 1


def test_requests_are_as_few_as_their_limits_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MOST_PARTS", 3)
    monkeypatch.setattr(joined, "MOST_TOKENS", 6)
    post = Post()
    prompts = [[1], [1], [2], [3, 3, 3], [4, 4, 4], [5] * 9, [6], [7], *[[8]] * 5]
    asked = [("a", body(prompt, seed)) for seed, prompt in enumerate(prompts)]
    assert asyncio.run(ask_all(post, *asked)) == list(range(13))
    sizes = [len(sent["rid"]) if isinstance(sent["rid"], list) else 1 for sent in post.sent]
    assert sizes == [3, 2, 1, 2, 3, 2], "many answers to one prompt are several requests, too"


def test_what_nobody_waits_for_is_not_sent() -> None:
    post = Post()

    async def story() -> list[Any]:
        requests = Joined(post)
        tasks = [asyncio.create_task(requests.ask("a", body([seed], seed), 10)) for seed in (5, 6, 7)]
        await asyncio.sleep(0)  # they have asked, and nothing is sent yet
        tasks[0].cancel()
        found = await asyncio.gather(*tasks[1:])
        assert not requests.beside("rid-6") - {"rid-6"}, "it has ended"
        return [reply for reply, _ in found]

    assert asyncio.run(story()) == [6, 7]
    assert [sent["rid"] for sent in post.sent] == [["rid-6", "rid-7"]]


def test_who_travels_together_is_known_while_it_does() -> None:
    post = Post(hangs=True)

    async def story() -> None:
        requests = Joined(post)
        tasks = [asyncio.create_task(requests.ask("a", body([seed], seed), 10)) for seed in (5, 6)]
        while not post.sent:
            await asyncio.sleep(0)
        assert requests.beside("rid-5") == {"rid-5", "rid-6"}
        assert requests.beside("rid-9") == {"rid-9"}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(story())


def test_later_requests_are_others() -> None:
    post = Post()

    async def twice() -> None:
        requests = Joined(post)
        assert (await requests.ask("a", body([1], 5), 10))[0] == 5
        assert (await requests.ask("a", body([1], 6), 10))[0] == 6

    asyncio.run(twice())
    assert [sent["rid"] for sent in post.sent] == ["rid-5", "rid-6"]


def test_where_the_request_fails_each_of_them_has_failed() -> None:
    failed = asyncio.run(ask_all(Post(ServerFailed("no")), ("a", body([1], 5)), ("a", body([1], 6))))
    assert [str(error) for error in failed] == ["no", "no"]


def test_a_reply_of_another_number_is_a_reply_to_none_of_them() -> None:
    class Short(Post):
        async def __call__(self, url: str, body: dict[str, Any], most_bytes: int) -> Any:
            return (await super().__call__(url, body, most_bytes))[:1]

    for failed in asyncio.run(ask_all(Short(), ("a", body([1], 5)), ("a", body([1], 6)))):
        assert str(failed) == "the reply to 2 requests holds 1 completions"


def test_a_reply_that_is_one_object_is_none_to_several() -> None:
    class One(Post):
        async def __call__(self, url: str, body: dict[str, Any], most_bytes: int) -> Any:
            replies = await super().__call__(url, body, most_bytes)
            return {"of": replies[0]} if isinstance(replies, list) else replies

    failed = asyncio.run(ask_all(One(), ("a", body([1], 5)), ("a", body([1], 6))))
    assert [str(each) for each in failed] == ["the reply to 2 requests holds no list of completions"] * 2
    assert asyncio.run(ask_all(One(), ("a", body([1], 5)), ("a", body([2], 6)))) == [5, 6], "each prompt again, alone"


def test_one_that_is_cancelled_leaves_the_others_and_the_last_one_ends_the_request() -> None:
    post = Post(hangs=True)

    async def story() -> None:
        requests = Joined(post)
        tasks = [asyncio.create_task(requests.ask("a", body([1], seed), 10)) for seed in (5, 6)]
        while not post.sent:
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        await asyncio.sleep(0.05)
        assert not post.was_cancelled and not tasks[1].done()
        tasks[1].cancel()
        await asyncio.wait(tasks)
        while not post.was_cancelled:
            await asyncio.sleep(0)

    asyncio.run(story())


def test_bodies_that_want_other_things_are_not_joined() -> None:
    """A greedy answer beside others wants no columns of the support, or of experts."""
    post, wanted = Post(), {"return_sampling_mask": True}
    asked = [("a", body([1], seed) | wanted) for seed in (5, 6)]
    assert asyncio.run(ask_all(post, *asked, ("a", body([1], 7)))) == [5, 6, 7]
    assert [isinstance(sent["sampling_params"], list) for sent in post.sent] == [True, False]


@pytest.mark.parametrize("greedy", [False, True])
def test_the_server_writes_in_one_request_what_it_writes_in_several(server: Served, greedy: bool) -> None:
    """Prompts of several lengths, seeds of their own, and greedy ones beside them."""
    params = [SamplingParams(sampling_seed=seed, max_new_tokens=12) for seed in range(5)]
    params += [SamplingParams(temperature=0.0, max_new_tokens=SHORT)] * greedy
    prompts = ([7, 8, 9], [5], [9, 8, 7, 6, 5, 4, 3])

    async def written(joins: bool) -> list[tuple[list[int], list[float]]]:
        async with EnginePool([server.url], server.token, timeout_s=120, joins=joins) as pool:
            found = await asyncio.gather(*(pool.generate(prompt, each) for prompt in prompts for each in params))
            return [(piece.completion.token_ids, piece.completion.log_probs) for piece in found]

    together, alone = asyncio.run(written(True)), asyncio.run(written(False))
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    for (_, ours), (_, theirs) in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
