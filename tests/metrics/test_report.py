import io
import json

import pytest
from rich.console import Console

from megarl.metrics import Answer, learning_curve, samples_table, write_samples, write_summary
from megarl.metrics.jsonl import append_lines, drop_after, read_lines
from megarl.metrics.plots import read_series, smooth
from megarl.sample import Completion, Prompt, Row, Sample, TurnSpan, VersionSpan


def sample(text, reward: float) -> Sample:
    prompt = Prompt("0-17", [1, 2], text, "46", "arithmetic")
    return Sample.of(
        prompt, Completion([4, 6, 1], [-0.1] * 3, "stop", (VersionSpan(7, 0, 3),), "46"), reward, {"len": 3.0}
    )


def test_samples_on_disk_by_hand(tmp_path):
    path = tmp_path / "samples.jsonl"
    groups = [
        [sample("12+34=", 1.0), sample("12+34=", 0.0)],
        [sample([{"role": "user", "content": "hi"}], 0.5)],
        [],
        [],
    ]
    write_samples(path, 3, groups, num_groups=2)
    write_samples(path, 4, groups, num_groups=1)
    rows = list(read_lines(path))
    assert len(rows) == 5
    assert rows[0] == {
        "step": 3,
        "uid": "0-17",
        "prompt": "12+34=",
        "completion": "46",
        "ground_truth": "46",
        "reward": 1.0,
        "reward_extra": {"len": 3.0},
        "finish_reason": "stop",
        "versions": [[7, 0, 3]],
        "num_tokens": 3,
        "num_turns": 1,
        "num_rows": 1,
        "turn_rewards": [],
    }
    assert rows[2]["prompt"] == "user: hi"
    drop_after(path, 3)
    assert [row["step"] for row in read_lines(path)] == [3, 3, 3]


def test_table_for_the_terminal_and_as_markdown():
    answers = [Answer("12+34=", "46", "37", "46", 0.0, 1.0), Answer("a|b\nc", None, "x" * 100, "[bold]y", 0.25, -1.0)]
    table, markdown = samples_table(answers, width=20)
    assert markdown.splitlines() == [
        "| prompt | truth | before |  | after |  |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 12+34= | 46 | 37 | ✗ | 46 | ✓ |",
        "| a\\|b<br>c |  | xxxxxxxx … xxxxxxxx | 0.25 | [bold]y | ✗ |",
    ]
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    assert "[bold]y" in out.getvalue()  # what a model writes is no markup
    assert "12+34=" in out.getvalue()


def test_summary_is_there_as_a_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"accuracy_after": 0.95, "steps": 3})
    assert json.loads(path.read_text()) == {"accuracy_after": 0.95, "steps": 3}
    with pytest.raises(TypeError):
        write_summary(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"accuracy_after": 0.95, "steps": 3}


def test_learning_curve_draws_long_short_and_broken_series(tmp_path):
    path, png = tmp_path / "metrics.jsonl", tmp_path / "curve.png"
    rows = [
        {
            "step": step,
            "critic/score/mean": step / 60,
            "actor/pg_loss": float("nan") if step == 5 else -0.1,
            "rollout_corr/log_prob_gap_mean": 0.0,
            "rollout_corr/log_prob_gap_max": 1e-6 * step,
            **{f"timing_s/{i}": i for i in range(9)},
        }
        for step in range(60)
    ]
    append_lines(path, [*rows, {"step": 59, "val/accuracy": 0.9}])
    learning_curve(path, png, title="quickstart")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert png.stat().st_size > 20_000
    series = read_series(path)
    assert len(series["actor/pg_loss"][0]) == 59
    assert series["val/accuracy"] == ([59], [0.9])


def test_a_file_without_a_curve_is_refused(tmp_path):
    append_lines(tmp_path / "m.jsonl", [{"step": 1, "x": 2.0}])
    with pytest.raises(ValueError, match="holds none of the metrics of a learning curve"):
        learning_curve(tmp_path / "m.jsonl", tmp_path / "c.png")


def test_smoothing_is_centred_and_keeps_a_line():
    assert smooth([1.0, 2.0, 6.0], window=3) == [1.5, 3.0, 4.0]
    assert smooth([float(i) for i in range(40)])[7:33] == [float(i) for i in range(7, 33)]


def test_an_episode_is_a_line_with_its_turns_rows_and_their_rewards(tmp_path):
    first = Row(
        [5, 6, 7, 8], (TurnSpan(0, 1, 2), TurnSpan(2, 3, 4)), [-1.0] * 2, (VersionSpan(1, 0, 2),), "stop", (0.5, 0.0)
    )
    other = Row(
        [5, 9, 9], (TurnSpan(1, 1, 3),), [-1.0] * 2, (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)), "length", (0.25,)
    )
    said = [
        {"role": "user", "text": "x"},
        {"role": "assistant", "text": "", "calls": [{"name": "f", "arguments": "{}"}]},
    ]
    sample = Sample(Prompt("0-1", [5], "x"), (first, other), 1.0, text="done", messages=said)
    write_samples(tmp_path / "samples.jsonl", 1, [[sample]])
    (line,) = read_lines(tmp_path / "samples.jsonl")
    wanted = {
        "completion": "done",
        "reward": 1.0,
        "finish_reason": "stop",
        "num_tokens": 4,
        "num_turns": 3,
        "num_rows": 2,
        "messages": said,
    }
    wanted |= {"turn_rewards": [0.5, 0.0, 0.25], "versions": [[1, 0, 2], [1, 2, 3], [2, 3, 4]]}
    assert {name: line[name] for name in wanted} == wanted
