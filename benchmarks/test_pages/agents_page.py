"""Runs the tests of stock clients and makes the page of it: versions, turns, rows, and what failed.

bash launch/agents.sh --newest                           # with the newest packages, in environments of their own
python benchmarks/test_pages/agents_page.py              # with the environments that the tests find
python benchmarks/test_pages/agents_page.py a.xml        # of tests that were run before: their JUnit reports
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import ROOT, Result, arguments, run

REPORT = ROOT / "runs" / "tests.xml"
WORDS = ["-n", "0", "-m", "agents", "-k", "clients", "tests/agents"]  # test_clients.py and test_npm_clients.py
TESTS_FAILED = 1  # pytest's exit code
COLUMNS = ("client", "version", "way", "turns", "rows", "same", "remarks")
NOTES = [
    "a conversation is a question, two calls of a tool and an answer, by a server that writes given texts",
    "same: yes, its rows are those of the package openai, token by token; own words: it adds some to the conversation",
]


def work(options: argparse.Namespace) -> Result:
    """Raises ValueError where pytest does not come to its end."""
    if options.reports:
        return result(options.reports)
    code = subprocess.run(["bash", str(ROOT / "launch" / "test.sh"), *WORDS]).returncode
    if code not in (0, TESTS_FAILED):
        raise ValueError(f"launch/test.sh {' '.join(WORDS)}: exit code {code}, expected 0 or {TESTS_FAILED}")
    return result([REPORT])


def result(reports: Sequence[Path]) -> Result:
    """What reports in the form of JUnit say of the tests that told of a client (the fixture `tell` in tests/agents)."""
    found = Result("agents", "cpu", {}, title="Stock agents at the endpoint", notes=[*NOTES])
    failed = 0
    for case in (case for report in reports for case in xml.parse(report).getroot().iter("testcase")):
        told = {str(one.get("name")): json.loads(one.get("value", "")) for one in _told(case)}
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        failed += failure is not None
        if not told and failure is None:
            continue
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | {name.partition(".")[2]: told[name] for name in told}
        if failure is not None:
            said = failure.get("message", "").strip().partition("\n")[0]
            row |= {"client": row["client"] or case.get("name"), "same": "", "remarks": f"failed: {said}"}
        found.rows.append(row)
    found.rows.sort(key=lambda row: (str(row["client"]), str(row["way"])))
    found.ratios = {"ways": len(found.rows), "failed": failed}
    return found


def _told(case: xml.Element) -> list[xml.Element]:
    return [one for one in case.iter("property") if str(one.get("name")).startswith("client.")]


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("reports", nargs="*", type=Path, metavar="FILE", help="of tests that were run before")
    return found


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
