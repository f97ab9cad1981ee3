r"""What the reward `math` reads of a completion, what it calculates, and when it gives up."""

import signal
import threading

import pytest
from math_verify import parse

from megarl.rewards import load_reward
from megarl.rewards.functions.math_limits import ProcessorTimeError, final_part, is_small, processor_time
from megarl.sample import Completion, Prompt


def score(text: str, truth: str) -> float:
    return load_reward("math")(Prompt("0-0", [1], "question", truth), Completion([1], [0.0], "stop", (), text))


def test_a_short_text_is_read_as_it_is_but_for_runs_of_spaces() -> None:
    assert final_part("so  \t x =\n\n \\boxed{1}\n") == "so x =\n\\boxed{1}\n"


def test_a_long_text_is_read_around_its_last_box_from_the_start_of_a_line() -> None:
    before, after = "many words $x$\n" * 1000, "thus it is. " * 1000
    part = final_part(f"{before}it is $\\boxed{{46}}$. {after}")
    assert part is not None and len(part) <= 1000
    assert part.startswith("many words $x$\n")
    assert "it is $\\boxed{46}$. thus" in part


def test_a_long_text_without_a_box_is_read_at_its_end() -> None:
    part = final_part("word " * 1000 + "the answer is 46")
    assert part is not None and len(part) == 1000
    assert part.endswith("the answer is 46")


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


def test_a_number_that_is_not_calculated_is_equal_to_what_is_written_alike() -> None:
    assert score("so it is $\\boxed{2^{1000000}}$", "2^{1000000}") == 1
    assert score("so it is $\\boxed{2^{1000001}}$", "2^{1000000}") == 0
    assert score("$9^{9^{9^9}}$", "7") == 0


def test_the_answer_after_a_long_text_is_found() -> None:
    assert score("Let $x = 3$.\n" * 10_000 + r"So $\boxed{\frac{1}{2}}$.", "0.5") == 1
    assert score("Let $x = 3$.\n" * 10_000 + "The answer is 46", "46") == 1


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
