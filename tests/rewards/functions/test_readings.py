"""Answers as people and models write them: readings.jsonl has the score that each deserves, decided by reading it.

{"reward", "answer", "truth", "score"}; of a judge's answer "score" is the number in it, null without one.
"""

from pathlib import Path

import pytest
from answers import completion

from megarl.config import Config
from megarl.metrics.reading.jsonl import read_lines
from megarl.rewards import load_reward
from megarl.rewards.services.judge import reader
from megarl.samples.sample import Prompt

CASES = list(read_lines(Path(__file__).with_name("readings.jsonl")))


@pytest.mark.parametrize("name", sorted({case["reward"] for case in CASES}))
def test_answers_are_read_as_people_read_them(name: str) -> None:
    wrong = []
    for case in (case for case in CASES if case["reward"] == name):
        if name == "judge":
            score = reader(Config().reward.judge.read)(case["answer"])
        else:
            score = load_reward(name)(Prompt("0-0", [1], "?", case["truth"]), completion(case["answer"]))
        wrong += [] if score == case["score"] else [(case["answer"], case["truth"], case["score"], score)]
    assert not wrong


def test_the_readings_are_many() -> None:
    assert len({(case["reward"], case["answer"], case["truth"]) for case in CASES}) == len(CASES) > 200


@pytest.mark.parametrize("truth", ["five", "2 or 3", "5 million", r"2\pi", "10:30", "1.000,50", "1/0", "", "5\n6"])
def test_a_truth_that_gsm8k_cannot_read_is_an_error_of_its_row(truth: str) -> None:
    for name in ("gsm8k", "gsm8k_strict"):
        with pytest.raises(ValueError, match="^the ground truth .* is no number; expected one, such as 46, 1,000 or"):
            load_reward(name)(Prompt("0-0", [1], "?", truth), completion("#### 5"))


@pytest.mark.parametrize("truth", ["Paris", 1, "A, C", "BC", "", "12"])
def test_a_truth_that_is_no_letter_is_an_error_of_its_row(truth: str | int) -> None:
    with pytest.raises(ValueError, match="^the ground truth .* is no letter of a choice; expected one, such as B or"):
        load_reward("choice")(Prompt("0-0", [1], "?", truth), completion("B"))
