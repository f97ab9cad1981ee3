"""Servers in virtual time: times, versions and kept tokens that can be followed by hand."""

import numpy as np

from benchmarks.async_training.lengths import Trace, lognormal_trace
from benchmarks.async_training.virtual_rollout import VirtualCollectors, VirtualPrompts
from megarl.rollout.protocol import SamplingParams

PARAMS = SamplingParams(max_new_tokens=1000, sampling_seed=7)
PROMPTS = VirtualPrompts()


def collectors(*lengths, **settings):
    """Visit i has completions of lengths[i]; one server with four places, a token a second."""
    table = np.array([row if isinstance(row, list) else [row] for row in lengths])
    return VirtualCollectors(Trace(table), **{"servers": 1, "tokens_per_s": 1.0, **settings})


def ask(made, *numbers, n=1, **more):
    return made.submit([PROMPTS.visit(number) for number in numbers], n=n, params=PARAMS, **more)


def finish(made, *tickets):
    """The times at which they are finished."""
    times = {}
    while len(times) < len(tickets):
        assert made.wait(1e6)
        times |= {ticket: made.now for ticket in tickets if ticket.group is not None and ticket not in times}
    return [times[ticket] for ticket in tickets]


def spans(ticket, index=0):
    return [(span.version, span.start, span.end) for span in ticket.group[index].versions]


def test_a_completion_waits_for_a_place_in_turn_and_what_is_cancelled_makes_room():
    made = collectors(10, 4, 4, 2, max_running=1)
    unwanted, first, second, third = ask(made, 0, 1, 2, 3)
    made.sleep(3.0)
    made.cancel([unwanted, second])  # one is being written, one waits
    assert finish(made, first, third) == [7, 9]
    assert unwanted.group is None and made.counters["wasted_cancelled"] == 3
    made.cancel([first])  # it is finished: nothing happens
    assert made.counters["queued"] == made.counters["in_flight"] == 0


def test_a_push_changes_the_version_between_two_tokens():
    made = collectors(10, version=None)
    (ticket,) = ask(made, 0)
    assert not made.wait(20.0), "without a server it waits for one"
    made.trust(made.urls[0], 0)
    made.sleep(3.5)
    made.push(1)
    made.sleep(2.5)  # 6 tokens
    made.push(2)
    finish(made, ticket)
    assert spans(ticket) == [(0, 0, 3), (1, 3, 6), (2, 6, 10)]


def test_random_faults_lose_and_double_no_token():
    """Whatever happens, a completion's spans follow each other, and what is not wasted is what was asked for."""
    rng = np.random.default_rng(0)
    for seed in range(50):
        table = lognormal_trace(12, 2, mean=8, longest=30, seed=seed)
        made = VirtualCollectors(
            Trace(table), servers=4, max_running=2, num_collectors=2, piece_tokens=int(rng.integers(0, 5))
        )
        tickets = made.submit([PROMPTS.visit(i) for i in range(12)], n=2, params=PARAMS)
        for version in range(1, 8):
            url = made.urls[int(rng.integers(4))]
            match int(rng.integers(5)):
                case 0:
                    made.die(url)
                case 1:
                    made.fence(url)
                case 2:
                    made.hold(url)
                case 3:
                    made.kill_collector(version % 2)
            made.sleep(float(rng.exponential(4.0)))
            for each in made.urls:
                made.trust(each, version)
        finish(made, *tickets)
        for visit, ticket in enumerate(tickets):
            for index in range(2):
                found = spans(ticket, index)
                assert found[0][1] == 0 and found[-1][2] == table[visit, index]
                assert all(a[2] == b[1] and a[0] < b[0] for a, b in zip(found, found[1:], strict=False))
        wasted = sum(count for name, count in made.counters.items() if name.startswith("wasted_"))
        assert made.counters["tokens"] == table.sum() + wasted
