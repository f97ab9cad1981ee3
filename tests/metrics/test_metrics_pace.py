"""How long a run still takes, by hand."""

from __future__ import annotations

from megarl.metrics.pace import Pace, clock_text, is_step


def test_before_the_first_step_nothing_is_known_and_after_it_its_own_seconds():
    pace = Pace()
    assert pace.seconds_left(100) is None
    pace.note(1, 612.0, 2.0)
    assert pace.seconds_left(100) == 99 * 2.0


def test_from_end_to_end_what_is_between_steps_counts():
    pace = Pace()
    for step, end in ((1, 610.0), (2, 650.0), (3, 690.0), (5, 770.0)):
        pace.note(step, end, 10.0)
    assert pace.seconds_left(80) == 75 * 40.0
    assert pace.seconds_left(5) == pace.seconds_left(4) == 0.0


def test_steps_that_are_made_again_begin_a_new_pace():
    pace = Pace()
    for step, end in ((1, 10.0), (2, 20.0), (3, 30.0), (2, 500.0), (3, 504.0)):
        pace.note(step, end, 4.0)
    assert pace.seconds_left(10) == 7 * 4.0


def test_metrics_of_an_evaluation_are_none_of_a_step():
    assert is_step({"timing_s/step": 1.0, "val/score": 0.5})
    assert not is_step({"val/score": 0.5, "timing_s/testing": 3.0, "audit/gap": 0.1})


def test_seconds_as_a_clock_shows_them():
    assert [clock_text(seconds) for seconds in (None, 0.2, 75, 3725)] == ["?", "0:00", "1:15", "1:02:05"]
