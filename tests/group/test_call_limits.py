"""The time limit of a call, from those before."""

from __future__ import annotations

from megarl.group.limits import CallLimits


def test_a_first_call_may_take_the_longest_and_later_ones_a_multiple() -> None:
    limits = CallLimits(600.0, factor=5.0, floor_s=30.0)
    assert limits.of("update actor", 100) == 600
    limits.took("update actor", 100, 40.0)
    limits.took("update actor", 100, 20.0)
    assert limits.of("update actor", 100) == 200, "5 times the longest"
    assert limits.of("update critic", 100) == 600, "another kind"


def test_the_floor_and_the_longest_bound_the_limit() -> None:
    limits = CallLimits(600.0, factor=5.0, floor_s=30.0)
    limits.took("columns actor", 0, 0.1)
    assert limits.of("columns actor", 0) == 30
    limits.took("columns actor", 0, 500.0)
    assert limits.of("columns actor", 0) == 600


def test_a_call_with_far_more_data_counts_as_a_first_one() -> None:
    """The canary of a push goes the way of a whole batch."""
    limits = CallLimits(600.0, factor=5.0, floor_s=30.0)
    limits.took("columns actor", 100, 1.0)
    assert limits.of("columns actor", 200) == 30
    assert limits.of("columns actor", 201) == 600


def test_a_method_that_waits_for_others_always_may_take_the_longest() -> None:
    limits = CallLimits(600.0, factor=5.0, floor_s=30.0, outside=("push",))
    limits.took("push actor", 0, 1.0)
    assert limits.of("push actor", 0) == 600


def test_without_a_factor_all_calls_may_take_the_longest() -> None:
    limits = CallLimits(600.0)
    limits.took("digest", 0, 1.0)
    assert limits.of("digest", 0) == 600


def test_a_first_call_of_which_the_seconds_are_predicted_may_take_a_multiple_and_the_start() -> None:
    limits = CallLimits(3600.0, factor=5.0, floor_s=120.0, outside=("push",))
    limits.expect({"update actor": 40.0, "columns actor": 700.0, "push actor": 1.0})
    assert limits.of("update actor", 100) == 600 + 5 * 40
    assert limits.of("columns actor", 100) == 3600, "600 + 5 * 700 is more"
    assert limits.of("update critic", 100) == limits.of("push actor", 100) == 3600, "not predicted, and not counted"
    limits.took("update actor", 100, 50.0)
    assert limits.of("update actor", 200) == 250, "5 times the longest so far"
    assert limits.of("update actor", 201) == 800, "far more data: a first one"


def test_a_prediction_makes_no_limit_longer() -> None:
    limits = CallLimits(600.0, factor=5.0)
    limits.expect({"update actor": 40.0})
    assert limits.of("update actor", 100) == 600
