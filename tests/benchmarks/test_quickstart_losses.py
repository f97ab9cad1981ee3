"""The five runs of benchmarks/quickstart_losses.py compose, differ, and are drawn; they themselves are no tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quickstart_losses import QUICK, RUNS, picture, results, words, written

from megarl.config import load_config, to_yaml
from megarl.trainer.algorithm import make_algorithm


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """What five runs leave, as far as the page reads it."""
    for rank, name in enumerate(RUNS):
        folder = tmp_path / name
        folder.mkdir()
        config, _ = load_config(words(name)[1:])
        (folder / "config.yaml").write_text(to_yaml(config))
        rows = [{"step": step, "val/score": 0.4 + 0.01 * step - 0.01 * rank} for step in (0, 30, 60)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        numbers = {"accuracy_before": 0.4, "accuracy_after": 0.95, "accuracy_transformers": 0.95}
        summary = {**numbers, "pushes": 61, "pushes_verified": 61}
        (folder / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_each_run_has_a_loss_and_an_estimator_of_its_own() -> None:
    configs = [load_config(words(name)[1:])[0] for name in RUNS]
    assert len(configs) == 5
    assert all(load_config([*words(name)[1:], *QUICK])[0].trainer.total_training_steps == 6 for name in RUNS)
    assert len({make_algorithm(config).actor.loss.policy_loss for config in configs}) == 5
    assert len({config.algorithm.adv_estimator for config in configs}) == 5


def test_the_picture_and_the_page_show_every_run(runs: Path) -> None:
    picture(runs, runs / "curves.png")
    assert (runs / "curves.png").read_bytes()[:4] == b"\x89PNG"
    rows = results(runs)
    assert [row["run"] for row in rows] == list(RUNS) and rows[0]["accuracy_after"] == 0.95
    text = written(rows, "curves.png")
    assert "| cispo | rloo | 0.400 | 0.950 | 0.950 | 61 of 61 |" in text
    assert text.count("61 of 61") == 5
    assert "![accuracy](curves.png)" in text
