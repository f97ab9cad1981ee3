"""The page of a run of the tests, from a report as pytest writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from page import run
from tests_page import parser, work

REPORT = """<testsuites><testsuite time="12.5">
<testcase classname="tests.dist.test_push" name="test_a[x]" time="3.0"/>
<testcase classname="tests.dist.test_push" name="test_b" time="5.0"><failure message="no"/></testcase>
<testcase classname="tests.test_cli" name="test_c" time="0.5"/>
</testsuite></testsuites>"""


def test_a_row_for_each_file_and_a_line_for_each_failure(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(REPORT)
    assert run(work, parser(), [str(tmp_path / "tests.xml"), "--what", "three tests", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("tests_*.json")
    said = json.loads(file.read_text())
    assert said["rows"] == [
        {"file": "tests/dist/test_push.py", "tests": 2, "failed": 1, "seconds": 8.0, "longest": 5.0},
        {"file": "tests/test_cli.py", "tests": 1, "failed": 0, "seconds": 0.5, "longest": 0.5},
    ]
    assert said["notes"] == ["failed: tests/dist/test_push.py::test_b"]
    assert (said["all tests"], said["all failed"], said["took_s"]) == (3, 1, 12.5)


def test_another_file_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests.xml").write_text("<html>")
    assert run(work, parser(), [str(tmp_path / "tests.xml"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/tests.xml: want a report that pytest --junit-xml wrote\n"
