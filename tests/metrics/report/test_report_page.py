"""`megarl report`, and the page at the end of a run: what it holds, as numbers worked out by hand."""

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_cases import HOSTILE, MESSAGES, run_folder, sample

from megarl.cli import main
from megarl.config import Config, load_config, resolved, to_yaml
from megarl.config.settings import read_yaml
from megarl.metrics.reading.status import end_noted, write_status
from megarl.metrics.report import curves, page
from megarl.metrics.report.curves import groups_of, stages_of, thinned
from megarl.metrics.report.folder import MAX_CHARS, MAX_TEXT, changed_files, cut, samples_of, spread
from megarl.metrics.report.meanings import meaning_of
from megarl.metrics.report.page import reported, write_report
from megarl.metrics.report.settings import settings_of


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def data_in(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_a_page_holds_a_runs_text_as_data_only(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", name="@SCRIPT@ @DATA@ @PLOTLY@")
    html = write_report(run).read_text()
    elements = Elements()
    elements.feed(html)
    assert elements.tags.count("script") == 3 and "img" not in elements.tags
    data = data_in(html)
    assert data["name"] == "@SCRIPT@ @DATA@ @PLOTLY@", "a mark of the page in a run's text is text"
    (shown,) = data["runs"]
    assert shown["advice"] == [{"step": 7, "advice": f"entropy: {HOSTILE}"}]
    assert data["samples"][0]["samples"][0]["completion"] == f"46 {HOSTILE}"
    assert shown["rollbacks"] == [{"step": 4, "bad_step": 6, "what": "the loss is NaN"}]
    assert shown["seconds"] == 78.0  # of 40 steps of 2 s, from the first to the last
    assert len(html) < 6_000_000


def names_in(folder: Path) -> list[str]:
    return [run["name"] for run in data_in((folder / "report.html").read_text())["runs"]]


def test_the_command_writes_the_page_of_several_runs_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, one, two = (run_folder(tmp_path / name, name=name) for name in ("run", "one", "two"))
    last = run_folder(tmp_path / "last" / "run", name="run", lr=1e-5)
    for words in (["--against", str(one), str(two)], ["--against", str(one), f"against={two}"]):
        assert main(["report", str(run), *words]) == 0
        assert str(run / "report.html") in capsys.readouterr().out
        assert names_in(run) == ["run", "one", "two"]
    assert not (one / "report.html").exists()
    write_report(run, [last])
    assert names_in(run) == [str(run), str(last)], "both are called the same"
    data = data_in((run / "report.html").read_text())
    assert "batch" not in data["facts"] and data["facts"]["kind"] == "reinforcement learning"


def test_a_sweep_is_the_runs_that_have_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [{"folder": f"elsewhere/lr={lr}"} for lr in (1, 2, 3)]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
    assert main(["report", str(tmp_path)]) == 2
    assert "none of the runs of sweep.json has metrics.jsonl" in capsys.readouterr().err
    for lr in (1, 3):
        run_folder(tmp_path / f"lr={lr}", name=f"lr={lr}")
    write_report(tmp_path / "lr=3")
    write_report(tmp_path)
    assert names_in(tmp_path) == ["lr=1", "lr=3"]
    data = data_in((tmp_path / "report.html").read_text())
    assert [run["page"] for run in data["runs"]] == [None, "lr=3/report.html"]


@pytest.mark.parametrize(
    ("stage", "fact"), [("dpo", ("beta", "0.1")), ("rm", ("batch", "64")), ("sft", ("batch", "64"))]
)
def test_the_head_has_the_facts_of_what_is_trained(tmp_path: Path, stage: str, fact: tuple[str, str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, f"{stage}/loss": 0.7}) + "\n")
    (tmp_path / "config.yaml").write_text(to_yaml(resolved(Config())))
    facts = data_in(write_report(tmp_path).read_text())["facts"]
    assert fact in facts.items() and not {"advantages", "engine"} & facts.keys()


def test_files_that_are_not_the_first_runs_are_shown_with_what_has_changed() -> None:
    codes = [
        {"reward.py": ["a", "b"], "same.py": ["x"]},
        {"reward.py": ["a", "c"], "same.py": ["x"]},
        {"same.py": ["x"]},
    ]
    changed, gone = changed_files(["A", "B", "C"], codes)
    assert changed == {
        "file": "reward.py",
        "what": "changed in B",
        "diff": ["--- A", "+++ B", "@@ -1,2 +1,2 @@", " a", "-b", "+c"],
    }
    assert (gone["what"], gone["diff"][-2:]) == ("only in A", ["-a", "-b"])


def test_what_a_metric_means_is_read_from_the_page_of_the_loss_layer() -> None:
    what, how = meaning_of("critic/vf_clipfrac")
    assert what == "share of values with an active clip" and how.startswith("well below 0.3")
    assert (
        meaning_of("rollout_corr/ess/age_5_8") == meaning_of("rollout_corr/ess/age_1") != meaning_of("rollout_corr/ess")
    )
    assert meaning_of("rm/margin") == meaning_of("val/margin") != []
    assert meaning_of("my/own") == []


def test_a_folder_without_metrics_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "nowhere"]) == 2
    assert "nowhere: no metrics.jsonl there; expected the folder of a run" in capsys.readouterr().err
    (tmp_path / "answers.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert "an evaluation has no curves; its numbers are in summary.json" in capsys.readouterr().err


def test_the_end_of_a_run_makes_its_page_with_the_reason_for_which_it_stopped(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    for error in (ValueError("a mistake in the settings"), KeyboardInterrupt()):  # Ctrl-C does not wait for a page
        with pytest.raises(type(error)), reported(run):
            raise error
        assert not (run / "report.html").exists(), "it added nothing to the run that was there"
    with reported(run):
        pass
    assert data_in((run / "report.html").read_text())["runs"][0]["failure"] == ""
    write_status(run, {"step": 8, "total_steps": 40, "stage": "gen"})
    with pytest.raises(RuntimeError), reported(run), end_noted(run):
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9}\n')
        raise RuntimeError("rank 1 ended")
    assert data_in((run / "report.html").read_text())["runs"][0]["failure"] == "rank 1 ended"
    write_report(run)
    assert data_in((run / "report.html").read_text())["runs"][0]["failure"] == "rank 1 ended", "and again, later"
    with pytest.raises(ValueError, match="it is named 2 times; expected each run once"):
        write_report(run, [run])


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


def test_a_long_curve_keeps_its_peaks(monkeypatch):
    monkeypatch.setattr(curves, "MAX_POINTS", 4)
    steps, values = thinned(range(10, 20), [0, 9, 1, 1, 1, 2, 2, 2, -5, 2])
    assert (steps, values) == ([10, 11, 15, 18], [0, 9, 2, -5])
    assert thinned([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_every_metric_has_one_panel_and_what_is_always_zero_is_put_away():
    series = {
        "actor/entropy": ([1, 2], [0.123456, float("nan")]),
        "critic/vf_loss": ([1, 2], [0.0, 0.0]),
        "my/own": ([1], [7.0]),
        "timing_s/gen": ([1], [1.0]),
    }
    training, rest = groups_of([series, {"actor/entropy": ([1], [0.5]), "actor/lr": ([1], [0.1])}])
    assert (training["title"], training["open"], rest["open"]) == ("Training", True, False)
    (entropy,), (rate,) = (panel["curves"] for panel in training["panels"])
    assert (entropy["name"], entropy["exact"]) == ("actor/entropy", False)
    assert entropy["runs"] == [{"x": [1, 2], "y": [0.12346, None]}, {"x": [1], "y": [0.5]}]
    assert (rate["exact"], rate["runs"]) == (True, [None, {"x": [1], "y": [0.1]}])
    assert [panel["title"] for panel in rest["panels"]] == ["critic/vf_loss", "my/own"]


def test_the_stages_of_a_step_add_up_to_it():
    series = {
        "timing_s/gen": ([1, 2], [0.5, 0.5]),
        "timing_s/save_checkpoint": ([2], [2.0]),  # not of every step
        "timing_s/push/send": ([1, 2], [0.1, 0.1]),  # a part of another stage
        "timing_s/step": ([1, 2], [1.0, 4.0]),
        "perf/unaccounted": ([1, 2], [0.5, 0.375]),
    }
    assert stages_of(series) == {
        "steps": [1, 2],
        "stages": [
            {"name": "save_checkpoint", "s": [0.0, 2.0]},
            {"name": "unaccounted", "s": [0.5, 1.5]},
            {"name": "gen", "s": [0.5, 0.5]},
        ],
    }


def test_samples_are_of_steps_all_over_the_run_and_bounded():
    assert spread([1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert spread([1, 2], 3) == [1, 2]
    assert spread([1, 2, 3], 1) == [3]
    assert cut("x" * MAX_TEXT) == "x" * MAX_TEXT
    long = cut("a" * MAX_TEXT + "b" * 10)
    assert long.endswith("a" * 10 + "b" * 10) and "[... 10 characters ...]" in long
    rows = [sample(step, at, completion="z" * 100_000) for step in range(1, 201) for at in range(20)]
    found = samples_of(rows)
    assert (found[0]["step"], found[-1]["step"]) == (1, 200)
    assert len(json.dumps(found)) <= MAX_CHARS
    (step,) = samples_of([sample(1, 0, messages=MESSAGES), sample(1, 1)])
    assert [each["messages"] for each in step["samples"]] == [MESSAGES, None], "what was said in an episode is kept"


def test_settings_that_follow_another_key_are_not_changed_ones(tmp_path):
    config, other = Config(), Config()
    config.actor.optim.lr, other.trainer.test_freq = 0.5, 3
    for name, written in (("a", config), ("b", other)):
        (tmp_path / f"{name}.yaml").write_text(to_yaml(resolved(written)))
    found = settings_of([read_yaml(tmp_path / "a.yaml"), read_yaml(tmp_path / "b.yaml")])
    rows = {row["key"]: row for row in found}
    lr = rows["actor.optim.lr"]
    assert lr["meaning"].startswith("peak learning rate") and lr["values"][0] == "0.5" and lr["changed"]
    assert [row["key"] for row in found if row["differs"]] == ["actor.optim.lr", "trainer.test_freq"]
    assert [row["key"] for row in found if row["changed"]] == ["actor.optim.lr", "trainer.test_freq"]
    assert rows["trainer.test_freq"]["values"][1] == "3"


def test_settings_of_a_run_stand_beside_those_of_its_recipe():
    config, _ = load_config(["recipe=quickstart_grpo", "rollout.n=3"])
    assert config.trainer.recipe == "quickstart_grpo"
    found = {row["key"]: row for row in settings_of([asdict(config)])}
    of_recipe = load_config(["recipe=quickstart_grpo"])[0].rollout.n
    assert (found["rollout.n"]["values"], found["rollout.n"]["recipe"]) == (["3"], str(of_recipe))
    own = {key for key, row in found.items() if row["own"]}
    assert own == {"rollout.n"}
    gone = settings_of([{"trainer": {"recipe": "no/such.yaml", "seed": 1}}])
    assert [(row["recipe"], row["own"]) for row in gone] == [(None, False)] * 2


@pytest.mark.parametrize("unknown", ["trainer.seed", "not.a.key", "actor.gone"])
def test_beside_a_run_without_settings_no_setting_differs_and_a_key_of_another_version_is_shown(unknown: str) -> None:
    group, _, name = unknown.partition(".")
    (row,) = settings_of([{group: {name: {}}}, {}])
    assert (row["key"], row["values"], row["changed"]) == (unknown, ["{}", None], unknown == "trainer.seed")
    assert not row["differs"]
