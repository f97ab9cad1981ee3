"""Servers in virtual time: times, versions and kept tokens that can be followed by hand."""

import numpy as np
import pytest
from virtual_rollout import Trace, VirtualCollectors, VirtualPrompts, lognormal_trace

from megarl.rollout.protocol import SamplingParams
from megarl.sample import LostRollout

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


def test_a_group_is_finished_with_its_longest_completion():
    made = collectors([3, 7], [4, 5])
    assert finish(made, *ask(made, 0, 1, n=2)) == [7, 5]


def test_a_completion_waits_for_a_place_in_turn():
    made = collectors(4, 4, 2, max_running=1)
    assert finish(made, *ask(made, 0, 1, 2)) == [4, 8, 10]


def test_it_is_asked_of_the_least_busy_server():
    made = collectors(10, 3, 4, 4, servers=2, max_running=2)
    first, second, third, fourth = ask(made, 0, 1, 2, 3)  # 10 and 4 on one server, 3 and 4 on the other
    assert finish(made, first, second, third, fourth) == [10, 3, 4, 4]


def test_time_passes_in_wait_and_sleep_alone():
    made = collectors(5, 50)
    short, long = ask(made, 0, 1)
    assert not made.wait(3.0) and made.now == 3.0
    made.sleep(4.0)
    assert made.now == 7.0 and short.group is None, "a ticket is filled when the driver waits"
    assert made.wait() and made.now == 7.0 and short.group is not None and long.group is None


def test_what_finishes_soon_after_is_gathered():
    made = collectors(5, 6, 9, gather_s=2.0)
    first, second, third = ask(made, 0, 1, 2)
    assert made.wait(10.0) and made.now == 7.0
    assert second.group is not None and first.group is not None and third.group is None


def test_a_push_changes_the_version_between_two_tokens():
    made = collectors(10)
    (ticket,) = ask(made, 0)
    made.sleep(3.5)
    made.push(1)
    made.sleep(2.5)  # 6 tokens
    made.push(2)
    finish(made, ticket)
    assert spans(ticket) == [(0, 0, 3), (1, 3, 6), (2, 6, 10)]


def test_a_dead_server_loses_the_piece_and_keeps_those_before():
    made = collectors(10, servers=2, piece_tokens=4)
    (ticket,) = ask(made, 0)
    made.sleep(5.5)
    made.push(3)
    made.sleep(1.0)  # 6 tokens, 4 of them in a finished piece
    made.die(made.urls[0])
    assert finish(made, ticket) == [6.5 + 6]
    assert spans(ticket) == [(0, 0, 4), (3, 4, 10)]
    assert made.counters["wasted_failed"] == 2 and made.counters["tokens"] == 12


def test_without_pieces_it_begins_from_nothing():
    made = collectors(10, servers=2)
    (ticket,) = ask(made, 0)
    made.sleep(6.0)
    made.fence(made.urls[0])
    assert finish(made, ticket) == [16]
    assert made.counters["wasted_fenced"] == 6


def test_without_a_server_it_waits_for_one():
    made = collectors(5, version=None)
    (ticket,) = ask(made, 0)
    assert not made.wait(20.0)
    made.trust(made.urls[0], 4)
    assert finish(made, ticket) == [25]
    assert spans(ticket) == [(4, 0, 5)]


def test_a_held_server_ends_its_pieces_and_starts_nothing():
    made = collectors(10, 3, 3, piece_tokens=4, max_running=2)
    long, short, later = ask(made, 0, 1, 2)
    made.sleep(2.0)
    made.hold(made.urls[0])
    made.sleep(50.0)
    assert made.wait() and short.group is not None and long.group is None
    made.push(1)  # a held server is not pushed to by this short form
    assert not made.wait(10.0)
    made.trust(made.urls[0], 1)
    assert finish(made, long, later) == [62 + 6, 62 + 3]
    assert spans(long) == [(0, 0, 4), (1, 4, 10)] and spans(later) == [(1, 0, 3)]


def test_held_servers_without_pieces_let_completions_end():
    made = collectors(10)
    (ticket,) = ask(made, 0)
    made.sleep(1.0)
    made.hold(made.urls[0])
    assert finish(made, ticket) == [10]


def test_what_nobody_wants_makes_room():
    made = collectors(10, 4, max_running=1)
    unwanted, wanted = ask(made, 0, 1)
    made.sleep(3.0)
    made.cancel([unwanted])
    assert finish(made, wanted) == [7]
    assert unwanted.group is None and made.counters["wasted_cancelled"] == 3
    made.cancel([wanted])  # it is finished: nothing happens


def test_what_is_cancelled_in_a_queue_never_starts():
    made = collectors(4, 4, 2, max_running=1)
    first, second, third = ask(made, 0, 1, 2)
    made.cancel([second])
    assert finish(made, first, third) == [4, 6]
    assert made.counters["queued"] == made.counters["in_flight"] == 0


def test_a_killed_collector_begins_again_with_what_is_open():
    made = collectors([6, 2], [3, 3], servers=2, num_collectors=2)
    broken, untouched = ask(made, 0, 1, n=2)
    made.sleep(2.5)
    made.kill_collector(0)
    assert finish(made, broken, untouched) == [2.5 + 6, 3]
    assert made.counters["wasted_collector"] == 2 + 2


def test_faults_come_at_their_time():
    made = collectors(10, servers=2)
    (ticket,) = ask(made, 0)
    made.at(4.0, lambda: made.die(made.urls[0]))
    assert finish(made, ticket) == [14]


def test_groups_have_rewards_and_a_greedy_completion():
    made = collectors([5, 5, 8], reward=lambda prompt, index: 10.0 + index)
    (ticket,) = ask(made, 0, n=2, greedy=True)
    assert finish(made, ticket) == [8]
    assert [sample.reward for sample in ticket.group] == [10, 11]
    assert [sample.greedy_reward for sample in ticket.group] == [12, 12]


def test_a_prompt_may_be_lost():
    made = collectors(5, is_lost=lambda prompt: True)
    (ticket,) = ask(made, 0)
    finish(made, ticket)
    assert isinstance(ticket.group, LostRollout)


def test_a_completion_depends_only_on_seed_prompt_and_index():
    def tokens(**settings):
        made = collectors([9, 9], **settings)
        (ticket,) = ask(made, 0, n=2)
        if "servers" in settings:
            made.at(5.0, lambda: made.die(made.urls[0]))
        finish(made, ticket)
        return [sample.learnt_ids for sample in ticket.group]

    assert tokens() == tokens(servers=3, piece_tokens=2, start_s=100.0)
    first, second = tokens()
    assert first != second and len(first) == 9


def test_a_trace_has_the_mean_and_tail_that_were_asked_for():
    table = lognormal_trace(4000, 8, mean=100, longest=800, seed=3)
    assert table.shape == (4000, 8) and table.min() >= 1 and table.max() == 800
    assert table.mean() == pytest.approx(99, rel=0.03)  # the limit cuts a little
    logs = np.log(table.clip(1, 799))
    assert logs.mean(1).std() == pytest.approx(0.8, rel=0.05)
    assert (logs - logs.mean(1, keepdims=True)).std() == pytest.approx(0.4, rel=0.1)


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
