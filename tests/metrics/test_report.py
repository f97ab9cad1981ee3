"""Files of a run: lines of JSON, samples, tokens, summaries, tables and curves."""

import io
import json
import math
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megarl.data.batch import make_batch
from megarl.metrics.computing import tokens
from megarl.metrics.computing.samples import Answer, samples_table, write_samples, write_summary
from megarl.metrics.computing.tokens import TokenLog, pieces
from megarl.metrics.reading.jsonl import TOKENS, append_lines, drop_after, read_lines, read_series
from megarl.samples.sample import Completion, Prompt, Row, Sample, TurnSpan, VersionSpan


def sample(text, reward: float) -> Sample:
    spans = (VersionSpan(7, 0, 3),)
    completion = Completion([4, 6, 1], [-0.1] * 3, "stop", spans, "46")
    return Sample.of(Prompt("0-17", [1, 2], text, "46", "arithmetic"), completion, reward, {"len": 3.0})


def test_samples_on_disk_by_hand(tmp_path):
    path = tmp_path / "samples.jsonl"
    groups = [[sample("12+34=", 1.0), sample("12+34=", 0.0)], [sample([{"role": "user", "content": "hi"}], 0.5)], []]
    write_samples(path, 3, groups, num_groups=2)
    write_samples(path, 4, groups, num_groups=1)
    rows = list(read_lines(path))
    assert [row["step"] for row in rows] == [3, 3, 3, 4, 4]
    expected = {"uid": "0-17", "prompt": "12+34=", "completion": "46", "ground_truth": "46", "reward": 1.0}
    expected |= {"reward_extra": {"len": 3.0}, "finish_reason": "stop", "versions": [[7, 0, 3]], "turn_rewards": []}
    assert rows[0] == {"step": 3, **expected, "num_tokens": 3, "num_turns": 1, "num_rows": 1}
    assert rows[2]["prompt"] == "user: hi"


def test_table_for_the_terminal_and_as_markdown():
    answers = [Answer("12+34=", "46", "37", "46", 0.0, 1.0), Answer("a|b\nc", None, "x" * 100, "[bold]y", 0.25, -1.0)]
    table, markdown = samples_table(answers, width=20)
    assert markdown.splitlines() == [
        "| prompt | truth | before |  | after |  |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 12+34= | 46 | 37 | ✗ | 46 | ✓ |",
        "| a\\|b<br>c |  | xxxxxxxx … xxxxxxxx | 0.25 | \\[bold\\]y | ✗ |",
    ]
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    assert "[bold]y" in out.getvalue()  # what a model writes is no markup
    assert "12+34=" in out.getvalue()


def test_where_nobody_answered_before_the_table_has_no_column_for_it():
    table, markdown = samples_table([Answer("12+34=", "46", "", "46", None, 1.0)])
    assert markdown.splitlines()[::2] == ["| prompt | truth | after |  |", "| 12+34= | 46 | 46 | ✓ |"]
    assert table.title == "answers after" and len(table.columns) == 4


def test_summary_is_there_as_a_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"accuracy_after": 0.95, "steps": 3, "metrics": {"val/score": math.nan}})
    assert "NaN" not in path.read_text() and json.loads(path.read_text())["metrics"] == {"val/score": None}
    write_summary(path, {"accuracy_after": 0.95, "steps": 3})
    with pytest.raises(TypeError):
        write_summary(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"accuracy_after": 0.95, "steps": 3}


