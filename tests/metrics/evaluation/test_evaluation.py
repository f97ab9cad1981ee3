"""Metrics of an evaluation against numbers worked out by hand, and against slow enumeration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest

from megarl.metrics.evaluation.evaluation import Answers, Mean, expected_best, majority, pass_at, set_metrics, sizes


def test_a_standard_error_of_shares_is_the_binomial_one() -> None:
    found = Mean.of([1.0] * 30 + [0.0] * 70)
    assert found.value == 0.3
    assert found.stderr == pytest.approx(math.sqrt(0.3 * 0.7 / 99))
    assert math.isnan(Mean.of([1.0]).stderr)


def test_one_answer_a_prompt_gives_the_mean_under_verls_name() -> None:
    found = set_metrics("openai/gsm8k", [Answers({"reward": [1.0]}), Answers({"reward": [0.0]})], 1)
    assert found == {
        "val-core/openai/gsm8k/reward/mean@1": 0.5,
        "val-aux/openai/gsm8k/reward/mean@1/stderr": pytest.approx(0.5),
    }


def test_the_number_acc_is_the_core_of_a_set_that_has_it() -> None:
    found = set_metrics(
        "aime", [Answers({"reward": [-1.0], "acc": [0.0]}), Answers({"reward": [1.0], "acc": [1.0]})], 1
    )
    assert found["val-core/aime/acc/mean@1"] == 0.5 and found["val-aux/aime/reward/mean@1"] == 0.0


def test_four_answers_a_prompt_by_hand() -> None:
    prompts = [
        Answers({"reward": [1.0, 1.0, 0.0, 0.0]}, ["4", "4", "5", "6"]),
        Answers({"reward": [0.0, 0.0, 0.0, 1.0]}, ["1", "1", "1", "2"]),
    ]
    found = set_metrics("sums", prompts, 4)
    assert found["val-core/sums/reward/mean@4"] == 0.375
    assert found["val-core/sums/reward/best@4/mean"] == pytest.approx((1 - 0.5**4 + 1 - 0.75**4) / 2)
    assert found["val-aux/sums/reward/worst@2/mean"] == pytest.approx((0.5**2 + 0.25**2) / 2)
    assert found["val-core/sums/reward/pass@4"] == 1.0
    assert found["val-aux/sums/reward/pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6) / 2)
    assert found["val-aux/sums/reward/std@4"] == pytest.approx((0.5 + math.sqrt(3 / 16)) / 2)
    slow = [slow_majority(prompt.votes, prompt.numbers["reward"], 4) for prompt in prompts]
    assert slow[0] > 0.5 > 0.25 > slow[1], "right where most say 4, wrong where most say 1"
    assert found["val-core/sums/reward/maj@4/mean"] == pytest.approx(np.mean(slow), abs=0.03)
    assert all(f"val-aux/{name.partition('/')[2]}/stderr" in found for name in found if not name.endswith("stderr"))


def test_a_majority_needs_the_votes_of_all_answers_and_passing_needs_shares() -> None:
    found = set_metrics("sums", [Answers({"reward": [0.5, 1.0]}, ["4", None])], 2)
    assert not any("maj@" in name or "pass@" in name for name in found)
    assert found["val-core/sums/reward/best@2/mean"] == pytest.approx(0.75 * 1.0 + 0.25 * 0.5)


def test_a_prompt_without_a_score_does_not_count() -> None:
    assert set_metrics("a", [Answers({}), Answers({"reward": [1.0]})], 1) == {"val-core/a/reward/mean@1": 1.0}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_best_is_the_mean_of_all_draws(k: int) -> None:
    numbers = np.array([0.2, -1.0, 0.7, 0.2])
    slow = np.mean([max(draw) for draw in product(numbers, repeat=k)])
    assert expected_best(numbers, k) == pytest.approx(slow)


def slow_majority(votes: Sequence[str | None], numbers: Sequence[float], k: int) -> float:
    value, each = dict(zip(votes, numbers, strict=True)), []
    for draw in product(votes, repeat=k):
        most = max(draw.count(vote) for vote in draw)
        each.append(np.mean([value[vote] for vote in set(draw) if draw.count(vote) == most]))
    return float(np.mean(each))


def test_the_majority_is_that_of_all_draws() -> None:
    votes, numbers = ["a", "b", "b", "c"], np.array([1.0, 0.5, 0.5, 0.0])
    found = majority(votes, numbers, 3, np.random.default_rng(0))
    assert found == pytest.approx(slow_majority(votes, numbers, 3), abs=0.03)
    assert majority(["a", "a"], np.array([1.0, 1.0]), 2, np.random.default_rng(0)) == 1.0


def test_passing_is_the_share_of_all_choices_with_a_right_answer() -> None:
    right = [1, 0, 0, 1, 0]
    slow = np.mean([max(chosen) for chosen in combinations(right, 3)])
    assert pass_at(5, 2, 3) == pytest.approx(slow)


def test_sizes_are_verls() -> None:
    assert [sizes(n) for n in (2, 3, 8, 12)] == [[2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]
