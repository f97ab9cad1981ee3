"""What counts as a regression between two results, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compare import Change, compare, differences, main, newest_like
from page import Result, numbers, slug


def said(ratios: dict[str, float], **fields: Any) -> dict[str, Any]:
    return numbers(Result("step", "cpu", {"tokens": 4096}, ratios=ratios)) | fields | ratios


def stored(folder: Path, content: dict[str, Any], name: str = "") -> Path:
    file = folder / f"{content['theme']}_{slug(content['hardware'])}_{content['date']}{name}.json"
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("name", "before", "now", "worse"),
    [
        ("step_vs_megatron", 1.0, 0.94, True),
        ("step_vs_megatron", 1.0, 0.96, False),
        ("step_vs_megatron", 1.0, 1.5, False),
        ("step_s", 10.0, 10.6, True),
        ("step_s", 10.0, 9.0, False),
        ("tokens_per_s", 100.0, 94.0, True),
        ("unaccounted", 0.002, 0.009, False),  # a share so small is noise
        ("unaccounted", 0.005, 0.03, True),
        ("seconds", 0.0, 0.1, True),
    ],
)
def test_more_than_five_percent_in_the_bad_direction_is_a_regression(
    name: str, before: float, now: float, worse: bool
) -> None:
    (change,) = compare(said({name: now}), said({name: before}))
    assert change.is_regression(0.05) is worse


@pytest.mark.parametrize(
    ("theme", "name", "before", "worse"),
    [
        ("packing", "seconds_first_fit_over_megarl", 4.0, 3.0),
        ("packing", "waste_first_fit_over_megarl", 1.2, 1.1),
        ("plan", "held_out_median_log_error", 0.1, 0.2),
        ("plan", "held_out_within_1_5", 0.9, 0.8),
        ("plan_memory", "total_median_log_error", 0.1, 0.2),
        ("scale", "calls_s", 4.0, 5.0),
        ("scale", "model_off_error", 0.1, 0.2),
        ("peer", "peer", 2.0, 1.8),
        ("ring_quickstart", "step_s", 2.0, 2.2),
        ("ring_quickstart", "tokens_per_s_per_gpu", 100.0, 90.0),
        ("ring_quickstart", "mfu", 0.5, 0.4),
        ("rollout", "ring_over_bare", 1.0, 0.9),
        ("step", "step_vs_megatron", 1.0, 0.9),
        ("push", "cpu_sharded_of_copy", 0.1, 0.08),
        ("logprobs", "memory_plain_over_torch", 4.0, 3.0),
        ("losses", "accuracy_quickstart", 0.95, 0.8),
    ],
)
def test_the_bad_direction_of_each_theme(theme: str, name: str, before: float, worse: float) -> None:
    for now, is_worse in ((worse, True), (2 * before - worse, False)):
        (change,) = compare(said({name: now}, theme=theme), said({name: before}, theme=theme))
        assert change.is_regression(0.05) is is_worse


def test_what_says_how_sure_a_number_is_is_not_compared() -> None:
    spread = {"least_total": 0.5, "most_total": 2.0, "model_over_measured_least": 0.5, "model_over_measured_most": 1.5}
    (change,) = compare(said(spread | {"a": 1.0}), said(dict.fromkeys(spread, 1.0) | {"a": 1.0}))
    assert change.name == "a"


def test_only_what_both_have_and_says_something_is_compared() -> None:
    new, old = said({"step_lowest_of_a_turn": 0.5, "a": 1.0, "b": 2.0}), said({"step_lowest_of_a_turn": 1.0, "b": 2.0})
    assert compare(new, old) == [Change("b", 2.0, 2.0, 0.0)]
    with pytest.raises(ValueError, match="has none of a; expected one of the same script"):
        compare(said({"a": 1.0}), said({"b": 1.0}))


@pytest.mark.parametrize(("key", "value"), [("hardware", "another machine"), ("theme", "push"), ("device", "cuda")])
def test_other_hardware_and_other_benchmarks_are_not_compared(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{key}: the new result has .* expected the same"):
        compare(said({"a": 1.0}), said({"a": 1.0}, **{key: value}))


def test_another_configuration_is_told() -> None:
    changed = said({"a": 1.0}, configuration={"tokens": 1024, "rows": 2}, commit="x", versions="y", load="z")
    now = said({"a": 1.0}, commit="x", versions="y", load="z")
    assert differences(now, changed) == ["tokens: 1024 -> 4096", "rows: 2 -> None"]


def test_the_newest_other_result_of_the_same_machine_is_found(tmp_path: Path) -> None:
    new = said({"a": 1.0}, date="2026-03-03")
    mine = stored(tmp_path, new)
    with pytest.raises(ValueError, match="no result of step on"):
        newest_like(new, mine, tmp_path)
    stored(tmp_path, said({"a": 1.0}, date="2026-01-01"))
    newest = stored(tmp_path, said({"a": 1.0}, date="2026-02-02"))
    stored(tmp_path, said({"a": 1.0}, date="2026-02-03", hardware="another machine"))
    assert newest_like(new, mine, tmp_path) == newest
    for number in ("_2", "_10"):
        newest = stored(tmp_path, said({"a": 1.0}, date="2026-02-02"), number)
    assert newest_like(new, mine, tmp_path) == newest


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
