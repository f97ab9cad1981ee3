"""Steps ahead of the training: by hand, and beside a simulation of the schedule in virtual time.

Bounds: with free places `finished` is at most 5 % apart, and `prompts` at most 12 % too short, as the slowest answer
differs from iteration to iteration.  Where full servers and lengths both count, both are at most 20 % too short.
"""

import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from plan_jobs import FREE, job

from benchmarks.async_training.lengths import Trace
from benchmarks.async_training.policies import FINISHED, PROMPTS, Rule, simulate
from benchmarks.async_training.virtual_rollout import VirtualCollectors, VirtualPrompts
from megarl.plan.serving import Rollout, balanced_wait, slowest, step_ahead
from megarl.rollout.protocol import SamplingParams

B, MEAN = 32, 1000  # prompts of an iteration; tokens of a completion, which take 1 s


def predicted(order, ahead, working_s, *, tail, n, places=math.inf):
    run = job(shared=False, ahead=ahead, order=order, prompts=B, n=n, response_tokens=MEAN, most_response=10**9)
    written = Rollout(0.0, 0.0, 0.0, 1.0, 1 / MEAN, "work", places)
    return step_ahead(replace(run, constants=replace(FREE, tail=tail)), written, working_s)


def simulated(order, ahead, working_s, *, tail, n, places=10**9):
    """Lengths as lengths.py has them: over the longest they are Beta(1, tail - 1)."""
    shares = np.random.default_rng(0).beta(1, tail - 1, (800, n))
    lengths = np.maximum(1, np.rint(MEAN * tail * shares)).astype(int)
    collectors = VirtualCollectors(Trace(lengths), servers=1, max_running=places, tokens_per_s=float(MEAN), whole=False)
    params = SamplingParams(max_new_tokens=10**9)
    rule = Rule(order, collectors, VirtualPrompts(), num_prompts=B, n=n, params=params, ahead=ahead)
    return simulate(rule, collectors, train_s=working_s, steps=40, warmup=15).step_s


@pytest.mark.full
@pytest.mark.parametrize("order", [PROMPTS, FINISHED])
@pytest.mark.parametrize(
    ("tail", "n", "ahead", "working_s"), [(1.5, 1, 1, 0.2), (2.57, 8, 2, 1.0), (6.0, 8, 1, 0.2), (6.0, 8, 4, 0.2)]
)
def test_with_free_places_a_step_is_as_long_as_in_the_simulation(order, tail, n, ahead, working_s):
    case = {"tail": tail, "n": n}
    ratio = predicted(order, ahead, working_s, **case) / simulated(order, ahead, working_s, **case)
    assert (0.95 if order == FINISHED else 0.88) < ratio < 1.05


@pytest.mark.parametrize(
    ("order", "tail", "ahead", "working_s", "share"),
    [
        (PROMPTS, 2.57, 1, 0.2, 0.75),
        (FINISHED, 2.57, 2, 1.0, 0.75),
        (PROMPTS, 6.0, 1, 1.0, 0.75),
        (FINISHED, 2.57, 2, 0.2, 0.25),
    ],
)
def test_with_full_servers_a_step_is_nearly_as_long_as_in_the_simulation(order, tail, ahead, working_s, share):
    case = {"tail": tail, "n": 8, "places": int(share * B * 8)}
    ratio = predicted(order, ahead, working_s, **case) / simulated(order, ahead, working_s, **case)
    assert 0.8 < ratio < 1.05


def test_a_wait_balances_what_is_unfinished():
    """unfinished falls from 1 to 0 within 4 s."""

    def unfinished(age_s):
        return max(0.0, 1 - age_s / 4)

    assert balanced_wait(0, 1.0, unfinished, 4.0) == pytest.approx(4.0)  # nothing is written beside the training
    wait_s = balanced_wait(1, 1.0, unfinished, 4.0)
    assert wait_s == pytest.approx(1.0)  # ages 1, 3 and 5: 3/4 + 1/4
    assert balanced_wait(4, 1.0, unfinished, 4.0) == 0.0  # 1 + 3/4 + 2/4 + 1/4 are less
    assert balanced_wait(1, 0.0, lambda _: 1.0, 4.0) == pytest.approx(2.0)  # two in turns


def test_the_slowest_of_many_is_the_mean_of_the_longest_drawn():
    rng = np.random.default_rng(1)
    for tail, count in [(1.5, 8), (2.57, 256), (6.0, 64)]:
        drawn = fmean(rng.beta(1, tail - 1, count).max() for _ in range(2000))
        assert slowest(count, tail) == pytest.approx(drawn, rel=0.03)
    assert slowest(5, 1.0) == 1.0
