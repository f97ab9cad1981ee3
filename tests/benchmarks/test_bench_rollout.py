"""The benchmark of the rollout client: its work, its turns, and its ratio."""

import os
from collections.abc import Sequence
from itertools import groupby

from benchmarks.rollout.bench_rollout import Timed, ratio, take_turns
from benchmarks.rollout.clients import NUM_LENGTHS, Request, lengths, requests


def test_lengths_have_the_mean_that_was_asked_for_and_spread_around_it() -> None:
    assert lengths(5, 7, 0.0) == [7] * 5
    found = lengths(10 * NUM_LENGTHS, 1000, 0.5)
    assert abs(sum(found) / len(found) - 1000) < 1
    assert len(set(found)) == NUM_LENGTHS and max(found) > 2 * min(found)
    assert sum(lengths(4, 100, 0.5)) == 400, "of few requests, too"
    assert min(lengths(NUM_LENGTHS, 1, 2.0)) == 1, "a completion has a token"


def test_requests_are_the_same_each_time_and_their_lengths_stand_together() -> None:
    how = {"prompt_tokens": 5, "new_tokens": 20, "spread": 0.5, "vocabulary": 50}
    found = requests(24, 4, **how)
    assert found == requests(24, 4, **how) and found != requests(24, 4, **how, seed=1)
    assert sorted(r.new_tokens for r in found) == sorted(lengths(24, 20, 0.5))
    assert len(list(groupby(found, key=lambda r: r.new_tokens))) == NUM_LENGTHS
    assert all(len(r.prompt.token_ids) == 5 and max(r.prompt.token_ids) < 50 for r in found)
    assert found[0].params.ignore_eos and found[0].params.max_new_tokens == found[0].new_tokens


class Noting:
    """Says when it is asked."""

    pid = os.getpid()

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def ready(self, work: Sequence[Request]) -> None:
        self.heard.append(f"{self.name} ready")

    def ask(self, work: Sequence[Request]) -> int:
        self.heard.append(self.name)
        return 10


def test_clients_take_turns_and_the_first_does_not_count() -> None:
    heard: list[str] = []
    found = take_turns([Noting("ring", heard), Noting("bare", heard)], [], 2, lambda: heard.append("-"))
    order = ["ring", "bare", "bare", "ring", "ring", "bare"]
    assert heard == ["ring ready", "bare ready", *(word for name in order for word in ("-", name))]
    for timed in found:
        assert timed.tokens == 10 and len(timed.seconds) == len(timed.cpu_s) == 2


def test_the_ratio_is_the_median_of_the_turns() -> None:
    ring, bare = Timed(100, [1.0, 2.0, 4.0], [0.1] * 3), Timed(100, [1.0, 1.0, 3.0], [0.05] * 3)
    assert ratio(ring, bare) == 0.75
    row = ring.row("hf", "ring")
    assert (row["tokens/s"], row["slowest"], row["fastest"], row["client CPU us/token"]) == (50, 25, 100, 1000)
