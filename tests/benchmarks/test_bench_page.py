"""What the benchmarks' pages share: the table, the files, the line of JSON, and how a mistake is told."""

import argparse
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.common import machine, page
from benchmarks.common.machine import commit, copy_bandwidth, hardware, matmul_rate, slug, versions
from benchmarks.common.page import Result, arguments, cell, markdown, numbers, ratios_of, run, save


def result() -> Result:
    rows = [{"way": "ours", "seconds": 1.25, "tokens": 4096}, {"way": "bare", "seconds": 1.2, "note": "alone"}]
    return Result("step", "cpu", {"tokens": 4096}, rows, {"step_vs_megatron": 0.975}, ["a note"], "A step")


def test_the_numbers_say_where_and_when_and_end_with_the_ratios() -> None:
    said = numbers(result())
    assert list(said)[-1] == "step_vs_megatron"
    assert ratios_of(said) == {"step_vs_megatron": 0.975}
    assert set(page.KEYS) <= set(said)
    assert said["hardware"] == hardware("cpu")
    assert "GPU" not in said["hardware"]
    several = result()
    several.num_machines = 8
    assert numbers(several)["hardware"] == f"8 machines, each {hardware('cpu')}"


def test_both_files_have_one_name_and_a_second_of_a_day_leaves_the_first(tmp_path: Path) -> None:
    of_numbers, of_page = save(result(), tmp_path / "new")
    assert of_numbers.stem == of_page.stem
    assert re.fullmatch(r"step_[a-z0-9_]+_\d{4}-\d\d-\d\d", of_page.stem)
    said = json.loads(of_numbers.read_text())
    assert of_page.read_text() == markdown(result(), said)
    assert said["rows"] == result().rows
    second, third = (save(result(), tmp_path / "new")[0] for _ in range(2))
    assert (second.name, third.name) == (f"{of_page.stem}_2.json", f"{of_page.stem}_3.json")


def test_it_waits_for_a_quiet_machine_and_says_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([2.0, 2.0, 0.5, 0.29])
    monkeypatch.setattr(page.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    assert page.wait_until_quiet(pause_s=0.0) == ""
    assert not list(loads), "it asked until the load was below 0.3"
    monkeypatch.setattr(page.os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert page.wait_until_quiet(limit_s=0.0).endswith("its load was 1.5")


def test_of_rounds_the_median_counts_and_every_row_says_of_which_it_is() -> None:
    ratios = iter([{"a": 3.0, "b": 1.0}, {"a": 1.0}, {"a": 2.0, "b": 1.0}])

    def work(_: argparse.Namespace) -> Result:
        return Result("step", "cpu", {}, [{"way": "ours"}], next(ratios))

    options = page.with_rounds(arguments("What it measures.")).parse_args([])
    found = page.in_rounds(work)(options)
    assert found is not None
    assert found.ratios == {"a": 2.0}, "b is missing in a round"
    assert found.rows == [{"round": at, "way": "ours"} for at in (1, 2, 3)]
    assert found.notes == ["a: 3, 1, 2"]
    ratios = iter([{"a": 3.0}])
    options = page.with_rounds(arguments("What it measures.")).parse_args(["--quick"])
    assert page.in_rounds(work)(options).ratios == {"a": 3.0}


def test_the_page_has_a_cell_for_each_row_and_column() -> None:
    text = markdown(result(), numbers(result()))
    assert "| way | seconds | tokens | note |\n| --- | ---: | ---: | --- |\n" in text
    assert "| ours | 1.25 | 4096 |  |" in text
    assert "| bare | 1.2 |  | alone |" in text
    assert "- tokens: 4096" in text and "| step_vs_megatron | 0.975 |" in text and "- a note" in text


def test_cells_keep_four_digits() -> None:
    values = {0.123456: "0.1235", 12345.6: "12,346", 4096: "4096", 1234567: "1,234,567", None: "", True: "True"}
    values |= {2e9: "2,000,000,000"}
    assert {value: cell(value) for value in values} == values


def test_a_script_ends_with_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments("What it measures.")
    assert run(lambda options: result(), parser, ["--device", "cpu", "--json", "--out", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last.items())[-1] == ("step_vs_megatron", 0.975)
    assert last["took_s"] >= 0 and last["theme"] == "step"
    assert len(list(tmp_path.iterdir())) == 2
    assert run(lambda options: result(), parser, ["--quick", "--out", str(tmp_path / "quick")]) == 0
    assert all(file.name.startswith("step_quick_") for file in (tmp_path / "quick").iterdir())


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (None, "--device cuda: torch sees no CUDA device; expected --device cpu"),
        (RuntimeError("a rank\n  died"), "a rank died"),
        (OSError("no space"), "no space"),
        (subprocess.CalledProcessError(3, ["pip"]), "Command '['pip']' returned non-zero exit status 3."),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    fault: Exception | None,
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def fails(options: argparse.Namespace) -> Result:
        assert options.out.is_dir(), "it is made before the work"
        assert fault is not None, "without the device there is no work"
        raise fault

    words = ["--device", "cpu" if fault else "cuda", "--out", str(tmp_path / "new")]
    assert run(fails, arguments("What it measures."), words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {told}") and said.count("\n") == 1


def test_the_machine_says_how_fast_it_multiplies_and_which_commit_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATRIX, "cpu", 256)
    threads = torch.get_num_threads()
    assert matmul_rate("cpu", repeats=1) > 0
    assert torch.get_num_threads() == threads
    assert re.fullmatch(r"[0-9a-f]{12}( and changes)?|unknown", commit())
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 1 << 20)
    assert copy_bandwidth("cpu", repeats=1) > 0


def test_the_machine_is_described_without_its_name() -> None:
    assert re.search(r", \d+ cores, \d+ GiB$", hardware())
    assert os.uname().nodename not in hardware()
    assert slug("AMD EPYC, 2 cores, 24 GiB") == "amd_epyc_2_cores_24_gib"
    assert re.match(r"Python 3\.\d+\.\d+, torch ", versions())
