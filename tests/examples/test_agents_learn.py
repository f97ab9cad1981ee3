"""The examples with agents: each begins with what its cold start taught, and learns the rest from rewards."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from examples import calculator, guessing_game
from megarl.config import load_config
from megarl.metrics.reading.jsonl import Series, read_series
from megarl.trainer.recipes import cold_start

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *words: str) -> tuple[Series, dict[str, float]]:
    """The metrics and the summary of a run in this folder, as a reader would start it."""
    Path("examples").symlink_to(EXAMPLES)
    command = [sys.executable, "-m", "megarl", "train", "--config", f"examples/{name}.yaml", *words]
    subprocess.run(command, check=True)
    folder = Path("runs") / name
    return read_series(folder / "metrics.jsonl"), json.loads((folder / "summary.json").read_text())


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(("name", "example"), [("calculator", calculator), ("guessing_game", guessing_game)])
def test_the_preparation_writes_the_task_and_a_model_that_has_its_words(
    name: str, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it but the training, from the model that it wrote."""
    trained = []
    monkeypatch.setattr(cold_start, "sft", trained.append)
    Path("examples").symlink_to(EXAMPLES)
    config, _ = load_config([f"recipe=examples/{name}.yaml"])
    example.prepare(config)
    (training,) = trained
    assert [Path(file).is_file() for file in (*config.data.train_files, *training.sft.train_files)] == [True, True]
    tokenizer = AutoTokenizer.from_pretrained(training.model.path)
    assert {len(tokenizer.encode(word)) for word in example.WORDS} == {1}


@pytest.mark.long
def test_a_model_learns_to_call_a_calculator() -> None:
    series, summary = run("calculator")
    assert summary["accuracy_before"] < 0.3 and summary["accuracy_after"] > 0.9
    _, calls = series["agent/tool_calls"]
    assert calls[0] < 0.6 and mean(calls[-3:]) > 0.9
    assert summary["pushes_verified"] == summary["pushes"]


@pytest.mark.long
def test_a_model_learns_to_halve_what_is_left() -> None:
    series, summary = run("guessing_game")
    _, scores = series["critic/score/mean"]
    _, found = series["reward/found"]
    # At random: 0.2 * sum over k = 0..4 of (5 - k) / 7 * (6/7)^k = 0.355; the best plan: 1 - 0.2 * (17/7 - 1) = 0.714.
    assert mean(scores[:5]) < 0.45 and mean(scores[-5:]) > 0.6
    assert summary["score_after"] > 0.65
    assert mean(found[:5]) < 0.75 and mean(found[-5:]) > 0.9
