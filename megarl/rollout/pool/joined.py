"""Sends requests for one prompt that start at once as one request: an answer of a few tokens costs less than its HTTP.

All of them get their replies when the last is written.  Until then their slots stay taken, so it is for answers that
are short anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megarl.rollout.protocol import joined_body, joint_key

SHORT = 64  # tokens: so many steps of decoding the first of an answer may wait for the last

Post = Callable[[str, dict[str, Any], int], Coroutine[Any, Any, Any]]  # url, body, most bytes of the reply -> reply


class _Part(NamedTuple):
    body: dict[str, Any]
    most_bytes: int
    reply: asyncio.Future[Any]


@dataclass
class _Request:
    parts: list[_Part] = field(default_factory=list)
    task: asyncio.Task[None] | None = None  # that sends it

    def cancel_if_unwanted(self, _: object) -> None:
        """Nobody waits any more: the server is to stop, which it does when the connection ends."""
        if self.task is not None and all(part.reply.done() for part in self.parts):
            self.task.cancel()


class Joined:
    """Example: joined = Joined(post); await asyncio.gather(*(joined.ask(url, body, 99) for body in bodies))"""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._open: dict[tuple[str, str], _Request] = {}  # that are not yet sent
        self._sent: set[asyncio.Task[None]] = set()

    async def ask(self, url: str, body: dict[str, Any], most_bytes: int) -> tuple[Any, object]:
        """The reply to this request alone, and what identifies that in which it was sent; raises what `post` raises."""
        loop, key = asyncio.get_running_loop(), (url, joint_key(body))
        if key not in self._open:
            self._open[key] = _Request()
            loop.call_soon(self._send, key)  # behind all that are ready to run, and so to ask
        request, reply = self._open[key], loop.create_future()
        request.parts.append(_Part(body, most_bytes, reply))
        reply.add_done_callback(request.cancel_if_unwanted)
        return await reply, request

    def _send(self, key: tuple[str, str]) -> None:
        request = self._open.pop(key)
        request.task = asyncio.get_running_loop().create_task(self._deliver(key[0], request.parts))
        self._sent.add(request.task)
        request.task.add_done_callback(self._sent.discard)

    async def _deliver(self, url: str, parts: list[_Part]) -> None:
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
            for part in parts:
                if not part.reply.done():
                    part.reply.set_exception(error)
            return
        for part, reply in zip(parts, replies, strict=True):
            if not part.reply.done():
                part.reply.set_result(reply)
