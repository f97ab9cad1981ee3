"""Rewards before a run: they are tried on rows of the data, and all rows have the ground truth that they read."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from config_helpers import load

from megarl.config import Config
from megarl.data.chat import load_tokenizer
from megarl.data.examples.sizes import TinySizes
from megarl.data.examples.tiny import write_tiny_model
from megarl.data.prompts import PromptRow, Prompts, RowSettings
from megarl.samples.sample import Prompt
from megarl.trainer.checks import reward_trial
from megarl.trainer.checks.reward_trial import RewardTrial, run_trial
from megarl.trainer.checks.rewards import Need, check_audited, check_truths, need_of

MINE = """
import os, time

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

def wants_tags(prompt, completion):
    return float(completion.text == f"<answer>{prompt.ground_truth}</answer>")

calls = []

def slows_down(prompt, completion):
    is_odd = prompt.ground_truth == "later" and len(completion.text) < 100 and completion.text != "later"
    time.sleep(0.7 if is_odd or (prompt.ground_truth == "first" and not calls) else 0.0)
    calls.append(completion)
    return float(completion.text == prompt.ground_truth)
"""


def with_rewards(*fns: str) -> Config:
    return load("rollout.engine=hf", f"reward.fn=[{','.join(fns)}]")


def row(truth: str | None, source: str = "", text: str = "1+1=") -> PromptRow:
    return PromptRow("rows.jsonl:7", Prompt("0-6", [5, 6], text, truth, source))


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def test_what_is_tried_is_named_with_its_row_and_the_process_has_no_secrets(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "key")
    config = with_rewards("auto", f"{mine}:acts")
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


ODD = [  # (reward, the answer that it fails on, what is said); FILE: the place in its file
    ("counts", "''", "ZeroDivisionError: division by zero (FILE:22)"),
    ("decodes", "'¿?", "ordinal not in range(128) (FILE:25)"),
    ("adds", "'1 (1 (1 (", "(FILE:28)"),
    ("replies", "''", "returned 'no number', a str; expected a number or a dict with 'score' (FILE:31)"),
    ("replies_later", "''", "returned None, a NoneType; expected a number or a dict with 'score' (FILE:34)"),
    ("replies_to_messages", "''", "returned a dict with the keys []; expected 'score' among them (FILE:37)"),
]


def test_answers_without_the_expected_form_are_tried_too_and_so_is_an_audit(mine: str) -> None:
    """The place is the line of the user's file, and that of its function where only the value is wrong."""
    config = with_rewards("exact")
    config.reward.by_data_source = {fn: f"{mine}:{fn}" for fn, _, _ in ODD}
    with RewardTrial(config) as trial:
        for fn, answer, said in ODD:
            with pytest.raises(ValueError, match="^reward.fn") as caught:
                trial.check([row("46", fn)])
            assert f"with the answer {answer}" in str(caught.value)
            assert f"{said.replace('FILE', mine)}; reward.try_rows=0" in str(caught.value)
    config = with_rewards("exact")
    config.reward.audit = f"{mine}:counts"
    with RewardTrial(config) as trial, pytest.raises(ValueError, match="mine.py:counts: tried on .*ZeroDivisionError"):
        trial.check([row("46")])


def test_a_right_answer_that_is_paid_no_more_than_an_empty_one_is_a_warning(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, short = with_rewards("auto"), mine.replace("mine.py", "short.py")
    Path(short).write_text("def is_short(prompt, completion):\n    return -len(completion.text)\n")
    named = {
        "tags": f"{mine}:wants_tags",
        "short": f"{short}:is_short",
        "letters": "choice",
        "digits": "gsm8k_verl",
        "codes": "code",
    }
    config.reward.by_data_source = {**named, "sums": "gsm8k", "marks": "gsm8k_strict"}
    chat = [{"role": "user", "content": "1+1?"}]
    rows = [
        PromptRow(f"rows.jsonl:{at}", Prompt(f"0-{at}", [5], chat, truth, source))
        for at, (truth, source) in enumerate(
            [
                ("46", "tags"),
                ("46", "short"),
                ("46 apples", "digits"),
                ("B", "letters"),
                ("46", ""),
                ("46", "marks"),
                (46.0, "sums"),
                (r"\$5", "lighteval/MATH"),
                ("46", "aime"),
                ("assert f() == 1", "codes"),
                ("46", "digits"),
            ]
        )
    ]
    with RewardTrial(config) as trial:
        trial.check(rows)
    said = " ".join(capsys.readouterr().err.split())
    paid = "no more than an empty answer"
    assert f"wants_tags pays the ground truth of 1 of 1 tried rows {paid}: '46', the answer to rows.jsonl:0" in said
    assert f"gsm8k_verl pays the ground truth of 1 of 2 tried rows {paid}: '#### 46 apples', the answer to rows" in said
    sentence = "not for 'So the answer is 46.' (rows.jsonl:"
    assert f"auto pays for '46' and {sentence}4): a model has to be asked for the bare ground truth" in said
    assert f"gsm8k_strict pays for '#### 46' and {sentence}5): a model has to be asked for that form" in said
    assert said.count(paid) == 2 and said.count(sentence) == 2, "is_short reads no ground truth, and others pay"


@pytest.mark.full
def test_who_expects_errors_has_them_only_of_right_answers(mine: str) -> None:
    config = with_rewards(f"{mine}:counts", f"{mine}:knows")
    config.reward.on_error = "zero"
    with RewardTrial(config) as trial:
        trial.check([row("46")])
        with pytest.raises(ValueError, match="knows: tried on"):
            trial.check([row("46", text="")])


@pytest.mark.full
def test_a_reward_that_takes_too_long_is_a_warning(
    mine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reward_trial, "PATIENCE_S", 0.5)
    monkeypatch.setattr(reward_trial, "QUIET_S", 0.0)
    for fn, truth, limit in (("acts", "sleeps", "0.9"), ("loops", "46", "1")):  # the first one is async
        config = with_rewards(f"{mine}:{fn}")
        config.reward.timeout_s, config.reward.request_timeout_s = 0.5, 0.9
        with RewardTrial(config) as trial:
            trial.check([row(truth), row("raises")])
        on = f"tried on rows.jsonl:7 with the answer '{truth}'"
        assert capsys.readouterr().err.splitlines() == [
            f"waiting for reward {mine}:{fn}, which is {on}, for up to {limit} s",
            f"warning: reward {mine}:{fn} did not answer within {limit} s when it was {on}",
        ]


@pytest.mark.full
def test_a_reward_that_the_run_would_cut_off_is_named_once_unless_it_was_its_first_call(
    mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_rewards(f"{mine}:slows_down")
    config.reward.timeout_s, config.reward.on_error = 0.5, "zero"
    with RewardTrial(config) as trial:
        trial.check([row("first"), row("46")])
    assert capsys.readouterr().err == "", "its first call may load what it needs"
    config.reward.on_error = "unscored"
    with RewardTrial(config) as trial:
        trial.check([row("later")])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"warning: reward {mine}:slows_down took ")
    assert said.endswith(
        "tried on rows.jsonl:7 with the answer '': the run cuts it off there after reward.timeout_s=0.5"
    )


def test_no_process_is_started_where_nothing_can_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(reward_trial, "start_child", lambda *args, **_: asked.append(args))
    judged, switched_off, with_agents = with_rewards("exact"), with_rewards("exact"), with_rewards("exact")
    judged.reward.fn = ["judge"]
    switched_off.reward.try_rows, with_agents.agent.fn = 0, "file.py:episode"
    for config in (judged, switched_off, with_agents):
        RewardTrial(config).check([row(None)])
    assert asked == []
    assert run_trial.__module__ == "megarl.trainer.checks.reward_trial", "the process imports it by this name"


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
    return write_tiny_model(tmp_path_factory.mktemp("model") / "hf", TinySizes(layers=1, hidden=32, ffn=64))


@pytest.fixture
def tolerant(tmp_path: Path) -> str:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "mine.py").write_text(TOLERANT)
    return f"{tmp_path}/mine.py"


