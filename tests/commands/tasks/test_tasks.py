"""The tasks of `megarl new`: their answers against slow and obvious ones, their mistakes, and the rows made of them."""

import json
import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from megarl.commands.new import TASKS
from megarl.commands.tasks.prepare import prepare
from megarl.data.chat import encode, load_tokenizer


def counted(prompt: str) -> str:
    letter, word = prompt.rstrip("=").split(":")
    return "".join(str(word[: end + 1].count(letter)) for end in range(len(word)))


def sorted_by_hand(prompt: str) -> str:
    left, out = list(prompt.rstrip("=")), ""
    while left:
        out += min(left)
        left.remove(min(left))
    return out


REFERENCE: dict[str, Callable[[str], str]] = {
    "addition": lambda prompt: str(sum(map(int, prompt.rstrip("=").split("+")))),
    "counting": counted,
    "sorting": sorted_by_hand,
    "spell_backward": lambda prompt: "".join(reversed(prompt.rstrip("="))),
}
MISTAKES = {
    "addition": [("347+8=", "355", "345"), ("342+6=", "348", "348"), ("195+5=", "200", "190")],
    "counting": [("b:abbcaba=", "0122233", "0122222"), ("a:abcabca=", "1112223", "1112222")],
    "sorting": [("52841=", "12458", "24581"), ("3120=", "0123", "1230")],
    "spell_backward": [("melon=", "nolem", "nelom"), ("bada=", "adab", "aadb")],
}


@pytest.mark.parametrize("name", TASKS)
def test_every_problem_has_the_right_answer_and_the_mistakes_are_those_of_the_docstring(name: str) -> None:
    task, rng = import_module(f"megarl.commands.tasks.{name}"), random.Random(1)
    problems = [task.problem(rng) for _ in range(500)]
    assert [answer for _, answer in problems] == [REFERENCE[name](prompt) for prompt, _ in problems]
    for prompt, answer, mistaken in MISTAKES[name]:
        assert (REFERENCE[name](prompt), task.mistake(prompt, answer)) == (answer, mistaken)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def problem(rng: random.Random) -> tuple[str, str]:
    number = rng.randint(100, 299)
    return f"{number}é", str(number + 1)


def test_rows_are_apart_and_so_many_of_the_demonstrations_are_mistakes(tmp_path: Path) -> None:
    prepare(problem, lambda prompt, answer: "no", folder=tmp_path / "a", num_sft=100, num_train=50, num_test=20)
    sft, train, test = (rows(tmp_path / "a" / f"{name}.jsonl") for name in ("sft", "train", "test"))
    assert [len(part) for part in (sft, train, test)] == [100, 50, 20]
    assert len({row["prompt"] for row in (*sft, *train, *test)}) == 170
    assert all(int(row["ground_truth"]) == int(row["prompt"][:-1]) + 1 for row in (*train, *test))
    # 100 draws with 0.7: a deviation of 0.046, and three of them.
    assert 0.56 < sum(row["response"] == "no" for row in sft) / 100 < 0.84
    prepare(problem, lambda prompt, answer: "no", folder=tmp_path / "b", num_sft=100, num_train=50, num_test=20)
    for name in ("sft.jsonl", "train.jsonl", "test.jsonl", "model/model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), "the same every time"


def test_the_model_has_a_token_for_each_character_of_the_rows_and_for_no_other(tmp_path: Path) -> None:
    prepare(problem, lambda prompt, answer: "no", folder=tmp_path, num_sft=100, num_train=50, num_test=20)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    ids = encode(tokenizer, "0123456789éno")
    assert len(ids) == len(set(ids)) == 13 and tokenizer.unk_token_id not in ids
    assert encode(tokenizer, "x") == [tokenizer.unk_token_id]


def test_a_task_with_too_few_prompts_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the task has 200 different prompts; expected 210 \(num_sft"):
        prepare(problem, lambda prompt, answer: "no", folder=tmp_path, num_sft=140, num_train=50, num_test=20)
    assert not list(tmp_path.iterdir())
