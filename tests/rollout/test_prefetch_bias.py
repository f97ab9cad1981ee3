"""Which lengths are trained, beside rules that must fail: dropping by age, and the first of 1.5 times as many."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from async_policies import DROP, FIRST, Outcome, Rule, simulate
from virtual_rollout import Trace, VirtualCollectors, VirtualPrompts, lognormal_trace

from megarl.data.ledger import Ledger
from megarl.rollout.prefetch import Prefetcher
from megarl.rollout.protocol import SamplingParams

NUM_PROMPTS, N, STEPS, WARMUP = 16, 4, 240, 40
MEAN, LONGEST = 100.0, 800  # tokens; a token takes a second
LAW = lognormal_trace(NUM_PROMPTS * (STEPS + 40), N, mean=MEAN, longest=LONGEST)
PARAMS = SamplingParams(max_new_tokens=LONGEST)


def run(name: str, ahead: int) -> Outcome:
    """Weights change every 100 s, the time of a mean completion, or more rarely where the trainer waits."""
    servers = VirtualCollectors(Trace(LAW), servers=4, max_running=64, whole=False)
    how: dict[str, Any] = {"num_prompts": NUM_PROMPTS, "n": N, "params": PARAMS, "ahead": ahead}
    if name in (DROP, FIRST):
        policy: Any = Rule(name, servers, VirtualPrompts(), **how)
    else:
        prompts, ledger = VirtualPrompts(), Ledger("data")
        policy = Prefetcher(
            servers, ledger, prompts, order=name, first_step=0, num_steps=10**6, clock=lambda: servers.now, **how
        )
    return simulate(policy, servers, train_s=MEAN, steps=STEPS, warmup=WARMUP)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("order", ["finished", "prompts"])
def test_the_lengths_that_are_trained_are_those_of_the_prompts(order: str, ahead: int) -> None:
    found = run(order, ahead)
    assert found.distance(LAW) < 0.03
    assert set(Counter(found.visits).values()) == {1}
    taken = NUM_PROMPTS * STEPS
    assert set(range(taken - NUM_PROMPTS * 60)) <= set(found.visits), "a long answer is late, but it comes"
    assert max(found.visits) < taken + ahead * NUM_PROMPTS + NUM_PROMPTS * 60


@pytest.mark.parametrize(("rule", "ahead"), [(DROP, 1), (DROP, 2), (FIRST, 0)])
def test_rules_that_throw_away_what_is_late_train_short_answers(rule: str, ahead: int) -> None:
    found = run(rule, ahead)
    assert found.distance(LAW) > 0.1
    assert found.longest(LAW) < 0.5, "of the longest 5 %"


def test_with_a_long_tail_the_trainer_waits_less_if_it_takes_what_is_finished() -> None:
    waits = {order: run(order, 2).idle_share for order in ("finished", "prompts")}
    assert waits["finished"] < 0.2 < 0.5 < waits["prompts"]
    assert np.isfinite(list(waits.values())).all()
