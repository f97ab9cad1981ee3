"""The pages that are made of runs: of distillation, the quickstart's losses, faults, agents and tests."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from xml.sax.saxutils import quoteattr

import pytest
import torch

from benchmarks.common import page
from benchmarks.pretrained import bench_pretrained, plain_side
from benchmarks.quickstart import bench_distill, bench_losses
from benchmarks.quickstart.bench_distill import first_near, near_for_good
from benchmarks.quickstart.bench_losses import RUNS, result
from benchmarks.test_pages import agents_page, chaos_page, tests_page
from megarl.config import load_config, to_yaml
from megarl.trainer.algorithm import make_algorithm


def write_rows(folder: Path, rows: list[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- distillation


def test_both_begin_with_one_policy_and_write_equally_many_completions() -> None:
    configs = [load_config([*bench_distill.words(name)[1:], *bench_distill.QUICK])[0] for name in bench_distill.RUNS]
    assert len({config.model.path for config in configs}) == 1
    assert {config.data.train_batch_size * config.rollout.n for config in configs} == {512}
    assert len({config.trainer.run_dir for config in configs}) == 2


@pytest.mark.parametrize(
    ("teacher", "first", "for_good"), [(0.92, 4, 4), (0.9, 2, 2), (0.93, 4, None), (0.95, None, None), (0.4, 0, 0)]
)
def test_near_is_two_hundredths_below_once_or_to_the_end(
    teacher: float, first: int | None, for_good: int | None
) -> None:
    curve = ([0, 2, 4, 6], [0.4, 0.88, 0.91, 0.9])
    assert (first_near(curve, teacher), near_for_good(curve, teacher)) == (first, for_good)
    assert near_for_good(([0, 2, 4, 6], [0.4, 0.92, 0.8, 0.92]), 0.92) == 6


def test_the_page_has_both_and_the_iterations_of_what_came_near(tmp_path: Path) -> None:
    for name, gain in (("distillation", 0.02), ("GRPO", 0.001)):
        folder = tmp_path / f"bench_{bench_distill.RUNS[name]}"
        folder.mkdir()
        write_rows(folder, [{"step": step, "val/score": 0.5 + gain * step} for step in range(0, 22, 2)])
    found = bench_distill.result(tmp_path, 0.8)
    keys = ("first iteration near the teacher", "for good", "optimizer steps in one")
    assert [[row[key] for key in keys] for row in found.rows] == [[14, 14, 16], ["none", "none", 2]]
    assert found.ratios == {"accuracy_teacher": 0.8, "iterations_distillation": 14}


# ---- the quickstart's losses


def test_each_run_has_a_loss_and_an_estimator_of_its_own() -> None:
    all_words = [bench_losses.words(name)[1:] for name in RUNS]
    configs = [load_config([*words, *bench_losses.QUICK])[0] for words in all_words]
    assert {config.trainer.total_training_steps for config in configs} == {6}
    assert len({make_algorithm(config).actor.loss.policy_loss for config in configs}) == len(RUNS)
    assert len({config.algorithm.adv_estimator for config in configs}) == len(RUNS)


def test_the_picture_and_the_page_show_every_run(tmp_path: Path) -> None:
    numbers = {"accuracy_before": 0.4, "accuracy_after": 0.95, "accuracy_transformers": 0.95}
    for rank, name in enumerate(RUNS):
        folder = tmp_path / name
        folder.mkdir()
        config, _ = load_config(bench_losses.words(name)[1:])
        (folder / "config.yaml").write_text(to_yaml(config))
        write_rows(folder, [{"step": step, "val/score": 0.4 + 0.01 * (step - rank)} for step in (0, 30, 60)])
        (folder / "summary.json").write_text(json.dumps({**numbers, "pushes": 61, "pushes_verified": 61}))
    found = result(tmp_path)
    assert [row["run"] for row in found.rows] == list(RUNS) and found.ratios["accuracy_quickstart"] == 0.95
    files = page.save(found, tmp_path / "out")
    text, picture = files[1].read_text(), files[2]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "| cispo_rloo | cispo | rloo | 0.4 | 0.95 | 0.95 | 61 | 61 |" in text
    assert f"![accuracy]({picture.name})" in text


# ---- a pretrained model


def test_the_runs_of_a_pretrained_model_and_their_control_are_in_one_picture(tmp_path: Path) -> None:
    summary = {"accuracy_before": 0.1, "accuracy_transformers": 0.9, "steps": 8, "pushes": 9, "pushes_verified": 9}
    for name in bench_pretrained.RUNS:
        folder = Path("pretrained/runs", name)
        folder.mkdir(parents=True)
        after = 0.02 if name == "shuffled" else 0.9
        if name != "dpo":
            write_rows(folder, [{"step": 0, "val/score": 0.1}, {"step": 8, "val/score": after}])
        own = {"steps": 8} if name == "dpo" else {**summary, "accuracy_after": after}
        (folder / "summary.json").write_text(json.dumps({**own, "wall_s": 120.0}))
    asked = Path("pretrained/runs/dpo_test/evaluations/1/summary.json")
    asked.parent.mkdir(parents=True)
    asked.write_text(json.dumps({"accuracy": 0.9}))
    found = page.Result("pretrained", "cpu", {})
    bench_pretrained.curves(found)
    assert found.ratios == {f"accuracy_{name}": 0.02 if name == "shuffled" else 0.9 for name in bench_pretrained.RUNS}
    assert [row["minutes"] for row in found.rows] == [2.0] * 6
    assert {row["accuracy_before"] for row in found.rows} == {0.1}
    files = page.save(found, tmp_path / "out")
    assert files[2].read_bytes()[:4] == b"\x89PNG" and f"![accuracy]({files[2].name})" in files[1].read_text()


def test_the_plain_loop_learns_by_a_step_for_all_answers_up_to_their_ends() -> None:
    """Two answers of three tokens, of which the first ends after one: the gradient, written out by hand."""
    logits = torch.nn.Parameter(torch.zeros(4))

    def model(input_ids: torch.Tensor, logits_to_keep: int, **_: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=logits.expand(len(input_ids), logits_to_keep, -1))

    model.parameters = lambda: [logits]
    optimizer = torch.optim.SGD([logits], lr=0.1)
    ids = torch.tensor([[1, 3, 2, 2], [1, 2, 0, 0]])
    plain_side._update(model, optimizer, ids, torch.ones(2, 1, dtype=torch.int64), torch.tensor([[1.0], [-1.0]]), 3)
    # -(A / 4) (onehot - 1/4), for token 3 with A = 1 and for tokens 2, 0 and 0 with A = -1
    rows = torch.eye(4)
    wanted = sum(a * (rows[t] - 0.25) for a, t in ((1, 3), (-1, 2), (-1, 0), (-1, 0))) / 4
    torch.testing.assert_close(logits.data, 0.1 * wanted)


# ---- faults, and the tests


def report_of(folder: Path, *cases: str) -> Path:
    """A report as pytest writes it."""
    file = folder / "tests.xml"
    file.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return file


def test_the_page_of_faults_has_a_row_for_each_and_counts_what_was_lost(tmp_path: Path) -> None:
    strikes = [
        {"fault": "rank killed", "stage": "gen", "step": 3, "noticed_s": 1.0, "recovered_s": 9.04},
        {"fault": "rank killed", "stage": "values", "step": 5, "noticed_s": None, "recovered_s": 20.0},
        {"fault": "line torn", "stage": "gen", "step": 8, "noticed_s": 2.0, "recovered_s": 4.0},
    ]
    visits = {"outcomes": {"trained": 40, "lost": 1}, "twice": [7], "missing": []}
    value = quoteattr(json.dumps({"strikes": strikes, "visits": visits}))
    said = f'<testcase name="a"><properties><property name="chaos" value={value}/></properties></testcase>'
    found = chaos_page.result([report_of(tmp_path, '<testcase name="other"/>', said)], ["on a loaded machine"])
    assert "on a loaded machine" in found.notes
    torn, killed = found.rows
    assert (torn["fault"], killed["fault"]) == ("line torn", "rank killed")
    assert (killed["struck"], killed["in"], killed["noticed, median s"]) == (2, "gen, values", 1.0)
    assert (killed["recovered, median s"], killed["recovered, max s"]) == (14.5, 20.0)
    assert (found.ratios["faults"], found.ratios["samples lost"], found.ratios["visits trained twice"]) == (3, 1, 1)
    failed = report_of(tmp_path, '<testcase name="test_a_run"><failure>lost</failure></testcase>')
    with pytest.raises(ValueError, match="test_a_run: the test failed; expected one that passed"):
        chaos_page.result([failed])


def test_the_page_of_agents_has_a_row_for_each_way_of_a_client_and_says_what_failed(tmp_path: Path) -> None:
    def case(name: str, inside: str = "", **cells: object) -> str:
        told = (f'<property name="client.{key}" value={quoteattr(json.dumps(cells[key]))}/>' for key in cells)
        return f'<testcase name="{name}">{inside}<properties>{"".join(told)}</properties></testcase>'

    failure = '<failure message="AssertionError: no answer&#10;assert 1 == 0"/>'
    found = agents_page.result(
        [
            report_of(
                tmp_path,
                case("test_b", client="openai", version="3.1", way="chat", turns=3, rows=1, same="yes"),
                case("test_a", failure, client="ag2", version="1.2", way="chat"),
                case("test_that_tells_nothing"),
                case("test_other", failure),
            )
        ]
    )
    failed = {"version": "1.2", "way": "chat", "remarks": "failed: AssertionError: no answer"}
    assert [{key: value for key, value in row.items() if value} for row in found.rows] == [
        {"client": "ag2", **failed},
        {"client": "openai", "version": "3.1", "way": "chat", "turns": 3, "rows": 1, "same": "yes"},
        {"client": "test_other", "remarks": failed["remarks"]},
    ]
    assert found.ratios == {"ways": 3, "failed": 2}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    failed = '<testcase classname="tests.dist.test_push" name="test_b" time="5.0"><failure message="no"/></testcase>'
    passed = '<testcase classname="tests.dist.test_push" name="test_a[x]" time="3.0"/>'
    return report_of(tmp_path, passed, failed, '<testcase classname="tests.test_cli" name="test_c" time="0.5"/>')


def test_the_page_of_tests_has_a_row_for_each_file_and_a_line_for_each_failure(report: Path) -> None:
    found = tests_page.result(report, "-m long")
    assert found.rows == [
        {"file": "tests/dist/test_push.py", "tests": 2, "failed": 1, "seconds": 8.0, "longest": 5.0},
        {"file": "tests/test_cli.py", "tests": 1, "failed": 0, "seconds": 0.5, "longest": 0.5},
    ]
    assert found.notes == ["failed: tests/dist/test_push.py::test_b"]
    assert found.ratios == {"all tests": 3, "all failed": 1}
    assert found.configuration == {"command": "launch/test.sh -m long"}


@pytest.mark.parametrize(("code", "is_made"), [(0, True), (1, True), (5, False)], ids=["passed", "failed", "none ran"])
def test_a_page_is_made_of_tests_that_came_to_their_end(
    code: int, is_made: bool, report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def stand_in(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[2:])
        return subprocess.CompletedProcess(command, code)

    parser = tests_page.parser
    monkeypatch.setattr(tests_page, "REPORT", report)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", stand_in)
        if is_made:
            assert tests_page.work(parser().parse_args(["-m", "long"])) is not None
        else:
            assert page.run(tests_page.work, parser(), ["-m", "long", "--out", str(tmp_path)]) == 2
    assert asked == [["-m", "long"]]
