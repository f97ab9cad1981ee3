"""Sends short requests that start at once as one request: an answer of a few tokens costs less than its HTTP.

All get their replies, and give back their slots, when the last one is generated.  So while others wait for a slot, only
the answers to one prompt travel together, which end at about the same time.  A cancelled one is generated to its end,
unless all others are cancelled too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from megarl.rollout.pool.pool_server import FailedInside, Refused, Senseless
from megarl.rollout.protocol import joined_body, joint_key

logger = logging.getLogger("megarl.rollout.pool.pool")

# An answer of at most so many tokens travels with others: the shortest waits for so many steps of decoding at most,
# where the server runs all of them at a time.
SHORT = 64
MOST_PARTS, MOST_TOKENS = 512, 1 << 17  # of a request: completions, and tokens of their prompts
MOST_BYTES = 1 << 30  # of a reply
_OF_ONE = (Refused, Senseless, FailedInside)  # errors of a server that is there: perhaps for one of the prompts

# url, body, most bytes of the reply -> reply
Post = Callable[[str, dict[str, Any], int], Coroutine[Any, Any, Any]]


class _Part(NamedTuple):
    body: dict[str, Any]
    most_bytes: int
    reply: asyncio.Future[tuple[Any, object]]


class Joined:
    """Example: joined = Joined(post); await asyncio.gather(*(joined.ask(url, body, 99) for body in bodies))

    `is_crowded`: whether others wait for slots.
    """

    def __init__(self, post: Post, is_crowded: Callable[[], bool] = lambda: False) -> None:
        self._post, self._is_crowded = post, is_crowded
        self._open: dict[tuple[str, bytes], list[_Part]] = {}  # that are not yet sent
        self._sent: dict[asyncio.Task[None], set[str]] = {}  # the request ids of those that are under way
        self.num_failed = 0  # requests of several prompts that failed and were sent again, each prompt alone

    async def ask(self, url: str, body: dict[str, Any], most_bytes: int) -> tuple[Any, object]:
        """The reply to this request alone, and an identity of what was sent; raises what `post` raises."""
        loop, place = asyncio.get_running_loop(), (url, joint_key(body))
        if place not in self._open:
            self._open[place] = []
            loop.call_soon(self._send_all, place)  # behind all that are ready to run, and so to ask
        part = _Part(body, most_bytes, loop.create_future())
        self._open[place].append(part)
        return await part.reply

    def beside(self, rid: str) -> set[str]:
        """The ids of all requests that travel with this one, itself too: the server answers when all of them end."""
        return next((rids for rids in self._sent.values() if rid in rids), {rid})

    def _send_all(self, place: tuple[str, bytes]) -> None:
        prompts = _by_prompt(self._open.pop(place))
        for parts in prompts if self._is_crowded() else _together(prompts):
            self._send(place[0], parts, sent=object())

    def _send(self, url: str, parts: Sequence[_Part], sent: object) -> None:
        """`sent`: what failed as one and is sent again in several requests is still one."""
        wanted = [part for part in parts if not part.reply.done()]
        if not wanted:
            return
        task = asyncio.get_running_loop().create_task(self._deliver(url, wanted, sent))
        self._sent[task] = {part.body["rid"] for part in wanted}
        task.add_done_callback(self._sent.pop)
        num_waiting = len(wanted)

        def cancel_if_unwanted(_: object) -> None:
            """When all are cancelled the connection ends, and the server stops."""
            nonlocal num_waiting
            num_waiting -= 1
            if not num_waiting:
                task.cancel()

        for part in wanted:
            part.reply.add_done_callback(cancel_if_unwanted)

    async def _deliver(self, url: str, parts: Sequence[_Part], sent: object) -> None:
        try:
            replies = await self._replies(url, parts, sent)
        except Exception as error:
            prompts = _by_prompt(parts)
            if isinstance(error, _OF_ONE) and len(prompts) > 1:
                self.num_failed += not isinstance(error, Refused)  # as of a prompt that is sent alone
                logger.warning(
                    "%s: %d prompts of one request are asked for again, each alone: %s", url, len(prompts), error
                )
                for of_prompt in prompts:
                    self._send(url, of_prompt, sent)
                return
            for part in parts:
                if not part.reply.done():
                    part.reply.set_exception(error)
            return
        for part, reply in zip(parts, replies, strict=True):
            if not part.reply.done():
                part.reply.set_result((reply, sent))

    async def _replies(self, url: str, parts: Sequence[_Part], sent: object) -> list[Any]:
        if len(parts) == 1:
            return [await self._post(url, parts[0].body, parts[0].most_bytes)]
        most_bytes = min(MOST_BYTES, sum(part.most_bytes for part in parts))
        replies = await self._post(url, joined_body([part.body for part in parts]), most_bytes)
        if not isinstance(replies, list) or len(replies) != len(parts):
            number = len(replies) if isinstance(replies, list) else "no list of"
            raise Senseless(f"the reply to {len(parts)} requests holds {number} completions", sent)
        return replies


def _by_prompt(parts: Sequence[_Part]) -> list[list[_Part]]:
    """The parts of each prompt, and of one with many in as many lists as the limits ask for."""
    found = defaultdict(list)
    for part in parts:
        found[tuple(part.body["input_ids"])].append(part)
    most = {prompt: max(1, min(MOST_PARTS, MOST_TOKENS // len(prompt))) for prompt in found}
    return [of[at : at + most[prompt]] for prompt, of in found.items() for at in range(0, len(of), most[prompt])]


def _together(prompts: Sequence[list[_Part]]) -> list[list[_Part]]:
    """As few requests as the limits allow."""
    found: list[list[_Part]] = []
    num_tokens = 0
    for parts in prompts:
        own = sum(len(part.body["input_ids"]) for part in parts)
        if found and len(found[-1]) + len(parts) <= MOST_PARTS and num_tokens + own <= MOST_TOKENS:
            found[-1] += parts
            num_tokens += own
        else:
            found.append(list(parts))
            num_tokens = own
    return found
