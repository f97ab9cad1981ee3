"""Every visit is settled exactly once, over any number of kills and resumes."""

import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.ledger import FILTERED, LOST, OUTCOMES, SKIPPED, TRAINED, Ledger
from megarl.data.order import Visits, check_same_data


def test_visits_are_handed_out_in_order_and_settled_in_any() -> None:
    ledger = Ledger("data")
    assert ledger.issue(3) == [0, 1, 2]
    ledger.settle(1, TRAINED)
    ledger.settle(2, FILTERED)
    assert ledger.open == [0] and ledger.num_settled == 2
    assert ledger.issue(2) == [3, 4]
    assert ledger.counts == {TRAINED: 1, FILTERED: 1, LOST: 0, SKIPPED: 0}


@pytest.mark.parametrize("number", [1, 9])
def test_a_visit_is_settled_once_and_only_if_it_is_open(number: int) -> None:
    ledger = Ledger("data")
    ledger.issue(2)
    ledger.settle(1, LOST)
    with pytest.raises(AssertionError, match=f"visit {number} is settled twice, or was never handed out"):
        ledger.settle(number, TRAINED)


def resumed(before: Ledger, finished: Sequence[int] = ()) -> Ledger:
    after = Ledger("data")
    after.load_state_dict(json.loads(json.dumps(before.state_dict())), finished=finished)
    return after


def test_what_was_open_is_issued_again_before_anything_new() -> None:
    before = Ledger("data")
    before.issue(5)
    before.settle(1, TRAINED)
    after = resumed(before, [3])
    assert after.open == [0, 2, 3, 4]
    assert after.issue(2) == [0, 2]
    assert after.issue(3) == [4, 5, 6], "visit 3 has its group already"
    after.settle(3, TRAINED)
    assert after.counts[TRAINED] == 2


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="belongs to other data"):
        Ledger("5-ab").load_state_dict(Ledger("9-cd").state_dict())
    check_same_data("5-ab", "5-ab")
    with pytest.raises(ValueError, match=r"belongs to other data \(rows, content and order 9-cd, here 5-ab\)"):
        check_same_data("9-cd", "5-ab")
    before = Ledger("data")
    before.settle(*before.issue(1), TRAINED)
    with pytest.raises(AssertionError, match="settled already"):
        resumed(before, [0])


def test_what_a_rollback_left_out_is_passed_over_when_it_is_its_turn() -> None:
    """Visit 1 was open at the save, 3 is settled, and 6 and 7 had not come yet; over one more resume."""
    before = Ledger("data")
    before.issue(4)
    before.settle(3, TRAINED)
    after = resumed(before)
    after.leave_out([1, 3, 6, 7])
    assert after.issue(4) == [0, 2, 4, 5]
    assert after.passed() == [1]
    assert after.passed() == []
    again = resumed(after, [0, 2, 4, 5])
    again.leave_out([1, 3, 6, 7])
    assert again.issue(2) == [8, 9]
    assert again.passed() == [6, 7]
    assert again.counts == {TRAINED: 1, FILTERED: 0, LOST: 0, SKIPPED: 3}
    assert again.open == [0, 2, 4, 5, 8, 9]


def test_visits_that_were_not_trained_after_all_are_taken_back() -> None:
    ledger = Ledger("data")
    for visit in ledger.issue(3):
        ledger.settle(visit, TRAINED)
    ledger.take_back([0, 2])
    assert (ledger.counts[TRAINED], ledger.counts[SKIPPED], ledger.num_settled) == (1, 2, 3)
    with pytest.raises(AssertionError, match="more visits are taken back than were trained"):
        ledger.take_back([0, 1])


def test_a_thousand_random_lives_settle_every_visit_once() -> None:
    """A life issues and settles; at random moments it saves, and dies: what it did since the save never happened."""
    for seed in range(1000):
        rng = random.Random(seed)
        ledger, saved, outcomes, saved_outcomes = Ledger("data"), Ledger("data").state_dict(), {}, {}
        idle = []  # open visits of which nobody knows in this life
        for _ in range(rng.randrange(60)):
            match rng.choice(["issue", "settle", "settle", "save", "die"]):
                case "issue":
                    idle += ledger.issue(rng.randrange(4))
                case "settle" if idle:
                    visit = idle.pop(rng.randrange(len(idle)))
                    outcomes[visit] = rng.choice(OUTCOMES)
                    ledger.settle(visit, outcomes[visit])
                case "save":
                    saved, saved_outcomes = json.loads(json.dumps(ledger.state_dict())), dict(outcomes)
                case "die":
                    ledger, outcomes, idle = Ledger("data"), dict(saved_outcomes), []
                    ledger.load_state_dict(saved)
        idle += ledger.issue(rng.randrange(4))
        while ledger._again:
            idle += ledger.issue(1)
        for visit in idle:
            outcomes[visit] = TRAINED
            ledger.settle(visit, TRAINED)
        assert ledger.open == []
        assert sorted(outcomes) == list(range(len(outcomes))), "no gap, and none twice"
        assert {name: n for name, n in ledger.counts.items() if n} == dict(Counter(outcomes.values()))


# the order of visits
def visits(rows=5, *, shuffle=True, seed=0):
    return Visits(rows, shuffle=shuffle, seed=seed)


def first(order, count):
    return [order.at(number) for number in range(count)]


def test_without_shuffling_the_rows_come_in_order_for_ever():
    assert first(visits(2, shuffle=False), 5) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


@given(rows=st.integers(1, 40), seed=st.integers(0, 2**32), epochs=st.integers(1, 4))
def test_every_epoch_visits_every_row_once(rows, seed, epochs):
    got = first(visits(rows, seed=seed), rows * epochs)
    for epoch in range(epochs):
        assert sorted(got[epoch * rows : (epoch + 1) * rows]) == [(epoch, row) for row in range(rows)]


@given(numbers=st.lists(st.integers(0, 60), max_size=20))
def test_a_visit_does_not_depend_on_those_before(numbers):
    order, whole = visits(7, seed=3), first(visits(7, seed=3), 61)
    assert [order.at(number) for number in numbers] == [whole[number] for number in numbers]


def test_epochs_and_seeds_differ_and_are_repeatable():
    rows = [row for _, row in first(visits(100), 200)]
    assert rows[:100] != rows[100:]
    assert first(visits(100), 100) == first(visits(100), 100)
    assert rows[:100] != [row for _, row in first(visits(100, seed=1), 100)]
