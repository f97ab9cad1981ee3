import json
import math
import os
import resource
import signal

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


def test_rows_of_the_last_kept_step_may_be_dropped_too(tmp_path):
    path = tmp_path / "m.jsonl"
    append_lines(path, [{"step": 1, "val/score": 0.1}, {"step": 2}, {"step": 2, "val/score": 0.2}])
    drop_after(path, 2, also=lambda row: row["step"] == 2 and "val/score" in row)
    assert list(read_lines(path)) == [{"step": 1, "val/score": 0.1}, {"step": 2}]


def test_a_file_is_on_the_disk_before_it_replaces_the_one_before(tmp_path, monkeypatch):
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


def test_dropping_from_a_file_that_is_not_there_makes_none(tmp_path):
    drop_after(tmp_path / "none.jsonl", 3)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nhello\n')
    with pytest.raises(ValueError, match=r"m.jsonl:2: expected one JSON object a line"):
        list(read_lines(path))
