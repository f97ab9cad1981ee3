"""What counts as a regression between two results, and what cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.page import Result, numbers, slug
from benchmarks.compare import compare, main


def said(ratios: dict[str, float], **fields: Any) -> dict[str, Any]:
    return numbers(Result("step", "cpu", {"tokens": 4096}, ratios=ratios)) | fields | ratios


def stored(folder: Path, content: dict[str, Any], name: str = "") -> Path:
    file = folder / f"{content['theme']}_{slug(content['hardware'])}_{content['date']}{name}.json"
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("theme", "name", "before", "worse"),
    [
        ("step", "step_vs_megatron", 1.0, 0.94),
        ("step", "step_s", 10.0, 10.6),
        ("step", "tokens_per_s", 100.0, 94.0),
        ("step", "unaccounted", 0.005, 0.03),
        ("packing", "seconds_first_fit_over_megarl", 4.0, 3.0),
        ("plan", "held_out_median_log_error", 0.1, 0.2),
        ("scale", "calls_s", 4.0, 5.0),
        ("scale", "model_off_error", 0.1, 0.2),
        ("ring_quickstart", "tokens_per_s_per_gpu", 100.0, 90.0),
    ],
)
def test_more_than_five_percent_in_the_bad_direction_is_a_regression(
    theme: str, name: str, before: float, worse: float
) -> None:
    nearly = before + 0.04 * before * (1 if worse > before else -1)
    for now, is_worse in ((worse, True), (2 * before - worse, False), (nearly, False)):
        (change,) = compare(said({name: now}, theme=theme), said({name: before}, theme=theme))
        assert change.is_regression(0.05) is is_worse


@pytest.mark.parametrize(("key", "value"), [("hardware", "another machine"), ("theme", "push"), ("device", "cuda")])
def test_other_hardware_and_other_benchmarks_are_not_compared(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{key}: the new result has .* expected the same"):
        compare(said({"a": 1.0}), said({"a": 1.0}, **{key: value}))


def test_the_exit_code_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = stored(tmp_path, said({"step_vs_megatron": 1.0, "step_s": 2.0}, date="2026-01-01"))
    same = stored(tmp_path, said({"step_vs_megatron": 0.99, "step_s": 2.0}, date="2026-01-02"))
    worse = stored(tmp_path, said({"step_vs_megatron": 0.9, "step_s": 2.0}, date="2026-01-03"))
    assert main([str(same), str(old)]) == 0
    assert "worse" not in capsys.readouterr().out
    assert main([str(worse), str(old)]) == 1
    assert "worse by more than 5%" in capsys.readouterr().out
    assert main([str(worse), str(old), "--limit", "0.2"]) == 0
    assert main([str(worse), "--results", str(tmp_path)]) == 1  # against the one before


def test_what_is_no_result_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    file.write_text("{}")
    assert main([str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: it lacks theme, title,")
    assert main([str(tmp_path / "absent.json")]) == 2
