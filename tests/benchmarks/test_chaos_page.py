import json
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
from chaos_page import parser, result


def test_the_page_has_a_row_for_each_fault_and_counts_what_was_lost(tmp_path: Path) -> None:
    strikes = [
        {"fault": "rank killed", "stage": "gen", "step": 3, "noticed_s": 1.0, "recovered_s": 9.04},
        {"fault": "rank killed", "stage": "values", "step": 5, "noticed_s": None, "recovered_s": 20.0},
        {"fault": "line torn", "stage": "gen", "step": 8, "noticed_s": 2.0, "recovered_s": 4.0},
    ]
    visits = {"outcomes": {"trained": 40, "lost": 1}, "twice": [7], "missing": []}
    value = quoteattr(json.dumps({"strikes": strikes, "visits": visits}))
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase name="other"/><testcase name="test_a_run"><properties>'
        f'<property name="chaos" value={value}/></properties></testcase></testsuite></testsuites>'
    )
    found = result([tmp_path / "tests.xml"], ["on a loaded machine"])
    assert "on a loaded machine" in found.notes
    assert [row["fault"] for row in found.rows] == ["line torn", "rank killed"]
    killed = found.rows[1]
    assert (killed["struck"], killed["in"], killed["noticed, median s"]) == (2, "gen, values", 1.0)
    assert (killed["recovered, median s"], killed["recovered, max s"]) == (14.5, 20.0)
    assert (found.ratios["faults"], found.ratios["samples lost"], found.ratios["visits trained twice"]) == (3, 1, 1)


def test_a_test_that_failed_makes_no_page(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase name="test_a_run"><failure>lost</failure></testcase></testsuite></testsuites>'
    )
    with pytest.raises(ValueError, match="test_a_run: the test failed; expected one that passed"):
        result([tmp_path / "tests.xml"])


def test_the_default_is_the_sample_of_ci() -> None:
    assert parser().parse_args([]).marker == "slow"