def test_a_series_has_the_numbers_of_a_metric_and_of_a_step_that_was_logged_twice_the_last(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(60):
        append_lines(path, [{"step": step, "actor/pg_loss": float("nan") if step == 5 else -0.1}])
    append_lines(path, [{"step": 59, "val/accuracy": 0.5}, {"step": 59, "val/accuracy": 0.9}])
    series = read_series(path)
    assert len(series["actor/pg_loss"][0]) == 59
    assert series["val/accuracy"] == ([59], [0.9])


def test_an_episode_is_a_line_with_its_turns_rows_and_their_rewards(tmp_path):
    turns, versions = (TurnSpan(0, 1, 2), TurnSpan(2, 3, 4)), (VersionSpan(1, 0, 1), VersionSpan(2, 1, 2))
    first = Row([5, 6, 7, 8], turns, [-1.0] * 2, (VersionSpan(1, 0, 2),), "stop", (0.5, 0.0))
    other = Row([5, 9, 9], (TurnSpan(1, 1, 3),), [-1.0] * 2, versions, "length", (0.25,))
    said = [{"role": "user", "text": "x"}, {"role": "assistant", "text": "", "calls": [{"name": "f"}]}]
    sample = Sample(Prompt("0-1", [5], "x"), (first, other), 1.0, text="done", messages=said)
    write_samples(tmp_path / "samples.jsonl", 1, [[sample]])
    (line,) = read_lines(tmp_path / "samples.jsonl")
    wanted = {"completion": "done", "reward": 1.0, "finish_reason": "stop", "messages": said}
    wanted |= {"num_tokens": 4, "num_turns": 3, "num_rows": 2}
    wanted |= {"turn_rewards": [0.5, 0.0, 0.25], "versions": [[1, 0, 2], [1, 2, 3], [2, 3, 4]]}
    assert {name: line[name] for name in wanted} == wanted


def test_lines_are_appended_and_read_back_and_what_json_lacks_is_null(tmp_path):
    path = tmp_path / "m.jsonl"
    append_lines(path, [{"step": 1, "a": 0.5, "b": math.nan}])
    append_lines(path, [{"step": 2, "a": [math.inf, 1.0], "c": {"d": "é"}}])
    lines = [{"step": 1, "a": 0.5, "b": None}, {"step": 2, "a": [None, 1.0], "c": {"d": "é"}}]
    assert list(read_lines(path)) == lines == [json.loads(line) for line in path.read_text().splitlines()]
    with path.open("a") as file:
        file.write("hello\n")
    with pytest.raises(ValueError, match=r"m.jsonl:3: expected one JSON object a line"):
        list(read_lines(path))


def test_resuming_drops_what_will_be_written_again_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    append_lines(path, [{"step": step, "a": step / 10} for step in (0, 1, 2, 2, 3)])
    with path.open("a") as file:
        file.write('{"step": 2, "a": 0.')  # killed in the middle of a line
    drop_after(path, 2)
    assert [row["step"] for row in read_lines(path)] == [0, 1, 2, 2]
    append_lines(path, [{"step": 3}])
    assert [row["step"] for row in read_lines(path)] == [0, 1, 2, 2, 3]
    drop_after(path, 2, also=lambda row: row["step"] == 2 and row["a"] == 0.2)
    assert [row["step"] for row in read_lines(path)] == [0, 1], "rows of the last kept step may be dropped, too"
    drop_after(path, None)
    assert path.read_text() == ""
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize(
    "damaged",
    [b'{"step": 2, "a":{"step": 2, "a": 0.5}\n', b"\0" * 40 + b"\n", b'{"step": "\xff"}\n', b"[2]\n", b'{"a": 1}\n'],
    ids=["torn and written on", "zeros of a power failure", "no UTF-8", "no object", "no step"],
)
def test_a_damaged_line_does_not_block_a_resume(tmp_path, caplog, damaged):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged + '{"step": 3, "b": "é"}\n{"step": 4}\n'.encode())
    drop_after(path, 3)
    assert list(read_lines(path)) == [{"step": 1}, {"step": 3, "b": "é"}]
    assert f"{path}:2 is no whole line" in caplog.text


