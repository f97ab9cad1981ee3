"""What is asked for each iteration, what dynamic sampling keeps of it, and where a resumed run would go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megarl.rollout.prefetch import Filter, Prefetcher, RolloutBatch
from megarl.rollout.protocol import SamplingParams
from megarl.sample import Completion, LostRollout, Prompt, Sample, VersionSpan

Scores = Callable[[int], list[float] | None]


class Numbers:
    """Prompts 0, 1, 2, ... and the position among them."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def take(self, count: int) -> list[Prompt]:
        self.position += count
        return [Prompt(f"0-{i}", [i], "") for i in range(self.position - count, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}


class Written:
    """Stands for a CollectorClient: `scores(i)` are the rewards of the group of prompt i, None loses it."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.questions: Counter[int] = Counter()  # by ticket

    def submit(self, prompts: Sequence[Prompt], **how: Any) -> int:
        self.asked.append(([prompt.token_ids[0] for prompt in prompts], how))
        return len(self.asked) - 1

    def ready(self, ticket: int, timeout_s: float) -> bool:
        """At the second question."""
        self.questions[ticket] += 1
        return self.questions[ticket] > 1

    def progress(self, ticket: int) -> tuple[int, int]:
        return 0, len(self.asked[ticket][0])

    def take(self, ticket: int) -> list[list[Sample] | LostRollout]:
        return [self.group(i) for i in self.asked[ticket][0]]

    def group(self, number: int) -> list[Sample] | LostRollout:
        prompt, scores = Prompt(f"0-{number}", [number], ""), self.scores(number)
        if scores is None:
            return LostRollout(prompt, "no server")
        completion = Completion([1], [-1.0], "stop", (VersionSpan(0, 0, 1),))
        return [Sample(prompt, completion, score, {"acc": -score}) for score in scores]


def prefetcher(
    scores: Scores, *, ahead: int = 0, num_steps: int = 9, first: int = 0, **how: Any
) -> tuple[Prefetcher, Written]:
    collector, params = Written(scores), SamplingParams(sampling_seed=7)
    source = Numbers(first)
    sizes = {"num_prompts": 4, "n": 2, "first_step": 0, "num_steps": num_steps}
    return Prefetcher(collector, source, params=params, ahead=ahead, **sizes, **how), collector  # type: ignore[arg-type]


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
    asking, collector = prefetcher(odd_differ)
    first, second = following(asking), following(asking)
    assert (numbers(first.groups), numbers(second.groups)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert (first.position, second.position) == ({"position": 4}, {"position": 8})
    assert first.metrics == {"rollout/lost": 0.0}
    seeds = [how["params"].sampling_seed for _, how in collector.asked]
    assert seeds == [7 * 1_000_003, 7 * 1_000_003 + 1]
    assert [(how["n"], how["greedy"]) for _, how in collector.asked] == [(2, False)] * 2


def test_greedy_completions_are_asked_for_where_they_are_wanted() -> None:
    asking, collector = prefetcher(odd_differ, greedy=True)
    following(asking)
    assert collector.asked[0][1]["greedy"] is True


def test_groups_that_are_all_alike_are_dropped_and_others_take_their_place() -> None:
    asking, collector = prefetcher(odd_differ, keep=Filter())
    found = following(asking)
    assert numbers(found.groups) == [1, 3, 5, 7]
    assert [asked for asked, _ in collector.asked] == [[0, 1, 2, 3], [4, 5, 6, 7]], "half are kept, so 4 for a gap of 2"
    assert found.metrics == {"rollout/lost": 0.0, "rollout/dropped_share": 0.5, "rollout/gen_batches": 2.0}
    assert found.position == {"position": 8}
    seeds = {how["params"].sampling_seed for _, how in collector.asked}
    assert len(seeds) == 1, "one iteration, one seed; prompts differ by their uid"
    assert numbers(following(asking).groups) == [9, 11, 13, 15]


def test_every_generation_batch_is_waited_for_and_its_progress_can_be_told() -> None:
    """One question for each that is answered with no, and one that is answered with yes."""
    asking, collector = prefetcher(lambda number: [0.0, float(number in (0, 1, 2, 4))], keep=Filter())
    told = []
    while not asking.ready():
        told.append((len(collector.asked), asking.progress))
    assert told == [(1, (0, 4)), (2, (0, 2)), (2, (0, 2))], "the first batch was short of one group"
    assert numbers(asking.take().groups) == [0, 1, 2, 4]


def test_an_iteration_that_is_not_ready_is_not_taken() -> None:
    asking, _ = prefetcher(odd_differ)
    assert not asking.ready()
    with pytest.raises(AssertionError, match="an iteration is taken when it is ready"):
        asking.take()


def test_what_is_more_than_an_iteration_wants_is_left_out() -> None:
    asking, _ = prefetcher(lambda number: [0.0, float(number in (0, 1, 2) or number > 3)], keep=Filter())
    found = following(asking)
    assert numbers(found.groups) == [0, 1, 2, 4]
    assert found.position == {"position": 6}, "three of four were kept, so two prompts for a gap of one"
    assert found.metrics["rollout/dropped_share"] == pytest.approx(1 / 6)


def test_without_a_refill_the_rest_is_the_iteration_even_if_nothing_is_left() -> None:
    asking, collector = prefetcher(lambda number: [0.0, float(number == 2)], keep=Filter(refill=False))
    assert numbers(following(asking).groups) == [2]
    empty = following(asking)
    assert empty.groups == []
    assert empty.metrics["rollout/dropped_share"] == 1.0
    assert len(collector.asked) == 2


def test_a_bound_on_generation_batches_ends_in_one_clear_sentence() -> None:
    asking, collector = prefetcher(lambda number: [0.0, float(number == 2)], keep=Filter(max_batches=3))
    with pytest.raises(RuntimeError) as caught:
        following(asking)
    assert str(caught.value).startswith(
        "algorithm.filter_groups.max_num_gen_batches=3: 1 of 12 groups had completions of different score, and an "
        "iteration needs 4; expected prompts that are neither solved nor hopeless"
    )
    assert len(collector.asked) == 3


def test_a_metric_may_be_a_further_number_of_the_reward() -> None:
    asking, _ = prefetcher(odd_differ, keep=Filter("acc"))
    assert numbers(following(asking).groups) == [1, 3, 5, 7]
    asking, _ = prefetcher(odd_differ, keep=Filter("fluency"))
    with pytest.raises(ValueError, match=r"metric=fluency: the reward of sample 0-0#0 has no number .*\(here: acc\)$"):
        following(asking)


def test_a_sample_whose_reward_failed_counts_as_0() -> None:
    prompt, completion = Prompt("0-0", [0], ""), Completion([1], [-1.0], "stop", (VersionSpan(0, 0, 1),))
    failed = Sample(prompt, completion, 0.0, {"reward_error": 1.0})
    assert not Filter("acc").keeps([failed, Sample(prompt, completion, 1.0, {"acc": 0.0})])
    assert Filter("acc").keeps([failed, Sample(prompt, completion, 0.0, {"acc": 1.0})])


def test_lost_prompts_are_replaced_too_and_an_iteration_that_lost_all_stops_the_run() -> None:
    asking, _ = prefetcher(lambda number: None if number == 1 else [0.0, 1.0], keep=Filter())
    found = following(asking)
    assert numbers(found.groups) == [0, 2, 3, 4]
    assert found.metrics["rollout/lost"] == 1.0
    asking, _ = prefetcher(lambda number: None)
    with pytest.raises(RuntimeError, match="^all 4 prompts of an iteration were lost; the first: no server$"):
        following(asking)


def test_ahead_of_the_training_no_prompt_is_left_out_by_a_resumed_run() -> None:
    asking, collector = prefetcher(odd_differ, ahead=1, keep=Filter())
    first = following(asking)
    assert [asked for asked, _ in collector.asked] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert numbers(first.groups) == [1, 3, 9, 11], "the second iteration was under way already"
    assert first.position == {"position": 4}, "where that one begins"
    second = following(asking)
    assert numbers(second.groups) == [5, 7, 17, 19]
    assert second.position == {"position": 12}

    again, _ = prefetcher(odd_differ, ahead=1, keep=Filter(), first=first.position["position"])
    assert numbers(following(again).groups)[:2] == [5, 7]


def test_a_resumed_feed_asks_for_what_the_first_would_have_asked_for() -> None:
    asking, collector = prefetcher(odd_differ, keep=Filter())
    following(asking)
    position = following(asking).position
    third = following(asking)
    resumed = Written(odd_differ)
    params = SamplingParams(sampling_seed=7)
    again = Prefetcher(
        resumed, Numbers(position["position"]), num_prompts=4, n=2, params=params, ahead=0, first_step=2, num_steps=9,
        keep=Filter(),
    )  # type: ignore[arg-type]  # fmt: skip
    assert following(again) == third
    assert resumed.asked == collector.asked[4:]


def test_nothing_is_asked_beyond_the_last_iteration() -> None:
    asking, collector = prefetcher(odd_differ, ahead=3, num_steps=2)
    following(asking)
    assert len(collector.asked) == 2
    assert following(asking).position == {"position": 8}
