"""Runs the tests under chaos and makes the page of it: what struck, how soon it was noticed, and what was lost.

python benchmarks/test_pages/chaos_page.py                # the sample of CI
python benchmarks/test_pages/chaos_page.py -m long        # every fault three times, in long runs of PPO and agents
python benchmarks/test_pages/chaos_page.py a.xml b.xml    # of tests that were run before: their JUnit reports
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

from benchmarks.common.page import ROOT, Result, arguments, run

REPORT = ROOT / "runs" / "tests.xml"


def work(options: argparse.Namespace) -> Result:
    """Raises ValueError where a test failed: then there is an account of the faults before it only."""
    if options.reports:
        return result(options.reports, options.note)
    words = ["tests/chaos", "-n", "0", "-m", options.marker]
    code = subprocess.run(["bash", str(ROOT / "launch" / "test.sh"), *words]).returncode
    if code:
        raise ValueError(f"launch/test.sh {' '.join(words)}: exit code {code}, expected 0")
    return result([REPORT], options.note)


def result(reports: Sequence[Path], notes: Sequence[str] = ()) -> Result:
    """What the reports of tests, in the form of JUnit, say of the faults.  Raises ValueError where a test failed."""
    found = Result("chaos", "cpu", {}, title="Runs under chaos")
    totals = {"faults": 0, "survived": 0, "samples lost": 0, "visits trained twice": 0, "visits missing": 0}
    for case in (case for report in reports for case in xml.parse(report).getroot().iter("testcase")):
        if case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(f"{case.get('name')}: the test failed; expected one that passed")
        properties = {one.get("name"): json.loads(one.get("value", "")) for one in case.iter("property")}
        if "chaos" not in properties:
            continue
        strikes, visits = properties["chaos"]["strikes"], properties["chaos"]["visits"]
        found.configuration[f"seconds of {case.get('name')}"] = round(float(case.get("time", 0)))
        found.rows += [_row(str(case.get("name")), strikes, name) for name in sorted({one["fault"] for one in strikes})]
        totals["faults"] += len(strikes)
        totals["survived"] += len(strikes)
        totals["samples lost"] += visits["outcomes"]["lost"]
        totals["visits trained twice"] += len(visits["twice"])
        totals["visits missing"] += len(visits["missing"])
        found.notes.append(f"{case.get('name')}: visits {json.dumps(visits['outcomes'])}")
        if "accuracy" in properties:
            found.notes.append(f"{case.get('name')}: accuracy {json.dumps(properties['accuracy'])}")
    found.notes += notes
    found.notes.append("noticed: until the run said something about it; recovered: until a step that began after it")
    found.ratios = {name: float(count) for name, count in totals.items()}
    return found


def _row(test: str, strikes: list[dict[str, Any]], fault: str) -> dict[str, Any]:
    of_it = [one for one in strikes if one["fault"] == fault]
    noticed = [one["noticed_s"] for one in of_it if one["noticed_s"] is not None]
    recovered = [one["recovered_s"] for one in of_it]
    return {
        "test": test.removeprefix("test_"),
        "fault": fault,
        "struck": len(of_it),
        "in": ", ".join(sorted({one["stage"] for one in of_it})),
        "noticed, median s": round(median(noticed), 1) if noticed else None,
        "recovered, median s": round(median(recovered), 1),
        "recovered, max s": round(max(recovered), 1),
    }


def parser() -> argparse.ArgumentParser:
    found = arguments(__doc__)
    found.add_argument("reports", nargs="*", type=Path, metavar="FILE", help="of tests that were run before")
    found.add_argument("--note", action="append", default=[], metavar="TEXT", help="a line of the page")
    found.add_argument("-m", "--marker", default="full", metavar="MARKER", help="full or long; by default full")
    return found


if __name__ == "__main__":
    raise SystemExit(run(work, parser()))