def test_lines_that_a_full_disk_cut_off_are_taken_back(tmp_path):
    path = tmp_path / "m.jsonl"
    append_lines(path, [{"step": 1}])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # what a full disk does: a part is written, then an error
    try:
        with pytest.raises(OSError, match="too large"):
            append_lines(path, [{"step": 2, "a": "x" * 50}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    append_lines(path, [{"step": 3}])
    assert list(read_lines(path)) == [{"step": 1}, {"step": 3}]


def test_a_file_is_on_the_disk_before_it_replaces_the_one_before(tmp_path, monkeypatch):
    drop_after(tmp_path / "none.jsonl", 3)
    assert list(tmp_path.iterdir()) == [], "where none is none is made"
    path, synced = tmp_path / "m.jsonl", []
    append_lines(path, [{"step": 1}, {"step": 2}])
    fsync = os.fsync

    def note(number):
        synced.append((os.readlink(f"/proc/self/fd/{number}"), path.read_bytes().count(b"\n")))
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
    drop_after(path, 1)
    assert [lines for _, lines in synced] == [2, 1], "the new file, then its name"
    assert synced[0][0].startswith(f"{tmp_path}/.m.jsonl")
    assert synced[1][0] == str(tmp_path)


def decode(ids: list[int]) -> str:
    return "".join(chr(token) for token in ids)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def plain(uid: str, answer: str, reward: float) -> Sample:
    spans = (VersionSpan(7, 0, 1), VersionSpan(8, 1, len(answer)))
    return Sample.of(
        Prompt(uid, ids("q:"), "q:"), Completion(ids(answer), [-0.25] * len(answer), "stop", spans), reward
    )


def with_tool(uid: str) -> Sample:
    """q: | ab | tool | c"""
    learnt = (TurnSpan(0, 2, 4), TurnSpan(1, 8, 9))
    row = Row(ids("q:abtoolc"), learnt, [-1.0, -2.0, -3.0], (VersionSpan(7, 0, 3),), "stop")
    return Sample(Prompt(uid, ids("q:"), "q:"), (row,), 0.5)


def written(folder: Path, groups: list[list[Sample]], num_samples: int) -> list[dict[str, object]]:
    batch = make_batch(groups)
    places = torch.arange(batch.num_tokens, dtype=torch.float32)
    batch = batch.with_columns(old_log_probs=-places, advantages=places / 3)
    TokenLog(folder, decode, num_samples).write(4, groups, batch)
    return list(read_lines(folder / TOKENS))


def test_the_best_and_the_worst_of_a_group_are_kept_with_the_numbers_of_their_own_tokens(tmp_path: Path) -> None:
    group = [plain("0-1", "xyz", 0.5), plain("0-1", "no", 0.0), plain("0-1", "yes", 1.0)]
    best, worst = written(tmp_path, [group, [plain("0-2", "other", 1.0)]], 2)
    assert (best["step"], best["uid"], best["reward"], worst["reward"]) == (4, "0-1", 1.0, 0.0)
    assert worst["rows"] == [
        [
            {"text": "q:"},  # tokens 5 and 6 of the batch: the first sample has 5
            {"version": 7, "pieces": ["n"], "rollout_log_probs": [-0.25], "log_probs": [-7.0], "advantages": [2.3333]},
            {"version": 8, "pieces": ["o"], "rollout_log_probs": [-0.25], "log_probs": [-8.0], "advantages": [2.6667]},
        ]
    ]


def test_what_a_tool_said_is_context_between_the_turns(tmp_path: Path) -> None:
    (row,) = written(tmp_path, [[with_tool("0-1")]], 2)
    question, first, tool, second = row["rows"][0]  # type: ignore[index]
    assert (question, tool) == ({"text": "q:"}, {"text": "tool"})
    assert (first["pieces"], first["rollout_log_probs"]) == (["a", "b"], [-1.0, -2.0])
    assert (second["pieces"], second["rollout_log_probs"], second["log_probs"]) == (["c"], [-3.0], [-8.0])


def test_long_samples_are_cut_and_say_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tokens, "MAX_TOKENS", 3)
    monkeypatch.setattr(tokens, "MAX_CONTEXT", 2)
    (row,) = written(tmp_path, [[plain("0-1", "abcdef", 1.0)]], 1)
    _, first, second, left_out = row["rows"][0]  # type: ignore[index]
    assert (first["pieces"], second["pieces"], left_out) == (["a"], ["b", "c"], {"text": "[... 3 tokens ...]"})
    monkeypatch.setattr(tokens, "MAX_TOKENS", 9)
    row = written(tmp_path, [[with_tool("0-1")]], 1)[-1]
    assert row["rows"][0][2] == {"text": "t\n[... 2 tokens ...]\nl"}  # type: ignore[index]
    TokenLog(tmp_path / "none", decode, 2).write(1, [], None)
    assert not (tmp_path / "none").exists(), "a step that trained nothing writes nothing"


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def of_words(ids: list[int]) -> str:
    """As SentencePiece: a word begins with a space, but for a text's first."""
    return "".join(f" {'abc'[token]}" for token in ids).removeprefix(" ")


def test_texts_of_tokens_by_hand() -> None:
    assert pieces(of_bytes, list("é!".encode())) == ["", "é", "!"], "a character is the text of its last token"
    assert pieces(of_words, [0, 1, 2]) == ["a", " b", " c"]
    assert pieces(of_words, [0, 1, 2], start=1) == [" b", " c"], "a space before a word is kept"
    found = pieces(of_bytes, [0xFF] * 9 + [33])
    assert "".join(found) == "\ufffd" * 9 + "!", "bytes that are no character end"


@given(st.text(max_size=20))
def test_the_texts_of_tokens_join_to_the_text(text: str) -> None:
    assert "".join(pieces(of_bytes, list(text.encode()))) == text
