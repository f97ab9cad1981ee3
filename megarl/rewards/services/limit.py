"""How many calls of a service run at once and begin per minute, and when a failed call is tried again."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from megarl.processes.restarts import Restarts

T = TypeVar("T")

log = logging.getLogger(__name__)

MINUTE_S = 60.0
KNOCK_S = 1.0  # between two tries to reach a service that is away
LONGEST_WAIT_S = 300.0  # a service that asks for more is as good as gone
# Lost connections of aiohttp, httpx and openai, which are no ConnectionError.
_LOST = ("ClientConnectionError", "TransportError", "APIConnectionError")
_AWAY = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class ServiceError(Exception):
    """A service gave no answer.

    `passes`: the same call may succeed later.  `after_s`: when the service wants it, None if it did not say.
    `is_away`: the call was not sent, because nothing listens there.
    """

    def __init__(
        self, reason: str, *, passes: bool = True, after_s: float | None = None, is_away: bool = False
    ) -> None:
        super().__init__(reason)
        self.passes = passes
        self.after_s = after_s
        self.is_away = is_away


class Limit:
    """At most `concurrency` calls at once, and `per_minute` begun a minute, evenly; failed ones are tried again.

    A call has `timeout_s`.  Tried again, `retries` times, are calls that take longer, that lose their connection, or
    that raise a ServiceError that passes or an HTTP error of the usual clients (aiohttp, httpx, openai) with the status
    408, 429 or 5xx.  Before a new try it waits as long as the service says in Retry-After, and meanwhile no other call
    begins; else 1 s, 2 s, 4 s and so on, of which up to a half is left out at random.

    A call that raises a ServiceError with `is_away` was not sent: the service may be starting again.  Calls wait for
    it, which is no try.  After `away_s` without it, each call has one try to connect, until the service is back.

    Example: limit = Limit(64, per_minute=500); reply = await limit(lambda: client.ask(question))

    `clock`, `sleep` and `draw` (uniform from 0 to 1) are given by tests.
    """

    def __init__(
        self,
        concurrency: int = 64,
        per_minute: float | None = None,
        retries: int = 4,
        timeout_s: float = 120.0,
        away_s: float = 600.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        assert concurrency >= 1 and (per_minute is None or per_minute > 0), "a limit of nothing lets no call through"
        self._slots = asyncio.Semaphore(concurrency)
        self._retries = retries
        self._timeout_s = timeout_s
        self._clock = clock
        self._sleep = sleep
        self._draw = draw
        self._gap_s = 0.0 if per_minute is None else MINUTE_S / per_minute
        self._next = 0.0  # when the next call may begin
        self._away_s = away_s
        self._away_since: float | None = None  # when it was found to be away; None: it was there

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call`, or its last exception."""
        failures = Restarts(self._retries, longest_rest_s=math.inf)
        while True:
            async with self._slots:
                await self._turn()
                try:
                    result = await self._within(call)
                except Exception as error:
                    wait_s = self._wait_s(error, failures)
                    if wait_s is None:
                        raise
                    failures.count += self._away_since is None
                else:
                    self._away_since = None
                    return result
            if wait_s:
                await self._sleep(wait_s)

    async def _within(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await call()
        except TimeoutError:
            if limit.expired():
                raise ServiceError(f"no answer within {self._timeout_s:g} s") from None
            raise

    async def _turn(self) -> None:
        """Wait until one more call may begin."""
        while (now := self._clock()) < self._next:
            await self._sleep(self._next - now)
        self._next = now + self._gap_s

    def _wait_s(self, error: Exception, failures: Restarts) -> float | None:
        """Seconds before the next try; None if there is none.  May also delay the beginning of all calls."""
        now, fault = self._clock(), fault_of(error)
        if fault.is_away:
            if self._away_since is None:
                self._away_since = now
                log.warning("a service of rewards is away, and is waited for, %g s at most: %s", self._away_s, error)
            if now - self._away_since >= self._away_s:
                return None
            self._next = max(self._next, now + KNOCK_S)
            return 0.0
        self._away_since = None
        if failures.are_used_up or not fault.passes:
            return None
        if fault.after_s is None:
            return failures.next_rest_s * (1 - 0.5 * self._draw())
        if fault.after_s > LONGEST_WAIT_S:
            return None
        self._next = max(self._next, now + fault.after_s)
        return fault.after_s


def fault_of(error: Exception) -> ServiceError:
    """The error of a call as a ServiceError: whether the same call may succeed later, and when.

    Errors of aiohttp, httpx and openai, which need not be installed, carry the status and the headers of the reply.
    """
    if isinstance(error, ServiceError):
        return error
    reply = getattr(error, "response", error)
    fields = [getattr(holder, name, None) for holder in (error, reply) for name in ("status", "status_code")]
    status = next((value for value in fields if isinstance(value, int)), None)
    is_lost = any(kind.__name__ in _LOST for kind in type(error).__mro__)
    passes = isinstance(error, TimeoutError | ConnectionError) or (is_lost if status is None else is_busy(status))
    headers = getattr(reply, "headers", None)
    after_s = None if headers is None else seconds_of(headers.get("Retry-After"))
    return ServiceError(str(error), passes=passes, after_s=after_s)


def nobody_listens(error: BaseException) -> bool:
    """Whether a call could not connect, so that it was not sent: nothing listens there, or no way leads there.

    An unknown name is another mistake.  The clients put the system's error behind one of their own.
    """
    return any(isinstance(cause, OSError) and cause.errno in _AWAY for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it."""
    while error is not None:
        yield error
        for part in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            yield from _causes(part)
        error = error.__cause__ or error.__context__


def is_busy(status: int) -> bool:
    """Whether an HTTP status means: try again later."""
    return status in (408, 429) or 500 <= status < 600


def seconds_of(header: str | None) -> float | None:
    """The value of a Retry-After header, which is a number of seconds or a date.

    >>> seconds_of("2.5"), seconds_of(None), seconds_of("soon")
    (2.5, None, None)
    """
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # no date, or one without a time zone
        return None
