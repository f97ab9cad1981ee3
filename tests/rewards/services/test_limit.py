"""Concurrency, calls per minute, and new tries, on a clock of the test's own."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from virtual_clock import VirtualClock

from megarl.rewards.services.limit import Limit, ServiceError, fault_of, nobody_listens, seconds_of


def limit(clock: VirtualClock, *how: Any, draw: float = 0.0) -> Limit:
    return Limit(*how, clock=clock, sleep=clock.sleep, draw=lambda: draw)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 240)

    asyncio.run(limited())


def test_at_most_so_many_run_at_once() -> None:
    async def test() -> None:
        clock, running, most = VirtualClock(), 0, 0
        many = limit(clock, 3)

        async def call() -> float:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await clock.sleep(10.0)
            running -= 1
            return clock.now_s

        assert await clock.run(*(many(call) for _ in range(7))) == [10.0] * 3 + [20.0] * 3 + [30.0]
        assert most == 3

    run(test)


@pytest.mark.parametrize(("per_minute", "begun"), [(2, [0, 30, 60, 90, 120]), (0.5, [0, 120, 240, 360, 480])])
def test_so_many_begin_in_a_minute_evenly(per_minute: float, begun: list[float]) -> None:
    async def test() -> None:
        clock = VirtualClock()
        some = limit(clock, 64, per_minute)

        async def call() -> float:
            return clock.now_s

        assert await clock.run(*(some(call) for _ in range(5))) == begun

    run(test)


class Failing:
    """Fails with these errors one after another, then answers with the times of its calls."""

    def __init__(self, clock: VirtualClock, *errors: Exception) -> None:
        self.clock, self.errors, self.calls = clock, list(errors), list[float]()

    async def __call__(self) -> list[float]:
        self.calls.append(self.clock.now_s)
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


def test_a_failed_call_waits_twice_as_long_each_time_less_a_random_part() -> None:
    async def test(draw: float, times: list[float]) -> None:
        clock = VirtualClock()
        call = Failing(clock, ServiceError("busy"), TimeoutError(), ConnectionResetError())
        assert await clock.run(limit(clock, 1, None, 4, draw=draw)(call)) == [times]

    run(lambda: test(0.0, [0.0, 1.0, 3.0, 7.0]))
    run(lambda: test(1.0, [0.0, 0.5, 1.5, 3.5]))


def test_retry_after_is_obeyed_by_all_calls() -> None:
    async def test() -> None:
        clock = VirtualClock()
        two = limit(clock, 2)
        first, second = Failing(clock, ServiceError("429", after_s=30.0)), Failing(clock)
        waiting = [two(first), two(lambda: clock.sleep(5.0)), two(second)]
        assert (await clock.run(*waiting))[::2] == [[0.0, 30.0], [30.0]]

    run(test)


def test_after_all_tries_the_last_error_is_raised_and_what_cannot_pass_is_not_tried_again() -> None:
    async def test() -> None:
        clock = VirtualClock()
        for errors, tries in (
            ([ServiceError(f"{i}") for i in range(9)], 3),
            ([ServiceError("bad key", passes=False)], 1),
            ([KeyError("gone")], 1),
            ([ServiceError("tomorrow", after_s=86400.0)], 1),
        ):
            call = Failing(clock, *errors)
            (found,) = await clock.run(limit(clock, 1, None, 2)(call))
            assert found is errors[tries - 1] and len(call.calls) == tries

    run(test)


def test_a_call_that_takes_too_long_is_ended_and_tried_again() -> None:
    async def test() -> None:
        clock, began = VirtualClock(), 0
        many = Limit(1, None, 1, 0.01, clock=clock, sleep=clock.sleep)

        async def never() -> None:
            nonlocal began
            began += 1
            await asyncio.Event().wait()

        (error,) = await clock.run(many(never))
        assert (str(error), began) == ("no answer within 0.01 s", 2)

    run(test)


REFUSED = [ServiceError("nobody listens", is_away=True)]


def test_waiting_for_a_service_that_is_away_is_no_try() -> None:
    async def test() -> None:
        clock = VirtualClock()
        patient = limit(clock, 1, None, 1)
        call = Failing(clock, *REFUSED * 5, ServiceError("busy"), *REFUSED * 2)
        assert await clock.run(patient(call)) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]]

    run(test)


def test_a_service_that_stays_away_fails_its_calls_and_each_later_call_looks_once() -> None:
    async def test() -> None:
        clock = VirtualClock()
        patient = limit(clock, 2, None, 4, 120.0, 3.0)
        first, second, later = (Failing(clock, *REFUSED * 99) for _ in range(3))
        found = await clock.run(patient(first), patient(second)) + await clock.run(patient(later))
        assert [str(error) for error in found] == ["nobody listens"] * 3
        # One call knocks for all; the others look when the time is over.
        assert (first.calls, second.calls, later.calls) == ([0.0, 1.0, 2.0, 3.0], [3.0], [3.0])
        assert await clock.run(patient(Failing(clock))) == [[3.0]]  # it is back
        assert await clock.run(patient(Failing(clock, *REFUSED))) == [[3.0, 4.0]]  # away once more: a wait of its own

    run(test)


def test_a_function_of_a_user_that_cannot_connect_is_called_as_often_as_there_are_tries() -> None:
    """What it did before, such as a call that costs money, would be done again at every knock."""

    async def test() -> None:
        clock = VirtualClock()
        call = Failing(clock, *[ConnectionRefusedError(errno.ECONNREFUSED, "refused")] * 99)
        (found,) = await clock.run(limit(clock, 1, None, 2)(call))
        assert isinstance(found, ConnectionRefusedError) and len(call.calls) == 3

    run(test)


def test_only_what_could_not_connect_is_away() -> None:
    def caused(error: Exception, cause: BaseException) -> Exception:
        error.__cause__ = cause
        return error

    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    both = ExceptionGroup("two addresses", [refused] * 2)
    assert nobody_listens(refused) and nobody_listens(caused(TransportError(), caused(OSError("all failed"), both)))
    assert nobody_listens(OSError(errno.EHOSTUNREACH, "no route"))
    for error in (ConnectionResetError(errno.ECONNRESET, "reset"), socket.gaierror(-2, "unknown"), TimeoutError()):
        assert not nobody_listens(error)


class Reply:
    def __init__(self, status: int, **headers: str) -> None:
        self.status_code, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class HttpxError(Exception):
    """Has a response, as httpx's and openai's errors."""

    def __init__(self, response: Reply) -> None:
        self.response = response


class AiohttpError(Exception):
    """Has a status, as aiohttp's."""

    def __init__(self, status: int) -> None:
        self.status, self.headers = status, {"Retry-After": "3"}


class TransportError(Exception):
    """Is called like httpx's error of a lost connection."""


def test_errors_of_the_usual_clients_are_understood() -> None:
    lost = (TransportError(), ConnectionRefusedError())
    for error in (HttpxError(Reply(429)), HttpxError(Reply(503)), AiohttpError(408), *lost):
        assert fault_of(error).passes
    for error in (HttpxError(Reply(401)), AiohttpError(400), ValueError("x")):
        assert not fault_of(error).passes
    assert fault_of(HttpxError(Reply(429, Retry_After="7"))).after_s == 7.0
    assert fault_of(AiohttpError(429)).after_s == 3.0
    assert fault_of(HttpxError(Reply(429))).after_s is fault_of(ValueError("x")).after_s is None


def test_retry_after_may_be_a_date() -> None:
    in_a_minute = seconds_of(format_datetime(datetime.now(UTC) + timedelta(seconds=60)))
    assert in_a_minute is not None and 50 < in_a_minute <= 60
    assert seconds_of(format_datetime(datetime.now(UTC) - timedelta(days=1))) == 0.0
    assert [seconds_of(text) for text in ("2.5", "-1", None, "soon")] == [2.5, 0.0, None, None]
