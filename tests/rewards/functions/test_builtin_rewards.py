from decimal import Decimal

import pytest

from megarl.rewards import REWARDS, load_reward
from megarl.rewards.functions.choice import chosen_letter
from megarl.rewards.functions.gsm8k import to_decimal
from megarl.sample import Completion, Prompt, VersionSpan


def score(name, text, truth):
    prompt = Prompt("0-0", [1], "question", truth)
    return load_reward(name)(prompt, Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), text))


@pytest.mark.parametrize(
    ("text", "truth", "wanted"),
    [("46", "46", 1), (" 46\n", "46 ", 1), ("46.", "46", 0), ("046", "46", 0), ("", "46", 0)],
)
def test_exact(text, truth, wanted):
    assert score("exact", text, truth) == wanted


@pytest.mark.parametrize(
    ("text", "truth", "wanted"),
    [
        ("3 + 4 = 7\n#### 7", "7", 1),
        ("#### 7 and #### 8", "8", 1),
        ("#### $1,234.00", "1234", 1),
        ("#### 12%", "12", 1),
        ("#### -3", "-3", 1),
        ("#### 3", "-3", 0),
        ("the answer is #### seven, that is 8", "8", 1),
        (r"so \boxed{42}, checked in 3 ways", "42", 1),
        (r"\boxed{\$1,000}", "1000", 1),
        ("first 3, then 4 apples.", "4", 1),
        ("first 3, then 4 apples.", "3", 0),
        ("It costs 72.", "72", 1),
        ("0.5", ".50", 1),
        ("no number", "3", 0),
        ("", "3", 0),
    ],
)
def test_gsm8k(text, truth, wanted):
    assert score("gsm8k", text, truth) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"), [("#### 7", 1), ("####7", 1), ("#### 8", 0), ("7", 0), (r"\boxed{7}", 0), ("7 ####", 0)]
)
def test_gsm8k_strict_pays_for_the_mark(text, wanted):
    assert score("gsm8k_strict", text, "7") == wanted


def test_numbers_as_people_write_them():
    assert to_decimal(" $1,234.50 ") == Decimal("1234.5")
    assert to_decimal("12%") == 12
    assert to_decimal("3.") == 3
    assert to_decimal("x") is None


@pytest.mark.parametrize(
    ("text", "truth", "wanted"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$", "0.5", 1),
        (r"$\frac{2}{4}$", r"\frac{1}{2}", 1),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1),
        (r"\boxed{x^2+2x}", "$(x+1)^2$", 0),
        ("The answer is 7", "7", 1),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        ("I do not know", "7", 0),
    ],
)
def test_math(text, truth, wanted):
    assert score("math", text, truth) == wanted


@pytest.mark.parametrize(
    ("text", "truth", "is_right"),
    [
        ("It is 34.\n\nAnswer: $34$", "34", True),
        ("Answer: 3\nanswer :\n 34", "34", True),  # the last one, and in the next line
        ("Answer: 34\nAnswer: 3", "34", False),
        (r"\boxed{34}", "34", False),  # no "Answer:"
        ("Answer: 34" + " " * 300, "34", False),  # not in the last 300 characters
        (r"Answer: \boxed{34}", "34", True),
        ("Answer: x = 1,234 dollars", "1234", True),
        (r"Answer: $90^\circ$.", "90", True),
        (r"Answer: 5 \text{ cm}", "5", True),
        (r"Answer: \frac12", r"\frac{1}{2}", True),
        (r"Answer: \sqrt3", r"\sqrt{3}", True),
        ("Answer: 1/2", r"\frac{1}{2}", False),
        ("Answer: 34.", "34", False),
        ("Answer: ", "34", False),
        ("", "34", False),
    ],
)
def test_math_dapo(text, truth, is_right):
    found = score("math_dapo", text, truth)
    assert (found["score"], found["acc"]) == ((1, 1) if is_right else (-1, 0))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"),
        ("A is wrong; answer: C", "C"),
        ("**Answer:** D", "D"),
        (r"I think A, no: \boxed{B}", "B"),
        (r"\boxed{\text{C}}", "C"),
        ("#### B", "B"),
        ("B", "B"),
        ("(c)", None),
        ("It's A or rather D.", "D"),
        ("NASA", None),
    ],
)
def test_the_chosen_letter(text, letter):
    assert chosen_letter(text) == letter


def test_choice_compares_letters():
    assert score("choice", "answer is (B)", "(b)") == 1
    assert score("choice", "answer is (B)", "C") == 0


@pytest.mark.parametrize("name", REWARDS)
def test_a_prompt_without_ground_truth_is_an_error(name):
    with pytest.raises(ValueError, match="the prompt has no ground truth"):
        score(name, "1", None)
