"""A rest doubles up to a limit; a long run without a failure counts as a new beginning."""

from megarl.processes.restarts import Restarts


def test_rests_double_up_to_a_limit_however_many_failures_there_were() -> None:
    restarts = Restarts(rest_s=1.0, longest_rest_s=5.0)
    rests = []
    for count in (0, 1, 2, 3, 5000):
        restarts.count = count
        rests.append(restarts.next_rest_s)
    assert rests == [1.0, 2.0, 4.0, 5.0, 5.0] and not restarts.are_used_up


def test_restarts_are_used_up_unless_it_ran_for_long() -> None:
    restarts = Restarts(most=2, settled_after_s=100.0, count=2)
    restarts.note_run(99.0)
    assert restarts.are_used_up
    restarts.note_run(100.0)
    assert not restarts.are_used_up and restarts.count == 0
