"""Which function a name of a reward finds, what the function is given, and which results are rewards."""

import asyncio
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.plugins.load import is_async
from megarl.rewards import REWARDS, load_reward, register_reward
from megarl.rewards.functions.auto import exact
from megarl.rewards.result import RewardResult, joined, to_result
from megarl.samples.sample import Completion, Prompt, VersionSpan

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

def told(prompt, completion, messages):
    return [m["content"] for m in messages]

def further(prompt, completion, ground_truth=None, *, extra_info="", data_source, scale=2.0):
    return [ground_truth, extra_info, data_source, scale]

def all_further(prompt, completion, **more):
    return sorted(more)

async def later_further(prompt, completion, ground_truth=None):
    return ground_truth

async def later(prompt, completion):
    return 0

async def later_score(solution_str):
    return solution_str

async def later_batch_score(solution_strs, **more):
    return [sorted(more) for _ in solution_strs]

class Waiter:
    async def __call__(self, prompt, completion):
        return 5

waiter = Waiter()
number = 3
one_more_score = lambda solution_strs: [0, *(1 for _ in solution_strs)]
strange_score = lambda solution_str, tokenizer: 0
strange_batch_score = lambda solution_strs, tokenizer: [0]
one = lambda prompt: 0
others = lambda completion, truth: 0
swapped = lambda completion, prompt: 0
lists = lambda prompts, completions, **kwargs: [0]
waiting = lambda prompt, completion, truth=None: 0
waiting_for_text = lambda prompt, completion, *, answer="", ground_truth=None: 0
forwarding = lambda *args, **kwargs: [len(args), sorted(kwargs)]
unused = lambda _prompt, completion: 7
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return str(file)


def called(fn, prompt=PROMPT):
    """What the reward returns, in its event loop if it is an async one."""
    reward = load_reward(fn)
    found = reward(prompt, COMPLETION)
    return asyncio.run(found) if is_async(reward) else found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ours", {"score": 1.0, "level": 3}),
        ("compute_score", ["sums", "2", "2", {"level": 3}]),
        ("short_score", True),
        ("any_score", ["data_source", "extra_info", "ground_truth"]),
        ("unused", 7),
        ("batch_score", {"score": 1.0, "level": 3}),  # its lists have one answer
        ("later_batch_score", ["data_sources", "extra_infos", "ground_truths"]),
        ("later", 0),
        ("later_score", "2"),
        ("waiter", 5),
        ("told", ["1+1=", "2"]),
        ("further", ["2", {"level": 3}, "sums", 2.0]),
        ("all_further", ["data_source", "extra_info", "ground_truth", "messages"]),
        ("later_further", "2"),
        ("forwarding", [2, []]),
    ],
)
def test_a_users_function_gets_what_its_parameters_name(path, name, expected):
    """(prompt, completion), verl's signature, its batch signature, or the whole conversation; async ones too."""
    assert called(f"{path}:{name}") == expected
    assert is_async(load_reward(f"{path}:{name}")) == (name.startswith("later") or name == "waiter")


def test_what_a_row_or_an_episode_has_of_its_own_is_handed_on(path):
    """verl's column of extra information, and an agent's messages."""
    row = replace(PROMPT, extra={"extra_info": {"index": 1}, "ability": "math"})
    assert called(f"{path}:compute_score", row)[3] == {"index": 1}
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("tool", "b"), ("assistant", "c"))]
    assert called(f"{path}:told", replace(PROMPT, extra={"conversation": messages})) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="^returned 2 scores for a list of one answer; expected one$"):
        called(f"{path}:one_more_score")


def test_a_plug_in_may_register_a_reward_under_a_name(monkeypatch):
    monkeypatch.setattr("megarl.rewards.REWARDS", dict(REWARDS))

    @register_reward("short")
    def short(prompt, completion):
        return -len(completion.token_ids)

    @register_reward("as_verl")
    def as_verl(solution_str, ground_truth):
        return solution_str == ground_truth

    register_reward("one")(lambda prompt: 0)
    with pytest.raises(ValueError, match=r"^reward.fn=one: it takes \(prompt\); expected \(prompt"):
        load_reward("one")
    assert load_reward("short") is short
    assert called("short") == -1
    assert called("as_verl") is True
    with pytest.raises(ValueError, match="^reward 'short' exists already: use another name$"):
        register_reward("short")(short)
    for taken in ("gsm8k", "judge"):
        with pytest.raises(ValueError, match=f"^reward '{taken}' exists already"):
            register_reward(taken)(short)


