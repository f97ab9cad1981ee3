"""The distillation recipes, whole: what a teacher of four layers knows, a policy of two layers learns."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from bench_distill import first_near

from megarl.cli import main
from megarl.metrics.plots import read_series

pytestmark = [pytest.mark.dist, pytest.mark.long]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of its own: the recipes' paths are relative."""
    return tmp_path_factory.mktemp("home")


def run(home: Path, recipe: str, *words: str) -> dict[str, Any]:
    before = Path.cwd()
    os.chdir(home)
    try:
        assert main(["train", f"recipe={recipe}", *words]) == 0
        found: dict[str, Any] = json.loads((home / "runs" / recipe / "summary.json").read_text())
        return found
    finally:
        os.chdir(before)


def score(home: Path, recipe: str, folder: str, capfd: pytest.CaptureFixture[str], *words: str) -> float:
    """Of a model in a folder on the recipe's held-out prompts."""
    before = Path.cwd()
    os.chdir(home)
    try:
        assert main(["evaluate", f"recipe={recipe}", f"model.path={folder}", *words]) == 0
    finally:
        os.chdir(before)
    found = re.search(r"val/score (\S+)", capfd.readouterr().out)
    assert found is not None
    return float(found[1])


def test_the_policy_comes_within_two_hundredths_of_its_teacher_in_fewer_steps_than_by_grpo(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    often = "trainer.test_freq=5"
    summary, by_rewards = run(home, "quickstart_distill", often), run(home, "quickstart_grpo", often)
    teacher = score(home, "quickstart_distill", "runs/quickstart_teacher_sft/hf", capfd)
    assert summary["accuracy_before"] < 0.5
    assert summary["accuracy_after"] >= teacher - 0.02
    assert summary["accuracy_before"] == by_rewards["accuracy_before"], "one cold start"
    first, other = (
        first_near(read_series(home / "runs" / recipe / "metrics.jsonl")["val/score"], teacher)
        for recipe in ("quickstart_distill", "quickstart_grpo")
    )
    assert first is not None and (other is None or first < other)
    assert summary["pushes"] == summary["pushes_verified"] == summary["steps"] + 1


def test_two_teachers_into_one_policy(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    summary = run(home, "quickstart_two_teachers")
    assert summary["accuracy_before"] < 0.5
    policy = "runs/quickstart_two_teachers/hf"
    for task, teacher in (("sums", "quickstart_teacher_sft"), ("reversals", "quickstart_teacher_sft_reversals")):
        prompts = f"data.val_files=[runs/quickstart_two_data/{task}/test.jsonl]"
        theirs, ours = (
            score(home, "quickstart_two_teachers", folder, capfd, prompts) for folder in (f"runs/{teacher}/hf", policy)
        )
        assert ours >= theirs - 0.05, task
