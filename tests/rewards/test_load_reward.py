import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.plugins import is_async
from megarl.rewards import REWARDS, load_reward, register_reward
from megarl.rewards.functions import exact
from megarl.sample import Completion, Prompt, VersionSpan

PROMPT = Prompt("0-0", [1], "1+1=", "2", "sums", {"level": 3})
COMPLETION = Completion([1], [0.0], "stop", (VersionSpan(0, 0, 1),), "2")

FILE = """
import dataclasses

@dataclasses.dataclass
class Seen:
    text: str

def ours(prompt, completion):
    return {"score": float(Seen(completion.text).text == prompt.ground_truth), "level": prompt.extra["level"]}

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return [data_source, solution_str, ground_truth, extra_info]

def short_score(solution_str, ground_truth):
    return solution_str == ground_truth

def any_score(solution_str, **more):
    return sorted(more)

def batch_score(data_sources, solution_strs, ground_truths, extra_infos):
    columns = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [{"score": float(text == truth), "level": extra["level"]} for _, text, truth, extra in columns]

async def later_batch_score(solution_strs, **more):
    return [sorted(more) for _ in solution_strs]

def strange_batch_score(solution_strs, tokenizer):
    return [0]

def one_more_score(solution_strs):
    return [0, *(1 for _ in solution_strs)]

def strange_score(solution_str, tokenizer):
    return 0

def one(prompt):
    return 0

async def later(prompt, completion):
    return 0

async def later_score(solution_str):
    return solution_str

class Waiter:
    async def __call__(self, prompt, completion):
        return 5

waiter = Waiter()

number = 3
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return str(file)


def test_a_users_function_of_prompt_and_completion(path):
    assert load_reward(f"{path}:ours")(PROMPT, COMPLETION) == {"score": 1.0, "level": 3}


def test_a_plug_in_may_register_a_reward_under_a_name(monkeypatch):
    monkeypatch.setattr("megarl.rewards.REWARDS", dict(REWARDS))

    @register_reward("short")
    def short(prompt, completion):
        return -len(completion.token_ids)

    @register_reward("as_verl")
    def as_verl(solution_str, ground_truth):
        return solution_str == ground_truth

    assert load_reward("short") is short
    assert load_reward("short")(PROMPT, COMPLETION) == -1
    assert load_reward("as_verl")(PROMPT, COMPLETION) is True
    with pytest.raises(ValueError, match="^reward 'short' exists already: use another name$"):
        register_reward("short")(short)
    for taken in ("gsm8k", "judge"):
        with pytest.raises(ValueError, match=f"^reward '{taken}' exists already"):
            register_reward(taken)(short)


def test_a_registered_reward_of_other_arguments_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("megarl.rewards.REWARDS", dict(REWARDS))
    register_reward("one")(lambda prompt: 0)
    with pytest.raises(ValueError, match=r"^reward.fn=one: it takes \(prompt\); expected \(prompt, completion\)"):
        load_reward("one")


def test_a_path_may_be_relative(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_reward("mine.py:ours")(PROMPT, COMPLETION)["score"] == 1


def test_a_function_of_verls_signature_gets_what_its_parameters_name(path):
    assert load_reward(f"{path}:compute_score")(PROMPT, COMPLETION) == ["sums", "2", "2", {"level": 3}]
    assert load_reward(f"{path}:short_score")(PROMPT, COMPLETION) is True
    assert load_reward(f"{path}:any_score")(PROMPT, COMPLETION) == ["data_source", "extra_info", "ground_truth"]


def test_a_function_of_verls_batch_signature_gets_lists_of_one(path):
    assert load_reward(f"{path}:batch_score")(PROMPT, COMPLETION) == {"score": 1.0, "level": 3}
    later = load_reward(f"{path}:later_batch_score")
    assert asyncio.run(later(PROMPT, COMPLETION)) == ["data_sources", "extra_infos", "ground_truths"]
    with pytest.raises(ValueError, match="^returned 2 scores for a list of one answer; expected one$"):
        load_reward(f"{path}:one_more_score")(PROMPT, COMPLETION)


def test_an_async_function_is_found_as_one_in_either_signature(path):
    assert is_async(load_reward(f"{path}:later")) and is_async(load_reward(f"{path}:later_score"))
    assert asyncio.run(load_reward(f"{path}:later")(PROMPT, COMPLETION)) == 0
    assert asyncio.run(load_reward(f"{path}:later_score")(PROMPT, COMPLETION)) == "2"
    assert is_async(load_reward(f"{path}:waiter")) and not is_async(load_reward(f"{path}:short_score"))
    assert asyncio.run(load_reward(f"{path}:waiter")(PROMPT, COMPLETION)) == 5


def test_verls_own_column_of_extra_information_is_handed_on(path):
    prompt = Prompt("0-0", [1], "x", "2", "sums", {"extra_info": {"index": 1}, "ability": "math"})
    assert load_reward(f"{path}:compute_score")(prompt, COMPLETION)[3] == {"index": 1}


def test_an_installed_module_can_be_named():
    assert load_reward("megarl.rewards.functions.exact:exact")(PROMPT, COMPLETION) == 1


@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        (
            "exakt",
            r"reward.fn=exakt: expected one of auto, choice, code, .*, or path/file.py:function",
        ),
        ("{path}", r"reward.fn=.*mine.py: expected one of auto, choice"),
        ("{path}:", r"mine.py:: expected one of auto, choice"),
        ("gone/mine.py:f", r"reward.fn=gone/mine.py:f: there is no file .*gone/mine.py$"),
        ("{path}:gone", r"mine.py has no function 'gone'; it has ours, compute_score, .*later_score$"),
        ("{path}:number", r"has no function 'number'"),
        ("{path}:one", r"it takes \(prompt\); expected \(prompt, completion\) or \(data_source, solution_str, "),
        (
            "{path}:strange_score",
            r"no value for tokenizer; expected \(data_source, solution_str, ground_truth, extra_info",
        ),
        (
            "{path}:strange_batch_score",
            r"no value for tokenizer; expected \(data_sources, solution_strs, ground_truths, extra_infos",
        ),
        ("no.such.module:f", r"importing no.such.module failed with ModuleNotFoundError: No module named 'no'$"),
    ],
)
def test_a_wrong_name_is_one_sentence(path, fn, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_reward(fn.format(path=path))


def test_a_file_that_does_not_import_is_named_with_its_error(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=r"importing .*bad.py failed with ZeroDivisionError: division by zero$"):
        load_reward(f"{tmp_path}/bad.py:f")
    (tmp_path / "quits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ValueError, match="failed with SystemExit: 3"):
        load_reward(f"{tmp_path}/quits.py:f")


def test_a_built_in_rewards_file_may_be_named_by_its_path_or_copied(tmp_path):
    """Its decorator gives the name again, which is no matter for a function that is named by its file."""
    source = Path(exact.__file__)
    copy = tmp_path / "mine.py"
    copy.write_text(source.read_text())
    for path in (source, copy):
        assert load_reward(f"{path}:exact").__name__ == "exact"


def test_a_function_may_ask_for_the_whole_conversation(tmp_path):
    path = tmp_path / "told.py"
    path.write_text("def told(prompt, completion, messages):\n    return [m['content'] for m in messages]\n")
    told = load_reward(f"{path}:told")
    answer = Completion([4], [-0.1], "stop", (VersionSpan(0, 0, 1),), "2")
    assert told(PROMPT, answer) == ["1+1=", "2"]
    episode = [
        {"role": "user", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    assert told(replace(PROMPT, extra={"conversation": episode}), answer) == ["a", "b", "c"]
