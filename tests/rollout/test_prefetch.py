"""What is admitted and taken for each iteration, what dynamic sampling keeps of it, and what a checkpoint keeps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.data.ledger import Ledger
from megarl.rollout.collector.collector_client import Ticket
from megarl.rollout.collector.messages import Order
from megarl.rollout.group_filter import Filter
from megarl.rollout.prefetch import Prefetcher, PrefetchSettings, RolloutBatch
from megarl.rollout.protocol import SamplingParams
from megarl.rollout.usage import Usage
from megarl.samples.sample import Completion, LostRollout, Prompt, Sample, VersionSpan

Scores = Callable[[int], list[float] | LostRollout]


def prompt_of(number: int) -> Prompt:
    """The prompt of visit i is the token i."""
    return Prompt(f"0-{number}", [number], "")


class Numbers:
    def visit(self, number: int) -> Prompt:
        return prompt_of(number)


def sample_of(number: int, score: float, length: int = 1, **extra: float) -> Sample:
    completion = Completion([1] * length, [-1.0] * length, "stop", (VersionSpan(0, 0, length),))
    return Sample.of(prompt_of(number), completion, score, extra)


def lost(number: int) -> LostRollout:
    return LostRollout(prompt_of(number), "no server")


class Written:
    """Stands for the collectors: `scores(i)` are the rewards of the group of visit i, or say how it was lost.

    Each `wait` finishes what was asked for, or only what `finishes` names.
    """

    def __init__(self, scores: Scores, finishes: set[int] | None) -> None:
        self.scores, self.finishes = scores, finishes
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.open: dict[int, Ticket] = {}
        self.counters: dict[str, float] = {}

    def submit(self, prompts: Sequence[Prompt], **how: Any) -> list[Ticket]:
        tickets = [Ticket(Order(0, prompt, how["n"], how["params"])) for prompt in prompts]
        self.asked.append(([prompt.token_ids[0] for prompt in prompts], how))
        self.open.update((ticket.prompt.token_ids[0], ticket) for ticket in tickets)
        return tickets

    def wait(self, timeout_s: float = 1.0) -> bool:
        done = [visit for visit in self.open if self.finishes is None or visit in self.finishes]
        for visit in done:
            self.open.pop(visit).group = self.group(visit)
        return bool(done)

    def group(self, number: int) -> list[Sample] | LostRollout:
        scores = self.scores(number)
        if isinstance(scores, LostRollout):
            return scores
        return [sample_of(number, score, acc=-score) for score in scores]


def prefetcher(
    scores: Scores, *, ahead: int = 0, num_steps: int = 9, finishes: set[int] | None = None, **how: Any
) -> tuple[Prefetcher, Written, Ledger]:
    """Iterations of four visits."""
    written, ledger = Written(scores, finishes), how.pop("ledger", Ledger("data"))
    continues = {name: how.pop(name) for name in ("first_step", "waiting", "clock") if name in how}
    how = {"n": 2, "params": SamplingParams(sampling_seed=7), "order": "finished"} | how
    settings = PrefetchSettings(num_prompts=4, ahead=ahead, num_steps=num_steps, **how)
    return Prefetcher(written, ledger, Numbers(), settings, **continues), written, ledger


def resumed(
    asking: Prefetcher, ledger: Ledger, *, left_out: Sequence[int] = (), **how: Any
) -> tuple[Prefetcher, Written, Ledger]:
    """A later run that goes on from the checkpoint after the first iteration."""
    state, waiting = ledger.state_dict(), asking.waiting
    ledger = Ledger("data")
    ledger.load_state_dict(state, finished=waiting)
    ledger.leave_out(left_out)
    return prefetcher(odd_differ, first_step=1, ledger=ledger, waiting=waiting, **how)


def following(asking: Prefetcher) -> RolloutBatch:
    """The next iteration; nothing else is done meanwhile."""
    while not asking.ready():
        pass
    return asking.take()


def numbers(groups: list[list[Sample]]) -> list[int]:
    return [group[0].prompt.token_ids[0] for group in groups]


def odd_differ(number: int) -> list[float]:
    return [0.0, float(number % 2)]


def test_without_a_filter_every_group_counts() -> None:
    asking, written, ledger = prefetcher(odd_differ)
    first, second = following(asking), following(asking)
    assert (numbers(first.groups), numbers(second.groups)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert [asked for asked, _ in written.asked] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first.metrics["rollout/lost"] == first.metrics["rollout/stale_prefix"] == 0.0
    assert "rollout/dropped_share" not in first.metrics
    assert ledger.counts == {"trained": 8, "filtered": 0, "lost": 0, "skipped": 0}
    assert [(how["n"], how["greedy"]) for _, how in written.asked] == [(2, False)] * 2
    asking, written, _ = prefetcher(odd_differ, greedy=True)
    following(asking)
    assert written.asked[0][1]["greedy"] is True


def test_an_iteration_that_is_not_ready_is_not_taken() -> None:
    asking, written, _ = prefetcher(odd_differ, finishes={0, 1, 2})
    assert not asking.ready()
    assert asking.progress == (3, 4)
    with pytest.raises(AssertionError, match="an iteration is taken when it is ready"):
        asking.take()


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("order", ["prompts", "finished"])
def test_no_more_is_outstanding_than_staleness_allows(order: str, ahead: int) -> None:
    """(ahead + 1) iterations while the driver waits, `ahead` while it trains; none beyond the last iteration."""
    asking, written, ledger = prefetcher(odd_differ, ahead=ahead, num_steps=5, order=order)
    for step in range(5):
        assert not ledger.open or len(ledger.open) == 4 * min(ahead, 5 - step)
        while not asking.ready():
            assert len(ledger.open) == 4 * min(ahead + 1, 5 - step)
        asking.take()
    assert sorted(visit for asked, _ in written.asked for visit in asked) == list(range(20))
    assert ledger.counts["trained"] == 20 and ledger.open == []


def test_of_what_is_finished_the_oldest_is_taken() -> None:
    asking, written, _ = prefetcher(odd_differ, ahead=1, finishes={1, 3, 4, 6, 7})
    first = following(asking)
    assert numbers(first.groups) == [1, 3, 4, 6], "visit 0 is not finished; visit 7 is younger"
    assert first.metrics["rollout/finished_waiting"] == 1 and first.metrics["rollout/in_flight"] == 3
    assert first.metrics["rollout/displacement_max"] == 0
    written.finishes = None
    second = following(asking)
    assert numbers(second.groups) == [0, 2, 5, 7]
    assert second.metrics["rollout/displacement_max"] == 4, "visit 0 was the fifth that was trained"
    assert second.metrics["rollout/oldest_start_lag"] == 0, "those of the third iteration are outstanding"


def test_groups_that_are_all_alike_are_dropped_and_others_take_their_place() -> None:
    asking, written, ledger = prefetcher(odd_differ, keep=Filter())
    found = following(asking)
    assert numbers(found.groups) == [1, 3, 5, 7]
    assert [asked for asked, _ in written.asked] == [[0, 1, 2, 3], [4, 5], [6], [7]], "one for each that was dropped"
    assert found.metrics["rollout/dropped_share"] == 0.5 and found.metrics["rollout/gen_batches"] == 2
    assert found.visits == {"trained": [1, 3, 5, 7], "filtered": [0, 2, 4, 6], "lost": [], "skipped": []}
    assert ledger.counts == {"trained": 4, "filtered": 4, "lost": 0, "skipped": 0}
    assert numbers(following(asking).groups) == [9, 11, 13, 15]


@pytest.mark.parametrize("late", range(8))
def test_an_on_policy_iteration_with_refill_is_the_same_whatever_finishes_first(late: int) -> None:
    """The first four visits in number whose rewards differ; nothing is left over."""
    asking, written, ledger = prefetcher(odd_differ, keep=Filter())
    written.finishes = set(range(8)) - {late}
    for _ in range(9):
        asking.ready()
    written.finishes = None
    assert numbers(following(asking).groups) == [1, 3, 5, 7]
    assert ledger.open == [] and ledger.num_settled == 8


def test_ahead_of_the_training_a_dropped_group_is_replaced_where_the_iteration_needs_it_or_with_the_next() -> None:
    asking, written, _ = prefetcher(lambda number: [0.0, float(number not in (1, 2))], ahead=1, keep=Filter())
    assert numbers(following(asking).groups) == [0, 3, 4, 5]
    assert [asked for asked, _ in written.asked] == [[0, 1, 2, 3, 4, 5, 6, 7]]
    following(asking)
    assert written.asked[1][0] == [8, 9, 10, 11, 12, 13], "two in the place of the dropped ones"


def test_without_a_refill_the_rest_is_the_iteration_even_if_nothing_is_left() -> None:
    asking, written, ledger = prefetcher(lambda number: [0.0, float(number == 2)], keep=Filter(refill=False))
    assert numbers(following(asking).groups) == [2]
    empty = following(asking)
    assert empty.groups == []
    assert empty.metrics["rollout/dropped_share"] == 1.0
    assert len(written.asked) == 2
    assert ledger.counts == {"trained": 1, "filtered": 7, "lost": 0, "skipped": 0}


def test_a_bound_on_generation_batches_ends_in_one_clear_sentence() -> None:
    asking, written, _ = prefetcher(lambda number: [0.0, float(number == 2)], keep=Filter(max_batches=3))
    with pytest.raises(RuntimeError) as caught:
        following(asking)
    assert str(caught.value).startswith(
        "algorithm.filter_groups.max_num_gen_batches=3: 1 of 13 groups had completions of different score, and an "
        "iteration needs 4; expected prompts that are neither solved nor hopeless"
    )


def test_a_group_teaches_where_its_scores_differ() -> None:
    keeps = [
        Filter().keeps([sample_of(0, score) for score in scores]) for scores in ([1.0, 0.0, 1.0], [0.5, 0.5], [1.0], [])
    ]
    assert keeps == [True, False, False, False]


def test_a_metric_may_be_a_further_number_of_the_reward() -> None:
    asking, _, _ = prefetcher(odd_differ, keep=Filter("acc"))
    assert numbers(following(asking).groups) == [1, 3, 5, 7]
    asking, _, _ = prefetcher(odd_differ, keep=Filter("fluency"))
    with pytest.raises(ValueError, match=r"metric=fluency: the reward of sample 0-0#0 has no number .*\(here: acc\)$"):
        following(asking)


def test_a_difference_that_no_batch_can_hold_is_none() -> None:
    """0.1 + 0.2 and 0.3 are one float32."""
    group = [sample_of(0, reward) for reward in (0.1 + 0.2, 0.3)]
    assert not Filter().keeps(group)
    assert Filter().keeps([*group, sample_of(0, 0.31)])


def test_a_sample_whose_reward_failed_counts_as_0() -> None:
    failed = sample_of(0, 0.0, reward_error=1.0)
    assert not Filter("acc").keeps([failed, sample_of(0, 1.0, acc=0.0)])
    assert Filter("acc").keeps([failed, sample_of(0, 0.0, acc=1.0)])


def test_a_lost_group_is_missing_in_its_iteration_and_with_refill_it_is_replaced() -> None:
    def loses_1(number: int) -> list[float] | LostRollout:
        return lost(number) if number == 1 else [0.0, 1.0]

    asking, _, ledger = prefetcher(loses_1)
    found = following(asking)
    assert numbers(found.groups) == [0, 2, 3] and [lost.reason for lost in found.lost] == ["no server"]
    assert ledger.counts == {"trained": 3, "filtered": 0, "lost": 1, "skipped": 0}
    asking, _, _ = prefetcher(loses_1, keep=Filter())
    found = following(asking)
    assert numbers(found.groups) == [0, 2, 3, 4]
    assert (found.metrics["rollout/lost"], found.metrics["reward/unscored"]) == (1.0, 0.0)
    asking, _, ledger = prefetcher(lambda n: replace(lost(n), unscored=2) if n == 1 else [0.0, 1.0])
    found = following(asking)
    assert (found.metrics["rollout/lost"], found.metrics["reward/unscored"], ledger.counts["lost"]) == (0.0, 2.0, 1)


@pytest.mark.parametrize("keep", [None, Filter(), Filter(refill=False)])
def test_an_iteration_that_lost_all_stops_the_run(keep: Filter | None) -> None:
    asking, _, _ = prefetcher(lost, keep=keep)
    with pytest.raises(RuntimeError, match="^all 4 prompts of an iteration were lost; the first: no server$"):
        following(asking)


def test_with_refill_an_iteration_that_only_loses_ends_though_one_group_was_there() -> None:
    asking, _, ledger = prefetcher(lambda n: [0.0, 1.0] if n == 0 else lost(n), keep=Filter(max_batches=3))
    with pytest.raises(RuntimeError, match="1 of 1 groups had .* 12 more were lost, the first: no server$"):
        following(asking)
    assert ledger.counts == {"trained": 0, "filtered": 0, "lost": 12, "skipped": 0}


def test_a_resumed_run_uses_what_waited_and_begins_the_rest_again() -> None:
    asking, written, ledger = prefetcher(odd_differ, ahead=2, finishes={0, 1, 2, 3, 6, 9})
    following(asking)
    assert sorted(asking.waiting) == [6, 9] and ledger.state_dict()["open"] == [4, 5, 6, 7, 8, 9, 10, 11]
    again, written, ledger = resumed(asking, ledger, ahead=2, num_steps=4)
    found = [following(again) for _ in range(3)]
    assert [asked for asked, _ in written.asked] == [[4, 5, 7, 8, 10, 11, 12, 13, 14, 15]]
    assert [numbers(batch.groups) for batch in found] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert ledger.counts["trained"] == 16


def test_what_a_rollback_left_out_is_settled_in_the_iteration_that_would_have_begun_it() -> None:
    """Saved after the first iteration with 4 to 7 open; the rollback leaves out 5 and 6, and 8 to 11."""
    asking, written, ledger = prefetcher(odd_differ, ahead=1, finishes={0, 1, 2, 3})
    following(asking)
    again, written, ledger = resumed(asking, ledger, left_out=[5, 6, 8, 9, 10, 11], num_steps=3)
    found = [following(again) for _ in range(2)]
    assert [asked for asked, _ in written.asked] == [[4, 7, 12, 13], [14, 15, 16, 17]]
    assert found[0].visits == {"trained": [4, 7, 12, 13], "filtered": [], "lost": [], "skipped": [5, 6, 8, 9, 10, 11]}
    assert found[1].visits["skipped"] == []
    assert ledger.counts == {"trained": 12, "filtered": 0, "lost": 0, "skipped": 6}


def test_visits_of_a_step_that_was_skipped_do_not_count_as_trained() -> None:
    asking, _, ledger = prefetcher(odd_differ)
    found = following(asking)
    asking.skip(found, [1, 3])
    assert found.visits == {"trained": [0, 2], "filtered": [], "lost": [], "skipped": [1, 3]}
    assert ledger.counts == {"trained": 2, "filtered": 0, "lost": 0, "skipped": 2}


def test_a_turn_of_shared_gpus_lasts_its_time_or_until_nothing_is_left_to_do() -> None:
    now = [0.0]
    asking, written, _ = prefetcher(odd_differ, ahead=1, turn_s=5.0, clock=lambda: now[0], finishes={0, 1, 2, 3})
    assert not asking.ready(), "the iteration is there, but the servers have time left"
    now[0] = 4.9
    assert not asking.ready()
    now[0] = 5.0
    assert asking.ready()
    assert numbers(asking.take().groups) == [0, 1, 2, 3]
    written.finishes = {4, 5}
    now[0] = 99.0
    assert not asking.ready()
    now[0] = 200.0
    assert not asking.ready(), "the time is over, and the iteration is not full"
    written.finishes = None
    assert asking.ready()


@pytest.mark.parametrize(
    ("began", "turn_s", "leaves", "expected"),
    [
        (0.0, None, False, 3.0),  # the last completion was there at 7, and the last reward of the iteration at 10
        (8.0, None, False, 2.0),  # the trainer came at 8
        (11.0, None, False, 0.0),  # and here when all was done
        (0.0, 9.0, True, 1.0),  # the servers' turn lasts until 9
        (0.0, 9.0, False, 3.0),  # and ends where nothing is left to generate
    ],
)
def test_what_an_iteration_waited_only_for_rewards(
    began: float, turn_s: float | None, leaves: bool, expected: float
) -> None:
    now = [began]
    asking, written, _ = prefetcher(odd_differ, ahead=int(leaves), turn_s=turn_s, clock=lambda: now[0], finishes=set())
    assert not asking.ready()
    tickets = [written.open[visit] for visit in range(4)]
    for ticket, times in zip(tickets, [(1.0, 9.0), (7.0, 8.0), (2.0, 2.5), (3.0, 10.0)], strict=True):
        ticket.generated_at, ticket.came_at = times
    written.finishes, now[0] = {0, 1, 2, 3}, 12.0
    assert following(asking).reward_s == expected


def test_what_is_generated_can_be_waited_for_without_beginning_more() -> None:
    asking, written, _ = prefetcher(odd_differ, ahead=1, finishes={0, 1, 2, 3})
    following(asking)
    assert not asking.is_idle
    written.finishes = None
    asking.wait()
    assert asking.is_idle
    assert len(written.asked) == 1


def as_long_as_its_number(visit: int) -> list[Sample]:
    return [sample_of(visit, 0.0, length=visit + 1)]


def test_lengths_that_were_trained_are_compared_with_lengths_that_were_generated() -> None:
    asking, written, ledger = prefetcher(odd_differ, ahead=1, finishes={0, 1, 2, 3, 4})
    written.group = as_long_as_its_number  # type: ignore[method-assign]
    found = following(asking)
    assert found.metrics["rollout/length_trained_over_generated"] == pytest.approx(2.5 / 3.0)

    again, written, _ = resumed(asking, ledger)
    written.group = as_long_as_its_number  # type: ignore[method-assign]
    found = following(again)
    assert numbers(found.groups) == [4, 5, 6, 7]
    assert found.metrics["rollout/length_trained_over_generated"] == 1.0, "what waited in the checkpoint counts too"


def test_the_time_before_the_first_iteration_is_waited_for_is_no_idle_time_of_the_servers() -> None:
    asking, written, _ = prefetcher(odd_differ, finishes=set())
    written.counters = {"busy_s": 0.0, "servers_s": 100.0}
    assert not asking.ready()
    written.finishes, written.counters = None, {"busy_s": 3.0, "servers_s": 104.0}
    assert following(asking).metrics["rollout/servers_idle_share"] == 0.25


def test_every_metric_is_on_the_page_of_the_outputs() -> None:
    asking, _, _ = prefetcher(odd_differ, ahead=1, keep=Filter())
    counted = Usage({}).of_step({"tokens": 2.0, "busy_s": 1.0, "servers_s": 2.0, "wasted_lost": 1.0})
    names = set(following(asking).metrics) | {f"rollout/{name}" for name in counted}
    page = (Path(__file__).parents[2] / "docs/outputs.md").read_text()
    missing = [name for name in names if f"`{name.replace('/lost', '/CAUSE')}`" not in page and f"`{name}`" not in page]
    assert not missing


def test_what_could_not_be_scored_is_counted_once_and_its_visits_are_settled() -> None:
    def scores(number: int) -> list[float] | LostRollout:
        if number == 2:
            return LostRollout(prompt_of(2), "3 of 4 completions could not be scored", unscored=3)
        return [0.0, 1.0, 0.5, 0.0][: 3 if number == 1 else 4]

    asking, _, ledger = prefetcher(scores, n=4)
    found, after = following(asking), following(asking)
    assert [len(group) for group in found.groups] == [4, 3, 4]
    assert found.visits == {"trained": [0, 1, 3], "filtered": [], "lost": [2], "skipped": []}
    assert (found.metrics["reward/unscored"], after.metrics["reward/unscored"]) == (4.0, 0.0)
    assert ledger.counts == {"trained": 7, "filtered": 0, "lost": 1, "skipped": 0} and ledger.open == []
