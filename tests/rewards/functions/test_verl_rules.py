"""verl's rules by data source: verl_rules.jsonl has answers of ours and the numbers that verl 0.9.1's code gave."""

from pathlib import Path

import pytest
from answers import completion

from megarl.metrics.reading.jsonl import read_lines
from megarl.rewards import load_reward
from megarl.rewards.functions.auto import reward_of
from megarl.rewards.result import to_result
from megarl.samples.sample import Prompt

PROBES = list(read_lines(Path(__file__).with_name("verl_rules.jsonl")))


@pytest.mark.parametrize("name", ["gsm8k_verl", "math_verl", "math_dapo"])
def test_verl_rules_give_verls_numbers(name: str) -> None:
    probes = [probe for probe in PROBES if reward_of(probe["data_source"], {}, probe["truth"]) == name]
    assert len({probe["score"] for probe in probes}) == 2 and len(probes) > 20
    for probe in probes:
        prompt = Prompt("0-0", [1], "?", probe["truth"], probe["data_source"])
        for reward in (name, "auto"):
            assert to_result(load_reward(reward)(prompt, completion(probe["answer"]))).reward == probe["score"], probe


def test_verl_rules_are_those_of_verls_sources_and_no_others() -> None:
    named = {"openai/gsm8k": "gsm8k_verl", "HuggingFaceH4/MATH-500": "math_verl", "aime_2025": "math_dapo"}
    named |= {"numina_cn_k12": "math", "gsm8k": "gsm8k", "sums": "exact", "": "exact"}
    assert {source: reward_of(source, {}, "46") for source in named} == named
    raw = {"answer": "12 + 34 = 46\n#### 46"}
    assert reward_of("", raw, "46") == reward_of("test", raw, 46.0) == "gsm8k"
    assert reward_of("openai/gsm8k", raw, "46") == "gsm8k_verl"


def test_a_row_of_gsm8k_ends_a_field_with_the_mark_and_the_number_of_its_truth() -> None:
    solution = "2+2=4\n#### 1,004 "
    nested = {"reward_model": {"ground_truth": solution}}
    for extra, truth in (({"solution": solution}, "1004"), (nested, "1004"), ({"answer": "#### 18 dollars"}, "18")):
        assert reward_of("", extra, truth) == "gsm8k"
    for text, truth in (
        ("#### Geography\nIt is Paris", "Paris"),
        (solution, "Paris"),
        (solution, "4"),
        (solution, None),
    ):
        assert reward_of("wiki", {"answer": text}, truth) == "exact"
    assert reward_of("", {"answer": "#### 3\nSo it is 3"}, "3") == "exact"
