import json
import math

import pytest

from megarl.metrics.jsonl import append_lines, drop_after, read_lines


def test_lines_are_appended_and_read_back_and_what_json_lacks_is_null(tmp_path):
    path = tmp_path / "m.jsonl"
    append_lines(path, [{"step": 1, "a": 0.5, "b": math.nan}])
    append_lines(path, [{"step": 2, "a": [math.inf, 1.0], "c": {"d": "é"}}])
    assert list(read_lines(path)) == [
        {"step": 1, "a": 0.5, "b": None},
        {"step": 2, "a": [None, 1.0], "c": {"d": "é"}},
    ]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_resuming_drops_what_will_be_written_again_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    append_lines(path, [{"step": step, "a": step / 10} for step in (0, 1, 2, 2, 3)])
    with path.open("a") as file:
        file.write('{"step": 2, "a": 0.')  # killed in the middle of a line
    drop_after(path, 2)
    assert [row["step"] for row in read_lines(path)] == [0, 1, 2, 2]
    append_lines(path, [{"step": 3}])
    assert [row["step"] for row in read_lines(path)] == [0, 1, 2, 2, 3]
    drop_after(path, None)
    assert path.read_text() == ""
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_dropping_from_a_file_that_is_not_there_makes_none(tmp_path):
    drop_after(tmp_path / "none.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nhello\n')
    with pytest.raises(ValueError, match=r"m.jsonl:2: expected one JSON object a line"):
        list(read_lines(path))
