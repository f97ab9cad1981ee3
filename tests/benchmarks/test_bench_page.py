"""What the benchmarks' pages share: the table, the files, the line of JSON, and how a mistake is told."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import machine
import page
import pytest
import torch
from machine import commit, hardware, matmul_rate
from page import Result, arguments, cell, markdown, numbers, ratios_of, run, save


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


def test_both_files_have_one_name_and_the_same_numbers(tmp_path: Path) -> None:
    of_numbers, of_page = save(result(), tmp_path / "new")
    assert of_numbers.stem == of_page.stem
    assert re.fullmatch(r"step_[a-z0-9_]+_\d{4}-\d\d-\d\d", of_page.stem)
    said = json.loads(of_numbers.read_text())
    assert of_page.read_text() == markdown(result(), said)
    assert said["rows"] == result().rows


def test_a_second_result_of_a_day_leaves_the_first(tmp_path: Path) -> None:
    first, second, third = (save(result(), tmp_path)[0] for _ in range(3))
    assert (second.name, third.name) == (f"{first.stem}_2.json", f"{first.stem}_3.json")
    assert len(list(tmp_path.iterdir())) == 6


def test_a_picture_stands_beside_its_page(tmp_path: Path) -> None:
    drawn = result()
    drawn.draw, drawn.own_page = (lambda file: file.write_text("x")), f"![]({page.PICTURE})"
    save(drawn, tmp_path)
    of_numbers, of_page, of_picture = save(drawn, tmp_path)
    assert of_picture.exists() and of_page.read_text() == f"![]({of_numbers.stem}.png)"


def test_it_waits_for_a_quiet_machine_and_says_when_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([2.0, 2.0, 0.5, 0.29])
    monkeypatch.setattr(page.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    assert page.wait_until_quiet(pause_s=0.0) == ""
    assert not list(loads), "it asked until the load was below 0.3"
    monkeypatch.setattr(page.os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert page.wait_until_quiet(limit_s=0.0).endswith("its load was 1.5")


def test_the_load_of_a_page_is_that_on_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [2.0]

    def quiet() -> str:
        loads.append(0.1)
        return ""

    monkeypatch.setattr(page.os, "getloadavg", lambda: (loads[-1], 0.0, 0.0))
    monkeypatch.setattr(page, "wait_until_quiet", quiet)
    words = ["--device", "cpu", "--out", str(tmp_path)]
    assert run(lambda _: result(), arguments(argparse.ArgumentParser()), words, needs_quiet=page.on_cpu) == 0
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())["load"].startswith("0.1 before")


def test_of_rounds_the_median_counts_and_every_row_says_of_which_it_is() -> None:
    ratios = iter([{"a": 3.0, "b": 1.0}, {"a": 1.0}, {"a": 2.0, "b": 1.0}])

    def work(_: argparse.Namespace) -> Result:
        return Result("step", "cpu", {}, [{"way": "ours"}], next(ratios))

    options = page.with_rounds(arguments(argparse.ArgumentParser())).parse_args([])
    found = page.in_rounds(work)(options)
    assert found is not None
    assert found.ratios == {"a": 2.0}, "b is missing in a round"
    assert found.rows == [{"round": at, "way": "ours"} for at in (1, 2, 3)]
    assert found.notes == ["a: 3, 1, 2"]
    ratios = iter([{"a": 3.0}])
    options = page.with_rounds(arguments(argparse.ArgumentParser())).parse_args(["--quick"])
    assert page.in_rounds(work)(options).ratios == {"a": 3.0}


def test_the_hardware_of_several_machines_says_so() -> None:
    several = result()
    several.num_machines = 8
    assert numbers(several)["hardware"] == f"8 machines, each {hardware('cpu')}"


def test_the_page_has_a_cell_for_each_row_and_column() -> None:
    text = markdown(result(), numbers(result()))
    assert "| way | seconds | tokens | note |\n| --- | ---: | ---: | --- |\n" in text
    assert "| ours | 1.25 | 4096 |  |" in text
    assert "| bare | 1.2 |  | alone |" in text
    assert "- tokens: 4096" in text and "| step_vs_megatron | 0.975 |" in text and "- a note" in text


def test_cells_keep_four_digits() -> None:
    values = {
        0.123456: "0.1235",
        12345.6: "12,346",
        4096: "4096",
        1234567: "1,234,567",
        None: "",
        True: "True",
        2e9: "2,000,000,000",
    }
    assert {value: cell(value) for value in values} == values


def test_a_script_ends_with_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments(argparse.ArgumentParser())
    assert run(lambda options: result(), parser, ["--device", "cpu", "--json", "--out", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(last.items())[-1] == ("step_vs_megatron", 0.975)
    assert last["took_s"] >= 0 and last["theme"] == "step"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_quick_run_is_no_page_of_the_theme(tmp_path: Path) -> None:
    assert run(lambda options: result(), arguments(argparse.ArgumentParser()), ["--quick", "--out", str(tmp_path)]) == 0
    assert all(file.name.startswith("step_quick_") for file in tmp_path.iterdir())


def test_a_mistake_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = arguments(argparse.ArgumentParser())
    assert run(lambda options: result(), parser, ["--device", "cuda", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: --device cuda: torch sees no CUDA device; expected") and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (RuntimeError("a rank\n  died"), "a rank died"),
        (OSError("no space"), "no space"),
        (subprocess.CalledProcessError(3, ["pip"]), "Command '['pip']' returned non-zero exit status 3."),
    ],
)
def test_what_goes_wrong_outside_is_one_sentence_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: Exception, told: str
) -> None:
    def fails(options: argparse.Namespace) -> Result:
        assert options.out.is_dir(), "it is made before the work"
        raise fault

    assert run(fails, arguments(argparse.ArgumentParser()), ["--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == f"error: {told}\n"


def test_asked_to_end_a_script_ends_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu", "--out", str(tmp_path)])

    def work(options: argparse.Namespace) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    try:
        assert run(work, arguments(argparse.ArgumentParser())) == page.EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "interrupted\n"


def test_the_machine_says_how_fast_it_multiplies_and_which_commit_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATRIX, "cpu", 256)
    threads = torch.get_num_threads()
    assert matmul_rate("cpu", repeats=1) > 0
    assert torch.get_num_threads() == threads
    assert re.fullmatch(r"[0-9a-f]{12}( and changes)?|unknown", commit())
