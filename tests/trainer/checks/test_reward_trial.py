"""Rewards are tried on rows of the data before a run starts: what cannot work stops it with one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import Config, resolved
from megarl.data.prompts import Row
from megarl.sample import Prompt
from megarl.trainer.checks import reward_trial
from megarl.trainer.checks.reward_trial import RewardTrial, run_trial

MINE = """
import json, os, time

def slows_down(prompt, completion):
    time.sleep({"first": 2.5, "later": 0.0 if completion.text == "later" else 2.5}.get(prompt.ground_truth, 0.0))
    return 0.0

def loops(prompt, completion):
    while True: time.sleep(0.1)

async def acts(prompt, completion):
    if prompt.ground_truth == "raises": raise KeyError("no such unit")
    if prompt.ground_truth == "says": return "right"
    if prompt.ground_truth == "dies": os._exit(3)
    if prompt.ground_truth == "sleeps": time.sleep(3600)
    knows = "SECRET" not in os.environ and completion.text == prompt.ground_truth
    return float(knows and len(completion.token_ids) == 2)

def knows(prompt, completion):
    return {"score": 1 / acts_once(prompt)}

def acts_once(prompt):
    return len(prompt.text)

def reads(prompt, completion):
    return float(json.loads(completion.text) == prompt.ground_truth)

def counts(prompt, completion):
    return 1 / len(completion.text)

def decodes(prompt, completion):
    return float(len(completion.text.encode("ascii")))

def adds(prompt, completion):
    def nested(text): return nested(text[3:]) if text.startswith("1 (") else 0.0
    return nested(completion.text)

def replies(prompt, completion):
    return float(completion.text) if completion.text.isdigit() else "no number"

async def replies_later(prompt, completion):
    return float(completion.text) if completion.text.isdigit() else None

def replies_to_messages(prompt, completion, messages):
    return float(completion.text) if completion.text.isdigit() else {}
"""


def config_of(*fns: str) -> Config:
    config = Config()
    config.model.path, config.trainer.device, config.rollout.engine = "/m", "cpu", "hf"
    config.reward.fn = list(fns)
    return resolved(config)


def row(truth: str | None, source: str = "", text: str = "1+1=") -> Row:
    return Row("rows.jsonl:7", Prompt("0-6", [5, 6], text, truth, source))


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def test_what_is_tried_is_named_with_its_row_and_the_process_has_no_secrets(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "key")
    config = config_of("auto", f"{mine}:acts")
    config.reward.by_data_source = {"units": f"{mine}:knows"}
    with RewardTrial(config) as trial:
        trial.check([row("46"), row(None, "units")])
        for truth, said in (("raises", "KeyError: 'no such unit' ("), ("says", "returned 'right', a str; expected")):
            with pytest.raises(ValueError, match="^reward.fn=.*:acts: tried on rows.jsonl:7 with the answer") as caught:
                trial.check([row(truth)])
            assert said in str(caught.value) and str(caught.value).endswith("a run without this trial")
        said = r"^reward.fn=auto: tried on rows.jsonl:7 \(it has no ground truth\) with the answer '0' it failed"
        with pytest.raises(ValueError, match=said):
            trial.check([row(None)])
        with pytest.raises(ValueError, match=r"mine.py:knows: .*ZeroDivisionError"):
            trial.check([row("46", "units", text="")])
        with pytest.raises(ValueError, match="its process died with exit code 3; reward.try_rows=0"):
            trial.check([row("dies")])


@pytest.mark.parametrize(
    ("fn", "answer", "said"),
    [
        ("reads", "''", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (FILE:26)"),
        ("counts", "''", "ZeroDivisionError: division by zero (FILE:29)"),
        ("decodes", "'¿?", "ordinal not in range(128) (FILE:32)"),
        ("adds", "'1 (1 (1 (", "(FILE:35)"),
        ("replies", "''", "returned 'no number', a str; expected a number or a dict with 'score' (FILE:38)"),
        ("replies_later", "''", "returned None, a NoneType; expected a number or a dict with 'score' (FILE:41)"),
        ("replies_to_messages", "''", "returned a dict with the keys []; expected 'score' among them (FILE:44)"),
    ],
)
def test_answers_without_the_expected_form_are_tried_too(mine: str, fn: str, answer: str, said: str) -> None:
    """The place is the line of the user's file, and that of its function where only the value is wrong."""
    with RewardTrial(config_of(f"{mine}:{fn}")) as trial, pytest.raises(ValueError, match="^reward.fn") as caught:
        trial.check([row("46")])
    assert f"with the answer {answer}" in str(caught.value)
    assert f"{said.replace('FILE', mine)}; reward.try_rows=0" in str(caught.value)


def test_an_audit_is_tried_too(mine: str) -> None:
    config = config_of("exact")
    config.reward.audit = f"{mine}:counts"
    with RewardTrial(config) as trial, pytest.raises(ValueError, match="mine.py:counts: tried on .*ZeroDivisionError"):
        trial.check([row("46")])


def test_who_expects_errors_has_them_only_of_right_answers(mine: str) -> None:
    config = config_of(f"{mine}:counts", f"{mine}:knows")
    config.reward.on_error = "zero"
    with RewardTrial(config) as trial:
        trial.check([row("46")])
        with pytest.raises(ValueError, match="knows: tried on"):
            trial.check([row("46", text="")])


def test_a_reward_that_takes_too_long_is_a_warning(
    mine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reward_trial, "PATIENCE_S", 0.5)
    monkeypatch.setattr(reward_trial, "QUIET_S", 0.0)
    for fn, truth, limit in (("acts", "sleeps", "2"), ("loops", "46", "1")):  # the first one is async
        config = config_of(f"{mine}:{fn}")
        config.reward.timeout_s, config.reward.request_timeout_s = 0.5, 2.0
        with RewardTrial(config) as trial:
            trial.check([row(truth), row("raises")])
        on = f"tried on rows.jsonl:7 with the answer '{truth}'"
        assert capsys.readouterr().err.splitlines() == [
            f"waiting for reward {mine}:{fn}, which is {on}, for up to {limit} s",
            f"warning: reward {mine}:{fn} did not answer within {limit} s when it was {on}",
        ]


def test_a_reward_that_the_run_would_cut_off_is_named_once_unless_it_was_its_first_call(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(f"{mine}:slows_down")
    config.reward.timeout_s, config.reward.on_error = 2.0, "zero"
    with RewardTrial(config) as trial:
        trial.check([row("first"), row("46")])
    assert capsys.readouterr().err == "", "its first call may load what it needs"
    config.reward.on_error = "unscored"
    with RewardTrial(config) as trial:
        trial.check([row("later")])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"warning: reward {mine}:slows_down took ")
    assert said.endswith("tried on rows.jsonl:7 with the answer '': the run cuts it off there after reward.timeout_s=2")


def test_no_process_is_started_where_nothing_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(reward_trial, "start_child", lambda *args, **_: asked.append(args))
    judged, switched_off, with_agents = config_of("judge"), config_of("exact"), config_of("exact")
    switched_off.reward.try_rows, with_agents.agent.fn = 0, "file.py:episode"
    for config in (judged, switched_off, with_agents):
        RewardTrial(config).check([row(None)])
    assert asked == []
    assert run_trial.__module__ == "megarl.trainer.checks.reward_trial", "the process imports it by this name"
