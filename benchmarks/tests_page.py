"""The page of a run of the tests: how many each file has, what became of them, and how long they took.

bash launch/test.sh -m long && python benchmarks/tests_page.py runs/tests.xml --what "tests marked long"
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as xml
from collections import defaultdict
from pathlib import Path

from page import Result, arguments, run


def work(options: argparse.Namespace) -> Result:
    """Reads the report of pytest, in the form of JUnit."""
    try:
        suite = next(xml.parse(options.report).getroot().iter("testsuite"))
    except (xml.ParseError, StopIteration) as error:
        raise ValueError(f"{options.report}: want a report that pytest --junit-xml wrote") from error
    files = defaultdict(list)
    for case in suite.iter("testcase"):
        files[case.get("classname", "").replace(".", "/") + ".py"].append(case)
    result = Result("tests", "cpu", {"tests": options.what}, title=f"A run of the tests: {options.what}")
    result.took_s = float(suite.get("time", 0))
    for name, cases in sorted(files.items()):
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        seconds = [float(case.get("time", 0)) for case in cases]
        result.rows.append(
            {"file": name, "tests": len(cases), "failed": len(failed), "seconds": sum(seconds), "longest": max(seconds)}
        )
        result.notes += [f"failed: {name}::{case.get('name')}" for case in failed]
    for total in ("tests", "failed"):
        result.ratios[f"all {total}"] = sum(row[total] for row in result.rows)
    return result


def parser() -> argparse.ArgumentParser:
    found = arguments(argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter))
    found.add_argument("report", type=Path, help="runs/tests.xml of launch/test.sh")
    found.add_argument("--what", default="all that launch/test.sh was asked for", help="which tests these were")
    return found


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
