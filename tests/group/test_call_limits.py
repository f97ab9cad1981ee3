"""The time limit of a call, from those before."""

from megarl.group.limits import CallLimits


def test_a_first_call_may_take_the_longest_and_later_ones_a_multiple() -> None:
    limits = CallLimits(600.0, factor=5.0, floor_s=30.0)
    assert limits.of("update actor", 100) == 600
    limits.took("update actor", 100, 40.0)
    limits.took("update actor", 100, 20.0)
    assert limits.of("update actor", 100) == 200, "5 times the longest"
    assert limits.of("update critic", 100) == 600, "another kind"
    limits.took("columns actor", 100, 0.1)
    assert limits.of("columns actor", 200) == 30, "the floor"
    assert limits.of("columns actor", 201) == 600, "far more data counts as a first call: a canary goes that way"
    limits.took("columns actor", 100, 500.0)
    assert limits.of("columns actor", 100) == 600, "no more than the longest"


def test_a_method_that_waits_for_others_and_one_without_a_factor_always_may_take_the_longest() -> None:
    for limits in (CallLimits(600.0, factor=5.0, floor_s=30.0, outside=("push",)), CallLimits(600.0)):
        limits.took("push actor", 0, 1.0)
        assert limits.of("push actor", 0) == 600
