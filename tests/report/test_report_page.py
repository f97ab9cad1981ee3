"""`megarl report`, and the page at the end of a run: what it holds, and that it takes no run down."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_cases import HOSTILE, run_folder

from megarl.cli import main
from megarl.report import page
from megarl.report.page import reported, write_report


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def data_in(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_a_page_holds_a_runs_text_as_data_only(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    html = write_report(run).read_text()
    elements = Elements()
    elements.feed(html)
    assert elements.tags.count("script") == 3 and "img" not in elements.tags
    data = data_in(html)
    assert data["advice"] == [{"step": 7, "advice": f"entropy: {HOSTILE}"}]
    assert data["samples"][0]["samples"][0]["completion"] == f"46 {HOSTILE}"  # type: ignore[index]
    assert data["rollbacks"] == [{"step": 4, "bad_step": 6, "what": "the loss is NaN"}]
    assert data["seconds"] == 78.0  # of 40 steps of 2 s, from the first to the last
    assert len(html) < 6_000_000


def test_a_mark_of_the_page_in_a_runs_text_is_text(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", name="@SCRIPT@ @DATA@ @PLOTLY@")
    assert data_in(write_report(run).read_text())["name"] == "@SCRIPT@ @DATA@ @PLOTLY@"


def test_the_command_writes_the_page_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = run_folder(tmp_path / "run"), run_folder(tmp_path / "other", name="other", lr=1e-5)
    assert main(["report", str(run), "--against", str(other)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    data = data_in((run / "report.html").read_text())
    assert data["other"] == "other"
    assert not (other / "report.html").exists()
    again = run_folder(tmp_path / "again")
    assert data_in(write_report(run, again).read_text())["other"] == str(again), "both are called the same"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "nowhere: no metrics.jsonl there; expected the folder of a run"),
        ([], "expected the folder of one run"),
        (["a", "b"], "megarl report a b: expected the folder of one run"),
        (["a", "--against"], "expected the folder of another run"),
        (["a", "--to=b"], "there is no option --to; expected --against RUN"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_the_end_of_a_run_makes_its_page(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with reported(run):
        pass
    assert data_in((run / "report.html").read_text())["failure"] == ""


def test_a_run_that_stops_has_the_reason_on_its_page(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with pytest.raises(ValueError), reported(run):
        raise ValueError("a mistake in the settings")
    assert not (run / "report.html").exists(), "it added nothing to the run that was there"
    with pytest.raises(RuntimeError), reported(run):
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9}\n')
        raise RuntimeError("rank 1 ended")
    assert data_in((run / "report.html").read_text())["failure"] == "rank 1 ended"


def test_ctrl_c_does_not_wait_for_a_page(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), reported(run):
        raise KeyboardInterrupt
    assert not (run / "report.html").exists()


def test_a_page_that_fails_is_one_line_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path / "run")
    (run / "samples.jsonl").write_text('{"step": 1}\n')  # as another version of megarl may have written it
    with reported(run):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {run}/report.html could not be written: KeyError")
    monkeypatch.setattr(page, "write_report", lambda *_, **__: pytest.fail("a run without metrics has no page"))
    with reported(tmp_path / "nothing"):
        pass