def prompts(model: str, *files: tuple[Path, list[Mapping[str, str]]]) -> Prompts:
    for file, rows in files:
        file.write_text("".join(json.dumps({"prompt": "1+1=", **row}) + "\n" for row in rows))
    return Prompts([str(file) for file, _ in files], load_tokenizer(model), RowSettings(8))


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
        ("judge of Is {answer} right?", Need.NEVER),
        ("judge of Is {answer} {truth}?", Need.PERHAPS),
    ],
)
def test_what_a_reward_needs_is_read_from_its_signature_and_its_file(tolerant: str, fn: str, need: Need) -> None:
    config = Config()
    fn, _, question = fn.partition(" of ")  # a judge needs what its question names
    config.reward.judge.prompt = question
    there = fn.replace("mine.py", tolerant).replace("plain.py", f"{Path(tolerant).parent}/plain.py")
    assert need_of(there, config) is need


def test_a_file_without_any_ground_truth_is_refused_where_a_reward_takes_it(
    model: str, tolerant: str, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    read = prompts(model, (good, [{"ground_truth": "2"}]), (bad, [{"answer": "2", "level": "1"}] * 6))
    with pytest.raises(ValueError, match="^data.ground_truth_key=ground_truth: no row of .*bad.jsonl has") as caught:
        check_truths(with_rewards("exact", f"{tolerant}:compares"), [read])
    assert str(caught.value).endswith(
        f"has a ground truth, which reward {tolerant}:compares takes; expected the name of its field (besides the "
        f"prompt {bad}:1 has 'answer', 'level'), or a function with ground_truth=None if it needs none"
    )


@pytest.mark.parametrize("fn", ["compares", "reads"])
def test_some_rows_without_ground_truth_are_one_warning_with_the_first_of_them(
    model: str, tolerant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], fn: str
) -> None:
    """The fifth row is the first one without, behind those that the trial looks at."""
    file = tmp_path / "some.jsonl"
    read = prompts(model, (file, [*[{"ground_truth": "2"}] * 4, {"answer": "2"}, {"ground_truth": "2"}, {}]))
    check_truths(with_rewards(f"{tolerant}:{fn}", f"{tolerant}:tidy"), [read])
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "warning: data.ground_truth_key=ground_truth: 2 of 7 rows have no ground truth, the first is "
        f"{file}:5, and reward {tolerant}:{fn} may read it; "
    )


def test_rewards_that_read_none_and_rows_of_other_rewards_are_silent(
    model: str, tolerant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"ground_truth": "2"}, {"data_source": "poems"}]
    read = prompts(model, (tmp_path / "mixed.jsonl", rows))
    config = with_rewards(f"{tolerant}:compares")
    config.reward.by_data_source = {"poems": f"{tmp_path}/plain.py:short"}
    check_truths(config, [read])
    agents = with_rewards(f"{tolerant}:compares")
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


def test_a_word_of_agent_command_that_no_row_has_is_refused_before_a_run(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    read = prompts(model, (file, [{"seed": 1, "goal": "x"}, {"goal": "y"}]))
    config = with_rewards("exact")
    config.agent.command = ["agent", "{goal}", "{ground_truth}", "${HOME}", "{{seed}}"]
    check_truths(config, [read])
    config.agent.command.append("{seed}")
    with pytest.raises(ValueError, match=rf"{file}:2 has no field seed; expected prompt, .* one of \['goal'\]"):
        check_truths(config, [read])
