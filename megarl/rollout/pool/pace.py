"""Whether a server is slow: how long its replies took, compared with those of the other servers.

A request for which a server computes p tokens of the prompt and generates n takes c0 + c1 p + c2 n seconds, with
unknown costs c0 >= 0 and c2 >= c1 >= 0.  So another one, of P and N tokens, takes at most

    max(1, N / n, (P + N) / (p + n))

times as long on an equal server, and with L times as many requests beside it at most L times as long again.  A reply is
slow if it took more than a factor times the median of these limits, over replies that other servers gave since it was
begun.  A server is slow if 3 of its last 5 replies were, each begun when the one before had come: what stalls a server
once makes one.  Short answers that travel in one request (`Joined`) wait for each other at most 64 tokens.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

SLOW, OF = 3, 5  # so many slow replies of the last ones make a server slow
LEAST_S = 1.0  # no reply that came within this time is slow
_KEPT = 64  # replies of a server that others are compared with
_NEAREST = 8  # replies that a reply is compared with at most: those with the most similar numbers of tokens
_FEWEST = 4  # with fewer than so many nothing is said
_MOST_TIMES = 4.0  # what has less than a quarter of the tokens says nothing: costs grow with the context


@dataclass(frozen=True)
class Done:
    """A reply, or what a running request has become so far."""

    prompt_tokens: int  # that the server computed: those of its prefix cache do not count
    new_tokens: int
    seconds: float  # without the pauses of pushes
    load: float  # requests on the server meanwhile, on the average, this one included
    begun: float
    ended: float


def longest_s(done: Done, others: Iterable[Done]) -> float | None:
    """Seconds that `done` may take on a server like that of the others; None: they say too little."""
    limits: list[tuple[float, float]] = []
    for other in others:
        new = done.new_tokens / other.new_tokens
        both = (done.prompt_tokens + done.new_tokens) / (other.prompt_tokens + other.new_tokens)
        times = max(1.0, new, both)
        if times <= _MOST_TIMES:
            limits.append((max(new, 1 / new, both, 1 / both), other.seconds * times * max(1.0, done.load / other.load)))
    if len(limits) < _FEWEST:
        return None
    return median(limit for _, limit in heapq.nsmallest(_NEAREST, limits))


class Pace:
    """The last replies of one server since it was taken into service."""

    def __init__(self) -> None:
        self.replies: deque[Done] = deque(maxlen=_KEPT)
        self._judged: deque[bool] = deque(maxlen=OF)  # whether the last replies, one after another, were slow
        self._warm_since = math.inf  # its first reply came; what was begun before says nothing
        self._judged_at = -math.inf  # when the last reply came that was judged

    def add(self, done: Done, others: Sequence[Pace], factor: float | None) -> str:
        """Note a reply; returns why the server is slow, or an empty string.  `factor` None: it is not judged."""
        self._warm_since = min(self._warm_since, done.ended)
        if not self.is_warm(done):
            return ""
        self.replies.append(done)
        if factor is None or done.begun < self._judged_at:
            return ""
        longest = _of(done, others)
        if longest is None:
            return ""
        self._judged_at = done.ended
        self._judged.append(done.seconds > max(LEAST_S, factor * longest))
        if sum(self._judged) < SLOW:
            return ""
        return (
            f"it is slow: {SLOW} of its last {OF} replies took more than {factor:g} times as long as those of others; "
            f"the last, of {done.new_tokens} tokens, took {done.seconds:.1f} s instead of {longest:.1f} s at most"
        )

    def is_late(self, running: Done, others: Sequence[Pace], factor: float) -> bool:
        """Whether a running request would be slow, were its reply to come now with all tokens that it may have."""
        if not self.is_warm(running) or running.seconds <= LEAST_S:
            return False
        longest = _of(running, others)
        return longest is not None and running.seconds > factor * longest

    def is_warm(self, done: Done) -> bool:
        return done.begun >= self._warm_since


def _of(done: Done, others: Sequence[Pace]) -> float | None:
    return longest_s(done, (reply for other in others for reply in other.replies if reply.ended >= done.begun))
