"""Runs tests and makes the page of it: how many each file has, what became of them, and how long they took.

python benchmarks/test_pages/tests_page.py -m long        # words for pytest, as launch/test.sh takes them
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import ROOT, Result, arguments, run

REPORT = ROOT / "runs" / "tests.xml"
TESTS_FAILED = 1  # pytest's exit code


def work(options: argparse.Namespace) -> Result:
    """Raises ValueError where pytest does not come to its end."""
    code = subprocess.run(["bash", str(ROOT / "launch" / "test.sh"), *options.words]).returncode
    if code not in (0, TESTS_FAILED):
        raise ValueError(f"launch/test.sh {' '.join(options.words)}: exit code {code}, expected 0 or {TESTS_FAILED}")
    return result(REPORT, " ".join(options.words))


def result(report: Path, words: str) -> Result:
    """What the report of a run, in the form of JUnit, says."""
    suite = next(xml.parse(report).getroot().iter("testsuite"))
    files = defaultdict(list)
    for case in suite.iter("testcase"):
        files[case.get("classname", "").replace(".", "/") + ".py"].append(case)
    found = Result("tests", "cpu", {"command": f"launch/test.sh {words}".strip()}, title="A run of the tests")
    for name, cases in sorted(files.items()):
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        seconds = [float(case.get("time", 0)) for case in cases]
        found.rows.append(
            {"file": name, "tests": len(cases), "failed": len(failed), "seconds": sum(seconds), "longest": max(seconds)}
        )
        found.notes += [f"failed: {name}::{case.get('name')}" for case in failed]
    for total in ("tests", "failed"):
        found.ratios[f"all {total}"] = sum(row[total] for row in found.rows)
    return found


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("-m", "--marker", dest="words", type=lambda word: ["-m", word], default=[], metavar="MARKER")
    return found


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
