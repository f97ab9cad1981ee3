"""All rows are looked at before a run starts: whether they have the ground truth that its rewards read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from config_helpers import load

from megarl.config import Config
from megarl.data.chat import load_tokenizer
from megarl.data.examples.tiny import write_tiny_model
from megarl.data.prompts import Prompts
from megarl.trainer.checks.reward_rows import Need, check_audited, check_truths, need_of

TOLERANT = """
def compares(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)

def may_compare(solution_str, ground_truth=None):
    return 0.0 if ground_truth is None else 1.0

def takes_all(solution_str, **kwargs):
    return float(solution_str == kwargs["ground_truth"])

def reads(prompt, completion):
    return float(completion.text == prompt.ground_truth)

def tidy(solution_str):
    return 1.0
"""
PLAIN = """
def short(prompt, completion):
    return -float(len(completion.text))

def cheap(solution_str, **kwargs):
    return 1.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", layers=1, hidden=32, ffn=64)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "mine.py").write_text(TOLERANT)
    return f"{tmp_path}/mine.py"


def prompts(model: str, *files: tuple[Path, list[Mapping[str, str]]]) -> Prompts:
    for file, rows in files:
        file.write_text("".join(json.dumps({"prompt": "1+1=", **row}) + "\n" for row in rows))
    return Prompts([str(file) for file, _ in files], load_tokenizer(model), max_prompt_length=8)


def with_rewards(*fns: str) -> Config:
    return load(f"reward.fn=[{','.join(fns)}]")


@pytest.mark.parametrize(
    ("fn", "need"),
    [
        ("mine.py:compares", Need.BY_SIGNATURE),
        ("mine.py:may_compare", Need.PERHAPS),
        ("mine.py:takes_all", Need.PERHAPS),
        ("mine.py:reads", Need.PERHAPS),
        ("mine.py:tidy", Need.NEVER),
        ("plain.py:short", Need.NEVER),
        ("plain.py:cheap", Need.NEVER),
        ("exact", Need.PERHAPS),
        ("model", Need.NEVER),
    ],
)
def test_what_a_reward_needs_is_read_from_its_signature_and_its_file(mine: str, fn: str, need: Need) -> None:
    there = fn.replace("mine.py", mine).replace("plain.py", f"{Path(mine).parent}/plain.py")
    assert need_of(there, Config()) is need


def test_a_judge_needs_what_its_question_names() -> None:
    config = Config()
    config.reward.judge.prompt = "Is {answer} right?"
    assert need_of("judge", config) is Need.NEVER
    config.reward.judge.prompt = "Is {answer} {truth}?"
    assert need_of("judge", config) is Need.PERHAPS


def test_a_file_without_any_ground_truth_is_refused_where_a_reward_takes_it(
    model: str, mine: str, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    read = prompts(model, (good, [{"ground_truth": "2"}]), (bad, [{"answer": "2", "level": "1"}] * 6))
    with pytest.raises(ValueError, match="^data.ground_truth_key=ground_truth: no row of .*bad.jsonl has") as caught:
        check_truths(with_rewards("exact", f"{mine}:compares"), [read])
    assert str(caught.value).endswith(
        f"has a ground truth, which reward {mine}:compares takes; expected the name of its field (besides the prompt "
        f"{bad}:1 has 'answer', 'level'), or a function with ground_truth=None if it needs none"
    )


@pytest.mark.parametrize("fn", ["compares", "reads"])
def test_some_rows_without_ground_truth_are_one_warning_with_the_first_of_them(
    model: str, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], fn: str
) -> None:
    """The fifth row is the first one without, behind those that the trial looks at."""
    file = tmp_path / "some.jsonl"
    read = prompts(model, (file, [*[{"ground_truth": "2"}] * 4, {"answer": "2"}, {"ground_truth": "2"}, {}]))
    check_truths(with_rewards(f"{mine}:{fn}", f"{mine}:tidy"), [read])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "warning: data.ground_truth_key=ground_truth: 2 of 7 rows have no ground truth, the first is "
        f"{file}:5, and reward {mine}:{fn} may read it; "
    )


def test_rewards_that_read_none_and_rows_of_other_rewards_are_silent(
    model: str, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"ground_truth": "2"}, {"data_source": "poems"}]
    read = prompts(model, (tmp_path / "mixed.jsonl", rows))
    config = with_rewards(f"{mine}:compares")
    config.reward.by_data_source = {"poems": f"{tmp_path}/plain.py:short"}
    check_truths(config, [read])
    agents = with_rewards(f"{mine}:compares")
    agents.agent.fn = "file.py:episode"
    check_truths(agents, [prompts(model, (tmp_path / "none.jsonl", [{}]))])
    assert capsys.readouterr().err == ""


def test_an_audit_of_too_few_prompts_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    config = load("reward.audit=exact", "reward.fn=gsm8k")
    check_audited(config, 30)
    check_audited(with_rewards("exact"), 3)
    assert capsys.readouterr().err == ""
    check_audited(config, 29)
    said = "warning: reward.audit=exact: the evaluation has 29 prompts, and the audit compares 30 at least"
    assert capsys.readouterr().err.startswith(said)
