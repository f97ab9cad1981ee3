"""The runs of benchmarks/bench_distill.py compose and are compared; they themselves are no tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_distill import QUICK, RUNS, first_near, near_for_good, result, words

from megarl.config import load_config


def test_both_begin_with_one_policy_and_write_equally_many_completions() -> None:
    configs = [load_config([*words(name)[1:], *QUICK])[0] for name in RUNS]
    assert len({config.model.path for config in configs}) == 1
    assert {config.data.train_batch_size * config.rollout.n for config in configs} == {512}
    assert len({config.trainer.run_dir for config in configs}) == 2


@pytest.mark.parametrize(("teacher", "first"), [(0.92, 4), (0.9, 2), (0.95, None)])
def test_near_is_two_hundredths_below(teacher: float, first: int | None) -> None:
    assert first_near(([0, 2, 4, 6], [0.4, 0.88, 0.91, 0.9]), teacher) == first


@pytest.mark.parametrize(("teacher", "from_then"), [(0.92, 4), (0.9, 2), (0.93, None), (0.4, 0)])
def test_near_for_good_is_near_to_the_end(teacher: float, from_then: int | None) -> None:
    assert near_for_good(([0, 2, 4, 6], [0.4, 0.88, 0.91, 0.9]), teacher) == from_then
    assert near_for_good(([0, 2, 4, 6], [0.4, 0.92, 0.8, 0.92]), 0.92) == 6


def test_the_page_has_both_and_the_iterations_of_what_came_near(tmp_path: Path) -> None:
    for name, gain in (("distillation", 0.02), ("GRPO", 0.001)):
        folder = tmp_path / f"bench_{RUNS[name]}"
        folder.mkdir()
        rows = [{"step": step, "val/score": 0.5 + gain * step} for step in range(0, 22, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = result(tmp_path, 0.8)
    assert [row["first iteration near the teacher"] for row in found.rows] == [14, "none"]
    assert [row["for good"] for row in found.rows] == [14, "none"]
    assert [row["optimizer steps in one"] for row in found.rows] == [16, 2]
    assert found.ratios == {"accuracy_teacher": 0.8, "iterations_distillation": 14}
