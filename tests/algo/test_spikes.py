"""Limits of spikes, worked out by hand."""

import json
import math
from collections import deque

import pytest

from megarl.algo.spikes import WARMUP, WINDOW, Limits, Series, Spikes


def series(*values: float, sigma: float = 3.0, scale: float = 0.0) -> Series:
    found = Series(sigma, scale)
    for value in values:
        found.add(value)
    return found


def test_the_limit_is_so_many_deviations_above_the_mean_after_the_warm_up() -> None:
    """Eight times 1 and eight times 3: the mean is 2, the squares sum to 16, s = sqrt(16 / 15) = 1.0328."""
    values = [1.0, 3.0] * 8
    assert len(values) == WARMUP
    assert math.isinf(series(*values[:-1]).limit)
    assert series(*values).moments == (2.0, pytest.approx(1.0327956))
    assert series(*values).limit == pytest.approx(2 + 3 * 1.0327956)
    assert series(*values, sigma=0.5).limit == pytest.approx(2.5163978)
    assert math.isinf(series(*[2.0] * 50).limit), "nothing differs"


def test_the_deviation_counts_as_a_hundredth_of_the_mean_or_of_the_scale_at_least() -> None:
    """Of 100 and 100.0002 it is 0.0001, so that 1 counts; of a loss near 0, 0.01."""
    near = [100.0, 100.0002] * 8
    assert series(*near).limit == pytest.approx(100.0001 + 3 * 0.01 * 100.0001)
    assert series(*[1e-9, -1e-9] * 8, scale=1.0).limit == pytest.approx(0.03)
    assert series(*[1e-9, 3e-9] * 8).limit == pytest.approx(2e-9 + 3 * 1.0327956e-9)


def test_up_to_the_floor_nothing_is_a_spike() -> None:
    """A policy that has learnt its task: hardly any gradient in most steps, and now and then an ordinary one."""
    rare = Spikes(3.0, max_grad_norm=1.0)
    for norm in [*[1e-3, 3e-3] * 8, 0.8, 1e-3]:
        rare.add(norm, 0.0)
        assert rare.limits.grad_norm in (None, 1.0)
    assert Series(3.0, floor=0.01, values=deque([1.0, 3.0] * 8)).limit == series(*[1.0, 3.0] * 8).limit


def test_the_window_forgets_the_oldest() -> None:
    found = series(*[1000.0, 3000.0] * (WINDOW // 2), *[1.0, 3.0] * (WINDOW // 2))
    assert found.moments[0] == 2.0
    assert found.moments[1] == pytest.approx(math.sqrt(WINDOW / (WINDOW - 1)))


def test_a_spike_joins_as_the_limit_that_it_passed() -> None:
    found = series(*[1.0, 3.0] * 8)
    limit = found.limit
    found.add(1e30)
    assert found.values[-1] == limit
    assert limit < found.limit < 2 * limit


def test_a_number_that_stays_higher_is_accepted_in_time() -> None:
    found, tries = series(*[1.0, 3.0] * 64, sigma=6.0), 0
    while found.limit < 20.0:
        found.add(20.0)
        tries += 1
    assert 3 < tries < 30


def test_either_number_of_a_step_can_be_the_spike() -> None:
    """Losses of 0.4 and 0.6: a tenth of the deviation of 1 and 3, so the limit is 0.5 + 3 * 0.1033."""
    spikes, again = Spikes(3.0, 1.0), Spikes(3.0, 1.0)
    for norm, loss in [(1.0, 0.4), (3.0, 0.6)] * 8:
        spikes.add(norm, loss)
    assert spikes.limits == Limits(pytest.approx(5.0983867), pytest.approx(0.80983867))
    again.load_state_dict(json.loads(json.dumps(spikes.state_dict())))
    assert again.limits == spikes.limits
    assert str(spikes.found("critic", 1.0, 1.0)) == (
        "the loss of critic is 1, a spike: over the last 16 steps its mean is 0.5 and its standard deviation 0.1033, "
        "and trainer.spike_sigma=3 allows 0.8098"
    )
    both = str(again.found("actor", 99.0, 99.0))
    assert "the gradient norm of actor is 99, a spike" in both and "; the loss of actor is 99, a spike" in both
