"""Every built-in reward on answers that were scored by hand, and on long texts."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import long_texts
import pytest
from answers import completion
from math_verify import parse

from megarl.agents.tool_calls.forms import FORMS
from megarl.rewards import REWARDS, load_reward
from megarl.rewards.functions.code import last_block
from megarl.rewards.functions.math_limits import ProcessorTimeError, final_part, is_small, processor_time
from megarl.rewards.result import to_result
from megarl.rewards.services.judge import reader
from megarl.samples.sample import Prompt

SUM = "assert add(1, 2) == 3\nassert add(2, 2) == 4"
# reward -> (answer, ground truth, its score)
CASES: dict[str, list[tuple[str, str, float]]] = {
    "auto": [("46", "46", 1), ("#### 46", "46", 0)],  # a row without a data source; test_scorer.py has those with one
    "choice": [
        ("answer is (B)", "(b)", 1),
        ("answer is (B)", "C", 0),
        ("The answer is (B).", "B", 1),
        ("A is wrong; answer: C", "C", 1),
        ("**Answer:** D", "D", 1),
        (r"I think A, no: \boxed{B}", "B", 1),
        (r"\boxed{\text{C}}", "C", 1),
        ("#### B", "B", 1),
        ("B", "B", 1),
        ("It's A or rather D.", "D", 1),
        ("I see c", "C", 0),  # neither chooses a letter
        ("NASA", "A", 0),
    ],
    "code": [
        ("```python\ndef add(a, b): return a + b\n```", SUM, 1),
        ("```python\ndef add(a, b): return a * b\n```", SUM, 0.5),
    ],
    "code_strict": [
        ("```python\ndef add(a, b): return a + b\n```", SUM, 1),
        ("```python\ndef add(a, b): return a * b\n```", SUM, 0),
    ],
    "exact": [("46", "46", 1), (" 46\n", "46 ", 1), ("46.", "46", 0), ("046", "46", 0), ("", "46", 0)],
    "gsm8k": [
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
    "gsm8k_strict": [
        ("#### 7", "7", 1),
        ("####7", "7", 1),
        ("#### 8", "7", 0),
        ("7", "7", 0),
        (r"\boxed{7}", "7", 0),
        ("7 ####", "7", 0),
    ],
    "gsm8k_verl": [("#### 7", "7", 1), ("####7", "7", 0)],  # test_verl_rules.py has more
    "math_verl": [(r"\boxed{7}", "7", 1), ("7", "7", 0)],
    "math": [
        (r"so it is $\boxed{\frac{1}{2}}$", "0.5", 1),
        (r"$\frac{2}{4}$", r"\frac{1}{2}", 1),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1),
        (r"\boxed{x^2+2x}", "$(x+1)^2$", 0),
        ("The answer is 7", "7", 1),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
        ("I do not know", "7", 0),
        # numbers that are not calculated are equal if they are written alike
        ("so it is $\\boxed{2^{1000000}}$", "2^{1000000}", 1),
        ("so it is $\\boxed{2^{1000001}}$", "2^{1000000}", 0),
        ("$9^{9^{9^9}}$", "7", 0),
        ("Let $x = 3$.\n" * 10_000 + r"So $\boxed{\frac{1}{2}}$.", "0.5", 1),
        ("Let $x = 3$.\n" * 10_000 + "The answer is 46", "46", 1),
    ],
    "math_dapo": [
        ("It is 34.\n\nAnswer: $34$", "34", 1),
        ("Answer: 3\nanswer :\n 34", "34", 1),  # the last one, and in the next line
        ("Answer: 34\nAnswer: 3", "34", -1),
        (r"\boxed{34}", "34", 1),  # without "Answer:" in the last 300
        (r"\boxed{34}, as 3 + 31 is. Answer: 35", "34", -1),
        ("Answer: 34" + " " * 300, "34", -1),  # not in the last 300 characters
        (r"Answer: \boxed{34}", "34", 1),
        ("Answer: x = 1,234 dollars", "1234", 1),
        (r"Answer: $90^\circ$.", "90", 1),
        (r"Answer: 5 \text{ cm}", "5", 1),
        (r"Answer: \frac12", r"\frac{1}{2}", 1),
        (r"Answer: \sqrt3", r"\sqrt{3}", 1),
        ("Answer: 1/2", r"\frac{1}{2}", -1),
        ("Answer: 34.", "34", -1),
        ("Answer: ", "34", -1),
        ("", "34", -1),
    ],
}


def scored(name: str, text: str, truth: str | None) -> Any:
    return load_reward(name)(Prompt("0-0", [1], "question", truth), completion(text))


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_an_answer_has_the_score_by_hand(name: str, case: tuple[str, str, float]) -> None:
    text, truth, score = case
    assert to_result(scored(name, text, truth)).reward == score


@pytest.mark.parametrize("name", REWARDS)
def test_a_built_in_reward_has_a_right_and_a_wrong_answer_here(name: str) -> None:
    assert len({score for *_, score in CASES.get(name, [])}) > 1, f"CASES needs answers that {name} pays and some not"


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_without_ground_truth_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="the prompt has no ground truth"):
        scored(name, "1", None)


def test_a_long_text_is_read_around_its_last_box_from_the_start_of_a_line_or_else_at_its_end() -> None:
    assert final_part("so  \t x =\n\n \\boxed{1}\n") == "so x =\n\\boxed{1}\n", (
        "all of a short one, but for runs of spaces"
    )
    before, after = "many words $x$\n" * 1000, "thus it is. " * 1000
    part = final_part(f"{before}it is $\\boxed{{46}}$. {after}")
    assert part is not None and len(part) <= 1000
    assert part.startswith("many words $x$\n") and "it is $\\boxed{46}$. thus" in part
    part = final_part("word " * 1000 + "the answer is 46")
    assert part is not None and len(part) == 1000 and part.endswith("the answer is 46")


def test_more_levels_or_boxes_than_a_person_writes_are_not_read() -> None:
    assert final_part("([{" * 3 + "1" + "}])" * 3) is not None
    assert final_part("([{" * 4 + "1" + "}])" * 4) is None
    assert final_part("\\boxed{1} " * 20) is not None
    assert final_part("\\boxed{1} " * 21) is None


@pytest.mark.parametrize(
    ("text", "small"),
    [
        ("$2^{2010}-1$", True),  # 606 digits
        ("$2^{1000+1000}$", True),
        ("$2023!$", True),
        ("$\\frac{1}{3^{100}}$", True),
        ("$x^{100000}$", True),  # no number
        ("$2^{100000}$", False),  # 30103 digits
        ("$2^{-100000}$", False),
        ("$9999!$", False),
        ("$(10^{30})!$", False),
        ("$\\sqrt{10^{10^{10}}}$", False),
        ("$\\{1, 9^{9^9}\\}$", False),
        ("$x = 9^{9^9}$", False),
        ("$\\begin{pmatrix} 1 & 9^{9^9} \\\\ 0 & 1 \\end{pmatrix}$", False),
    ],
)
def test_numbers_of_more_than_ten_thousand_digits_are_not_calculated(text: str, small: bool) -> None:
    assert is_small(parse(text, parsing_timeout=None)[0]) == small


def test_the_time_of_the_processor_ends_and_the_handler_is_the_one_before() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(ProcessorTimeError), processor_time(0.01):
        while True:
            try:
                sum(range(1000))
            except Exception:
                continue
    assert signal.getsignal(signal.SIGPROF) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_thread_has_no_such_limit() -> None:
    done = threading.Event()

    def run() -> None:
        with processor_time(0.001):
            sum(range(10**6))
            done.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done.is_set()


SIZE, SECONDS = 100_000, 10
ELSEWHERE = {"auto", "code", "code_strict"}  # `auto` calls one of the others, `code` runs in a sandbox


def judge_all(*rewards: str, seconds: int = SECONDS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, long_texts.__file__, str(SIZE), str(seconds), *rewards]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.full
def test_built_in_rewards_read_any_long_text_in_linear_time() -> None:
    rewards = sorted(set(REWARDS) - ELSEWHERE)
    done = judge_all(*rewards)
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.stderr[-2000:]}"
    assert len(done.stdout.splitlines()) == len(rewards) * len(list(long_texts.texts(1)))


@pytest.mark.full
def test_a_reward_that_does_not_is_found(tmp_path: Path) -> None:
    """Three searches for spaces in a row."""
    file = tmp_path / "slow.py"
    file.write_text(
        "import re\n"
        "def slow(prompt, completion):\n"
        "    return float(bool(re.search(r'answer\\s*(is)?\\s*:?\\s*x', completion.text)))\n"
    )
    done = judge_all(f"{file}:slow", seconds=1)
    assert done.returncode == -signal.SIGXCPU
    assert done.stdout.splitlines()[-1] == rf"{file}:slow: 'answer' '\n'... ''"


@pytest.mark.parametrize(
    "read",
    [
        lambda: last_block("```python\n" * SIZE),
        lambda: last_block("```\n```" * SIZE),
        lambda: reader("json:score")('{"a":' * (SIZE // 5)),
        lambda: reader("json:score")('{"a":[{},' * (SIZE // 5)),
        lambda: reader("json:score")('{"' * SIZE),
        lambda: FORMS["hermes"].read("<tool_call>" * SIZE),
        lambda: FORMS["hermes"].read("</tool_call>" + "<tool_call>" * SIZE),
        lambda: FORMS["hermes"].read("<tool_call>" + "[" * SIZE + "</tool_call>"),
    ],
)
def test_programs_judgements_and_tool_calls_are_found_in_linear_time(read: Callable[[], object]) -> None:
    before = time.process_time()
    read()
    assert time.process_time() - before < SECONDS
