"""The end of a run, when a reward fails there: nothing that was trained is lost, and nothing waits for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ring_cases import make_parts, settings

from megarl.cli import main

pytestmark = [pytest.mark.dist, pytest.mark.slow]
GRPO = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1"]
# Weights 1 are those of the last evaluation; the check of hf/ gives no tokens.
REWARDS = """
def share(completion):
    return sum(map(str.isdigit, completion.text)) / 6

def raises_last(prompt, completion):
    if completion.versions[0].version == 1: raise KeyError("no such unit")
    return share(completion)

def hangs_last(prompt, completion):
    while not completion.token_ids and prompt.uid == "eval-3": pass
    return share(completion)

async def exits_last(prompt, completion):
    if not completion.token_ids: raise SystemExit(3)
    return share(completion)
"""


def words(tmp_path: Path, fn: str, *more: str) -> list[str]:
    parts = make_parts(tmp_path / "parts")
    (parts / "mine.py").write_text(REWARDS)
    of_reward = [f"reward.fn={parts}/mine.py:{fn}", "reward.try_rows=0", "reward.timeout_s=1"]
    return settings(parts, tmp_path / "runs", fn, *GRPO, *of_reward, *more)


def test_a_reward_that_raises_in_the_last_evaluation_takes_only_its_score(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The sentence comes when all is written, and the exit code is that of a failure."""
    assert main(["train", *words(tmp_path, "raises_last", "reward.on_error=stop", "trainer.save_freq=1")]) == 1
    run = tmp_path / "runs" / "raises_last"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["score_after"] is None and summary["score_before"] >= 0
    for name in ("hf/config.json", "README.md", "report.html", "checkpoints/step_00000001"):
        assert (run / name).exists(), name
    out, err = capfd.readouterr()
    assert "KeyError: 'no such unit'" in err and "KeyError" not in out.partition('"steps"')[2]


@pytest.mark.parametrize(("fn", "is_checked"), [("hangs_last", True), ("exits_last", False)])
def test_a_reward_that_hangs_or_exits_in_the_check_of_the_export_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fn: str, is_checked: bool
) -> None:
    assert main(["train", *words(tmp_path, fn, "trainer.check_export=true")]) == 0
    run = tmp_path / "runs" / fn
    summary = json.loads((run / "summary.json").read_text())
    assert isinstance(summary["score_transformers"], float) == is_checked
    for name in ("README.md", "answers.md", "report.html", "hf/config.json"):
        assert (run / name).exists(), name
    said = [line for line in capfd.readouterr().err.splitlines() if "trainer.check_export=true: hf/ is written" in line]
    assert len(said) == (not is_checked)
