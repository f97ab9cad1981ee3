"""Which servers are slow: numbers worked out by hand, and servers of which none is."""

import heapq
import random
from collections.abc import Sequence

import pytest

from megarl.rollout.pool.pace import LEAST_S, SLOW, Done, Pace, longest_s


def done(seconds: float, new: int = 100, prompt: int = 0, load: float = 1.0, begun: float = 0.0) -> Done:
    return Done(prompt, new, seconds, load, begun, begun + seconds)


def after(num: int, seconds: float, begun: float = 0.0, **how: int) -> list[Done]:
    """Replies one after another."""
    return [done(seconds, begun=begun + i * seconds, **how) for i in range(num)]


def pace(replies: Sequence[Done]) -> Pace:
    """Of a server that is warm from the time 0 on."""
    found = Pace()
    found.add(Done(0, 1, 1.0, 1.0, -1.0, 0.0), [], None)
    for reply in replies:
        found.add(reply, [], None)
    return found


@pytest.mark.parametrize(
    ("asked", "others", "expected"),
    [
        (done(0), [2.0, 3.0, 9.0, 1.0], 2.5),  # the median
        (done(0, new=50), [2.0] * 4, 2.0),  # fewer tokens may take as long: all of it may be the prompt
        (done(0, new=300), [2.0] * 4, 6.0),  # three times as many tokens take at most three times as long
        (done(0, prompt=100), [2.0] * 4, 4.0),  # a token of a prompt takes at most as long as one that is written
        (done(0, load=5), [2.0] * 4, 10.0),  # five times as many requests
        (done(0, new=200, load=2), [2.0] * 4, 8.0),
        (done(0, new=401), [2.0] * 4, None),  # more than four times as many tokens
        (done(0), [2.0] * 3, None),  # too few replies
    ],
)
def test_what_a_reply_may_take(asked: Done, others: list[float], expected: float | None) -> None:
    assert longest_s(asked, [done(seconds) for seconds in others]) == expected


def test_replies_with_the_most_similar_numbers_of_tokens_are_the_measure() -> None:
    """Eight of 100 tokens in 2 s, among a hundred of 4,000 tokens in 80 s."""
    others = [*(done(80.0, new=4000) for _ in range(100)), *(done(2.0) for _ in range(8))]
    assert longest_s(done(0, new=110), others) == pytest.approx(2.2)


def judged(replies: Sequence[Done], others: Sequence[Pace], factor: float | None = 5.0) -> list[str]:
    mine = pace([])
    return [mine.add(reply, others, factor) for reply in replies]


def test_the_third_slow_reply_of_five_is_told() -> None:
    """Ten times as long as the others' 2 s."""
    replies = [*after(2, 20.0), *after(2, 2.0, begun=40.0), done(20.0, begun=44.0)]
    found = judged(replies, [pace(after(40, 2.0))])
    assert found == [
        *[""] * 4,
        "it is slow: 3 of its last 5 replies took more than 5 times as long as those of others; the last, of 100 "
        "tokens, took 20.0 s instead of 2.0 s at most",
    ]


@pytest.mark.parametrize(
    ("replies", "others"),
    [
        (after(9, 10.0), [pace(after(64, 2.0))]),  # five times as long, not more
        (after(9, 20.0), []),  # one server
        (after(9, 20.0), [pace(after(9, 20.0))]),  # all are slow
        (after(9, 20.0), [pace(after(40, 2.0, begun=-99.0))]),  # the others answered before
        (after(9, 20.0, new=1000), [pace(after(64, 2.0))]),  # ten times as many tokens
        (after(9, LEAST_S), [pace(after(64, 0.01))]),  # nobody waits for it
        ([done(20.0) for _ in range(9)], [pace(after(40, 2.0))]),  # they ran beside each other: one event
        ([*after(2, 20.0), *after(3, 2.0, begun=40.0), done(20.0, begun=46.0)], [pace(after(64, 2.0))]),  # 2 of 5
    ],
)
def test_what_is_no_slow_server(replies: list[Done], others: list[Pace]) -> None:
    assert set(judged(replies, others)) <= {""}
    assert any(judged(after(SLOW, 20.0), [pace(after(64, 2.0))])), "this does tell of slow ones"


def test_what_was_begun_before_the_first_reply_says_nothing() -> None:
    """A server that has just started: its first replies waited until it was warm."""
    mine, others = Pace(), [pace(after(64, 2.0))]
    assert not any(mine.add(done(20.0 + i), others, 5.0) for i in range(9))
    assert not mine.replies or mine.replies[0].begun >= 20.0
    assert any(mine.add(reply, others, 5.0) for reply in after(SLOW, 20.0, begun=29.0))


def test_a_running_request_is_late_when_the_longest_reply_would_be() -> None:
    """Of at most 200 tokens, which take the others 4 s."""
    mine, others = pace([]), [pace(after(40, 2.0))]
    assert not mine.is_late(done(20.0, new=200), others, 5.0)
    assert mine.is_late(done(20.1, new=200), others, 5.0)
    assert not mine.is_late(done(500.0, new=200), [], 5.0)


def test_servers_of_one_kind_are_never_slow_whatever_they_are_asked_for() -> None:
    """100 pools of servers whose steps take a + b * requests, with any prompts, lengths, loads and slow phases."""
    for seed in range(100):
        assert not alarms(seed, slowest=1.0), f"seed {seed}"


def test_of_such_servers_one_that_is_twelve_times_slower_is_found() -> None:
    assert all(alarms(seed, slowest=12.0) == {0} for seed in range(20))


def alarms(seed: int, slowest: float) -> set[int]:
    """Servers that were found slow; the steps of server 0 take `slowest` times as long as those of the others.

    Each server has a number of places of its own, and a request in each; a request's work is paced by the load when it
    begins, and everywhere every few minutes by a phase in which all takes three times as long.
    """
    rng = random.Random(seed)
    start_s, prompt_s, step_s, beside_s = (rng.uniform(0, most) for most in (2.0, 0.002, 0.05, 0.01))
    places = [rng.randint(4, 24) for _ in range(rng.randint(2, 5))]
    most, paces, found = rng.choice([50, 500, 3000]), [Pace() for _ in places], set[int]()
    if slowest > 1.0:
        places, prompt_s, step_s = [8] * len(places), prompt_s + 1e-3, step_s + 0.02
    events: list[tuple[float, int, Done]] = []

    def begin(server: int, now: float) -> None:
        prompt, new = rng.randint(0, 2000), min(most, 1 + int(rng.expovariate(4 / most)))
        load = float(places[server])
        seconds = start_s + prompt * prompt_s + new * (max(prompt_s, step_s) + beside_s * load)
        seconds *= (3.0 if now % 400 > 300 else 1.0) * (slowest if server == 0 else 1.0) * rng.uniform(0.7, 1.4)
        heapq.heappush(events, (now + seconds, server, Done(prompt, new, seconds, load, now, now + seconds)))

    for server, num in enumerate(places):
        for _ in range(num):
            begin(server, rng.uniform(0, 5))
    for _ in range(1500 if slowest == 1.0 else 4000):
        now, server, reply = heapq.heappop(events)
        others = [other for index, other in enumerate(paces) if index != server]
        if paces[server].add(reply, others, 5.0):
            found.add(server)
        begin(server, now)
    return found
