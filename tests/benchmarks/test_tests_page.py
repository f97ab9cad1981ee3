"""The page of a run of the tests, from a report as pytest writes it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import tests_page
from page import run
from tests_page import parser, result, work

REPORT = """<testsuites><testsuite time="12.5">
<testcase classname="tests.dist.test_push" name="test_a[x]" time="3.0"/>
<testcase classname="tests.dist.test_push" name="test_b" time="5.0"><failure message="no"/></testcase>
<testcase classname="tests.test_cli" name="test_c" time="0.5"/>
</testsuite></testsuites>"""


def test_a_row_for_each_file_and_a_line_for_each_failure(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(REPORT)
    found = result(tmp_path / "tests.xml", "-m long")
    assert found.rows == [
        {"file": "tests/dist/test_push.py", "tests": 2, "failed": 1, "seconds": 8.0, "longest": 5.0},
        {"file": "tests/test_cli.py", "tests": 1, "failed": 0, "seconds": 0.5, "longest": 0.5},
    ]
    assert found.notes == ["failed: tests/dist/test_push.py::test_b"]
    assert found.ratios == {"all tests": 3, "all failed": 1}
    assert found.configuration == {"command": "launch/test.sh -m long"}


@pytest.mark.parametrize(("code", "pages"), [(0, 1), (1, 1), (5, 0)], ids=["passed", "some failed", "none ran"])
def test_a_page_is_made_of_tests_that_came_to_their_end(
    code: int, pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests.xml").write_text(REPORT)
    asked: list[list[str]] = []

    def stand_in(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[2:])
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(tests_page, "REPORT", tmp_path / "tests.xml")
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", stand_in)
        made = work(parser().parse_args(["-m", "long"])) if pages else None
        assert made is not None or run(work, parser(), ["-m", "long", "--out", str(tmp_path)]) == 2
    assert asked == [["-m", "long"]]