def test_a_path_may_be_relative_and_an_installed_module_named(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert called("mine.py:ours")["score"] == called("megarl.rewards.functions.auto:exact") == 1


@pytest.mark.parametrize(
    ("fn", "sentence"),
    [
        ("exakt", f"reward.fn=exakt: expected one of {', '.join(REWARDS)}, or path/file.py:function"),
        ("{path}", r"reward.fn=.*mine.py: expected one of "),
        ("{path}:", r"mine.py:: expected one of "),
        ("gone/mine.py:f", r"reward.fn=gone/mine.py:f: there is no file .*gone/mine.py$"),
        ("{path}:gone", r"mine.py has no function 'gone'; it has ours, compute_score, "),
        ("{path}:number", r"has no function 'number'"),
        (
            "{path}:others",
            r"it takes \(completion, truth\); expected \(prompt, completion\) or \(data_source, ",
        ),
        (
            "{path}:waiting",
            r"nothing gives truth a value, a further parameter is one of messages, data_source, ",
        ),
        ("{path}:waiting_for_text", r"nothing gives answer a value, a further parameter is one of messages"),
        ("{path}:swapped", r"it takes \(completion, prompt\); expected \(prompt, completion\) or"),
        ("{path}:lists", r"it takes \(prompts, completions, kwargs\); expected \(prompt, completion\) or"),
        (
            "{path}:one",
            r"it takes \(prompt\); expected \(prompt, completion\) or \(data_source, solution_str, ",
        ),
        ("{path}:strange_score", r"no value for tokenizer; expected \(data_source, solution_str, "),
        ("{path}:strange_batch_score", r"no value for tokenizer; expected \(data_sources, solution_strs, "),
        ("no.such.module:f", r"importing no.such.module failed with ModuleNotFoundError: No module named 'no'$"),
    ],
)
def test_a_wrong_name_is_one_sentence(path, fn, sentence):
    with pytest.raises(ValueError, match=sentence):
        load_reward(fn.format(path=path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "failed with ZeroDivisionError: division by zero$"),
        ("raise SystemExit(3)", "failed with SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_import_is_named_with_its_error(tmp_path, text, words):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ValueError, match=f"importing .*bad.py {words}"):
        load_reward(f"{tmp_path}/bad.py:f")


def test_a_built_in_rewards_file_may_be_named_by_its_path_or_copied(tmp_path):
    """Its decorator gives the name again, which is no matter for a function that is named by its file."""
    source = Path(exact.__code__.co_filename)
    copy = tmp_path / "mine.py"
    copy.write_text(source.read_text())
    for path in (source, copy):
        assert load_reward(f"{path}:exact").__name__ == "exact"


# results
@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5]), Fraction(1, 2), True, -3]
)
def test_every_kind_of_number_is_a_reward(value):
    assert to_result(value) == RewardResult(float(value))


def test_a_dict_gives_a_score_and_further_numbers():
    got = to_result({"score": 1, "acc": True, "length": np.int64(7), "pred": "46", "parts": [1, 2], "none": None})
    assert got == RewardResult(1.0, {"acc": 1.0, "length": 7.0})
    assert got.pred == "46"


@pytest.mark.parametrize(
    "name", ["reward", "score", "uid", "set", "audit", "audit_error", "reward_error", "agent/turns"]
)
def test_a_further_number_of_a_name_that_is_taken_has_another_one(name):
    own = f"extra/{name}"
    if name != "score":
        assert to_result({"score": 1, name: 0.5}) == RewardResult(1.0, {own: 0.5})
    both = joined({name: RewardResult(0.25), "format": RewardResult(1.0, {"words": 3.0})}, {})
    assert both == RewardResult(1.25, {own: 0.25, "format": 1.0, "format/words": 3.0})


@pytest.mark.parametrize("number", [math.nan, -math.inf, 1e300])
def test_a_further_number_that_is_not_finite_is_refused_by_name(number):
    with pytest.raises(ValueError, match="as its number 'length'; expected a finite number of float32"):
        to_result({"score": 1.0, "length": number})


@pytest.mark.parametrize("value", [math.nan, math.inf, {"score": -math.inf}, 1e300, {"score": -3.41e38}])
def test_a_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="expected a finite number"):
        to_result(value)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "returned None, a NoneType; expected a number or a dict with 'score'"),
        ("1", "returned '1', a str; expected a number"),
        ([1.0, 2.0], "a list; expected a number"),
        (torch.zeros(2), "a Tensor; expected a number"),
        (np.zeros(2), "a ndarray; expected a number"),
        ({"acc": 1}, r"returned a dict with the keys \['acc'\]; expected 'score' among them"),
        ({"score": "1"}, "returned '1', a str"),
    ],
)
def test_what_is_no_reward_is_named(value, sentence):
    with pytest.raises(TypeError, match=sentence):
        to_result(value)
