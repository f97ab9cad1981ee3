"""Writes the table of model families into docs/parallelism.md, from what tests showed.

    python docs/write_families.py REPORT.xml ...            reports of pytest (--junit-xml), on either Python
    python docs/write_families.py --check REPORT.xml ...    ends with 1 if the table says more than these reports

A cell counts passed cases of the tests in PROOFS; a family or a layout is in the name of its case.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from megarl.arch.hf_config import SUPPORTED
from megarl.arch.model_types import OF_0_19

PAGE = Path(__file__).parent / "parallelism.md"
BEGIN, END = "<!-- families: docs/write_families.py -->\n", "<!-- /families -->\n"
HEADS = ("log-probs as transformers'", "gradients in layouts", "folders in layouts", "runs", "SGLang on a CPU", "MTP")
# For each column the tests (file, function) whose passed cases count.
PROOFS = (
    (("test_families_dist", "test_log_probs_equal_those_of_transformers"),),
    (
        ("test_expert_parity", "test_loss_gradient_and_steps_do_not_depend_on_the_layout"),
        ("test_expert_parity", "test_steps_of_a_sharded_optimizer_do_not_depend_on_the_layout"),
        ("test_parity", "test_columns_loss_gradient_and_steps_do_not_depend_on_the_layout"),
    ),
    (("test_families_dist", "test_every_rank_streams_what_the_folder_held_and_saves_it"),),
    (
        ("test_ring_families", "test_a_run_of_each_family_trains_the_weights_that_its_server_has"),
        ("test_ring_families", "test_a_run_over_all_ranks_goes_on_to_the_last_bit"),
    ),
    (("test_push_sglang", "test_"), ("test_ring_sglang", "test_"), ("test_adapter_sglang", "test_")),
    (("test_mtp", "test_"), ("test_ring_mtp", "test_")),
)
# Names of cases that are no model_type -> the family of which they are variants.
VARIANTS = {"llama2": "llama", "llama3": "llama", "mistral_nemo": "mistral"}
OF_ONE_FAMILY = dict.fromkeys(("test_parity", "test_ring_sglang"), "qwen3")  # files with cases that name none


def passed(report: Path) -> Iterator[tuple[str, str, str]]:
    """(file, function, case) of each test that passed."""
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(child.tag in ("failure", "error", "skipped") for child in case):
            function, _, name = case.get("name", "").partition("[")
            yield case.get("classname", "").rpartition(".")[2], function, name.removesuffix("]")


def family_of(case: str) -> str:
    """The family of a case; "" if it names none."""
    for word in re.split(r"[-/ ]", case):
        known = [kind for kind in SUPPORTED if word == kind or word.startswith(f"{kind}_")]
        if found := VARIANTS.get(word) or max(known, key=len, default=""):
            return found
    return ""


def counts(reports: list[Path]) -> dict[str, list[int]]:
    """Family -> the number of distinct passed cases of each column."""
    cases: dict[str, list[set[tuple[str, str]]]] = defaultdict(lambda: [set() for _ in PROOFS])
    for file, function, case in (found for report in reports for found in passed(report)):
        for column, tests in enumerate(PROOFS):
            if any(file == name and function.startswith(begin) for name, begin in tests):
                cases[family_of(case) or OF_ONE_FAMILY.get(file, "")][column].add((function, case))
    return {family: [len(found) for found in columns] for family, columns in cases.items()}


def table(found: dict[str, list[int]]) -> str:
    page = [f"| family | Megatron-Core | {' | '.join(HEADS)} |", f"| --- | --- |{' ---: |' * len(HEADS)}"]
    for family in SUPPORTED:
        core = "0.19.2" if family in OF_0_19 else "0.16.1, 0.19.2"
        row = " | ".join(str(number) if number else "" for number in found.get(family, [0] * len(HEADS)))
        page.append(f"| `{family}` | {core} | {row} |")
    return "\n".join(page) + "\n"


def said(page: str) -> dict[str, list[int]]:
    """What the page's table says."""
    rows = re.findall(r"^\| `(\w+)` \| [\d., ]+ \|(.*)\|$", page, re.MULTILINE)
    return {family: [int(cell.strip() or 0) for cell in cells.split("|")] for family, cells in rows}


def main(words: list[str]) -> int:
    reports = [Path(word) for word in words if word != "--check"]
    page, found = PAGE.read_text(), counts(reports)
    before, rest = page.split(BEGIN)
    own, after = rest.split(END)
    if "--check" not in words:
        PAGE.write_text(before + BEGIN + table(found) + END + after)
        return 0
    wrong = [
        f"{family}, {head}: the table says {number}, the reports {seen}"
        for family, numbers in said(own).items()
        for head, number, seen in zip(HEADS, numbers, found.get(family, [0] * len(HEADS)), strict=True)
        if number > seen
    ]
    print("\n".join(wrong) or f"{PAGE.name}: the table of families says what these reports show")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
