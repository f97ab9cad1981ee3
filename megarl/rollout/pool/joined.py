"""Sends short requests that start at once as one request: an answer of a few tokens costs less than its HTTP.

All of them get their replies when the last is written.  Until then their slots stay taken, so it is for answers that
are short anyway; and while others wait for a slot, only the answers to one prompt travel together, which end at about
the same time.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from megarl.rollout.pool.pool_server import Refused
from megarl.rollout.protocol import JointKey, joined_body, joint_key

SHORT = 64  # tokens: so many steps of decoding the first of an answer may wait for the last
_MOST_PROMPTS = 128  # of one request

Post = Callable[[str, dict[str, Any], int], Coroutine[Any, Any, Any]]  # url, body, most bytes of the reply -> reply


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
        self._open: dict[tuple[str, JointKey], list[_Part]] = {}  # that are not yet sent
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, url: str, body: dict[str, Any], most_bytes: int) -> tuple[Any, object]:
        """The reply to this request alone, and what identifies that in which it was sent; raises what `post` raises."""
        loop, key = asyncio.get_running_loop(), (url, joint_key(body))
        if key not in self._open:
            self._open[key] = []
            loop.call_soon(self._send_all, key)  # behind all that are ready to run, and so to ask
        part = _Part(body, most_bytes, loop.create_future())
        self._open[key].append(part)
        return await part.reply

    def _send_all(self, key: tuple[str, JointKey]) -> None:
        parts = self._open.pop(key)
        prompts = _by_prompt(parts)
        for together in prompts if self._is_crowded() or len(prompts) > _MOST_PROMPTS else [parts]:
            self._send(key[0], together)

    def _send(self, url: str, parts: Sequence[_Part]) -> None:
        task = asyncio.get_running_loop().create_task(self._deliver(url, parts))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)
        num_waiting = len(parts)

        def cancel_if_unwanted(_: object) -> None:
            """Nobody waits any more: the server is to stop, which it does when the connection ends."""
            nonlocal num_waiting
            num_waiting -= 1
            if not num_waiting:
                task.cancel()

        for part in parts:
            part.reply.add_done_callback(cancel_if_unwanted)

    async def _deliver(self, url: str, parts: Sequence[_Part]) -> None:
        sent = object()
        try:
            if len(parts) == 1:
                replies = [await self._post(url, parts[0].body, parts[0].most_bytes)]
            else:
                body = joined_body([part.body for part in parts])
                replies = await self._post(url, body, sum(part.most_bytes for part in parts))
                if not isinstance(replies, list) or len(replies) != len(parts):
                    # Each of them finds out that this is no completion.
                    replies = [replies] * len(parts)
        except Exception as error:
            prompts = _by_prompt(parts)
            if isinstance(error, Refused) and len(prompts) > 1:  # perhaps for one of the prompts
                for together in prompts:
                    self._send(url, together)
                return
            for part in parts:
                if not part.reply.done():
                    part.reply.set_exception(error)
            return
        for part, reply in zip(parts, replies, strict=True):
            if not part.reply.done():
                part.reply.set_result((reply, sent))


def _by_prompt(parts: Sequence[_Part]) -> list[list[_Part]]:
    found = defaultdict(list)
    for part in parts:
        found[tuple(part.body["input_ids"])].append(part)
    return list(found.values())
