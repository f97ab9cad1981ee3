"""What every benchmark ends with: a table on the terminal, a page and its numbers in a folder, and one line of JSON.

A script makes a Result of what it measured; hardware, versions, commit, date and load are added here.

    def work(options) -> Result: ...
    if __name__ == "__main__":
        raise SystemExit(run(work, parser()))
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.machine import commit, hardware, slug, versions

ROOT = Path(__file__).parents[2]  # of the repository
RESULTS = ROOT / "benchmarks" / "results"
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
DEVICES = ("cpu", "cuda")
KEYS = ("theme", "title", "date", "device", "hardware", "versions", "commit", "load", "configuration", "rows", "notes")
PICTURE = "PICTURE"  # in a page: the name of its picture
TOOK = "took_s"  # stored results of before do not say it
FAULTS = (ValueError, RuntimeError, OSError, subprocess.SubprocessError)  # told as one sentence
QUIET_LOAD, QUIET_S = 0.3, 600.0


@dataclass
class Result:
    """What a script measured.  Rows may differ in their keys; a cell that a row does not have stays empty."""

    theme: str  # the first part of the files' names
    device: str  # cpu | cuda
    configuration: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)  # what the benchmark is there to say, printed last
    notes: list[str] = field(default_factory=list)
    title: str = ""
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    took_s: float = 0.0
    num_machines: int = 1
    draw: Callable[[Path], None] | None = None  # a picture beside the page
    failed: str = ""  # a sentence, where it is not what it has to be

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(key for row in self.rows for key in row))


Work = Callable[[argparse.Namespace], Result | None]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all scripts have; `doc`: the docstring of the script."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=DEVICES, default=found, help=f"what is measured (here by default {found})")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end, the ratios last")
    parser.add_argument("--quick", action="store_true", help="sizes that take seconds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the page and its numbers")
    return parser


def run(
    work: Work,
    parser: argparse.ArgumentParser,
    argv: list[str] | None = None,
    *,
    needs_quiet: Callable[[argparse.Namespace], bool] = lambda _: False,
) -> int:
    """Parse, measure, finish; a fault is one sentence and exit code 2.  `work` gives None if it printed itself.

    A result that has `failed` is written down as every other, and the exit code is 1.
    `needs_quiet`: by the options, whether to begin on a quiet machine; never with --quick.  Asked to end, it ends what
    it started first.
    """
    if argv is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = parser.parse_intermixed_args(argv)
    try:
        check_device(options.device)
        options.out.mkdir(parents=True, exist_ok=True)  # better refused now than after an hour
        not_quiet = wait_until_quiet() if needs_quiet(options) and not options.quick else ""
        load_before, begun = os.getloadavg()[0], time.perf_counter()
        result = work(options)
        if result is not None:
            result.load_before, result.took_s = load_before, time.perf_counter() - begun
            result.notes += [not_quiet] * bool(not_quiet)
            finish(result, options)
            if result.failed:
                sys.stderr.write(f"{result.failed}\n")
                return EXIT_FAILED
    except FAULTS as error:
        sys.stderr.write(f"error: {' '.join(str(error).split()) or type(error).__name__}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    return 0


def on_cpu(options: argparse.Namespace) -> bool:
    """For `run`: what is measured on a GPU does not wait for the machine's other cores."""
    return bool(options.device == "cpu")


def wait_until_quiet(limit_s: float = QUIET_S, pause_s: float = 5.0) -> str:
    """Wait for a low load; what is to be said of it, "" if the machine was quiet."""
    deadline = time.monotonic() + limit_s
    if os.getloadavg()[0] >= QUIET_LOAD:
        sys.stderr.write(f"waiting for a load below {QUIET_LOAD}, {limit_s:.0f} s at most\n")
    while (load := os.getloadavg()[0]) >= QUIET_LOAD:
        if time.monotonic() >= deadline:
            return f"the machine was not quiet after {limit_s:.0f} s of waiting: its load was {load:.1f}"
        time.sleep(pause_s)
    return ""


def in_rounds(work: Work) -> Work:
    """The work, measured --rounds times; its ratios are their medians, and its rows say of which round they are.

    A ratio that is missing in a round is left out.
    """

    def measured(options: argparse.Namespace) -> Result | None:
        if options.rounds < 1:
            raise ValueError(f"--rounds {options.rounds}: expected 1 or more")
        rounds = [work(options) for _ in range(1 if options.quick else options.rounds)]
        found = [result for result in rounds if result is not None]
        if len(found) < 2:
            return found[0] if found else None
        whole = found[0]
        whole.rows = [{"round": at, **row} for at, result in enumerate(found, start=1) for row in result.rows]
        names = [name for name in whole.ratios if all(name in result.ratios for result in found)]
        each = {name: [result.ratios[name] for result in found] for name in names}
        whole.notes = list(dict.fromkeys(note for result in found for note in result.notes))
        whole.notes += [f"{name}: {', '.join(cell(value) for value in values)}" for name, values in each.items()]
        whole.ratios = {name: statistics.median(values) for name, values in each.items()}
        whole.configuration = {**whole.configuration, "rounds": len(found)}
        return whole

    return measured


def with_rounds(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The option that `in_rounds` reads."""
    parser.add_argument("--rounds", type=int, default=3, help="measurements, whose median counts (3; 1 with --quick)")
    return parser


def check_device(device: str) -> None:
    """ValueError where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; expected --device cpu, or a machine with a GPU")


def finish(result: Result, options: argparse.Namespace) -> None:
    """Show it, write it down, and with --json say it in one last line."""
    if options.quick:
        result.theme += "_quick"  # no page to compare with
    console = terminal()
    show(console, result)
    files = save(result, options.out)
    for file in files:
        console.print(f"written: {file}", highlight=False, soft_wrap=True)
    if options.json:
        sys.stdout.write(json.dumps(numbers(result)) + "\n")
        sys.stdout.flush()


def terminal() -> Console:
    """A log takes the tables whole."""
    console = Console()
    return console if console.is_terminal else Console(width=150)


def save(result: Result, out: Path) -> list[Path]:
    """Write <theme>_<hardware>_<date>.json, .md and, of one that draws, .png; returns their paths.

    What is there stays: a second result of one day has "_2" behind it.
    """
    said = numbers(result)
    out.mkdir(parents=True, exist_ok=True)
    name = unused(out, f"{slug(result.theme)}_{slug(said['hardware'])}_{said['date']}")
    files = [out / f"{name}.json", out / f"{name}.md"]
    files[0].write_text(json.dumps(said, indent=2) + "\n")
    if result.draw is not None:
        files.append(out / f"{name}.png")
        result.draw(files[-1])
    files[1].write_text(markdown(result, said).replace(PICTURE, f"{name}.png"))
    return files


def unused(out: Path, name: str) -> str:
    """The name, or with the first number behind it that no file of `out` has."""
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    return next(each for each in names if not any((out / f"{each}{end}").exists() for end in (".json", ".md", ".png")))


def numbers(result: Result) -> dict[str, Any]:
    """All of it under KEYS, and behind them each ratio under its own name."""
    where = hardware(result.device)
    said: dict[str, Any] = {
        "theme": result.theme,
        "title": result.title or result.theme,
        "date": date.today().isoformat(),
        "device": result.device,
        "hardware": f"{result.num_machines} machines, each {where}" if result.num_machines > 1 else where,
        "versions": versions(),
        "commit": commit(),
        "load": f"{result.load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "configuration": result.configuration,
        "rows": result.rows,
        "notes": result.notes,
        TOOK: round(result.took_s, 1),
    }
    assert not set(said) & set(result.ratios), f"a ratio is called as one of {KEYS}"
    return said | result.ratios


def ratios_of(said: dict[str, Any]) -> dict[str, float]:
    """The ratios in what `numbers` gave, or a file of it has."""
    return {key: value for key, value in said.items() if key not in (*KEYS, TOOK)}


def show(console: Console, result: Result) -> None:
    """The table, the notes and the ratios on the terminal."""
    table = Table(title=result.title or None, title_justify="left")
    for name, right in _columns(result):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for cells in _cells(result):
        table.add_row(*cells)
    console.print(table)
    for line in (*result.notes, *(f"{name}: {cell(value)}" for name, value in result.ratios.items())):
        console.print(line, highlight=False, markup=False)


def markdown(result: Result, said: dict[str, Any]) -> str:
    """The page in results/; `said`: what `numbers` gave."""
    out = [f"# {said['title']}, {said['date']}", ""]
    out += [f"- {key}: {said[key]}" for key in ("hardware", "versions", "commit")]
    out += [f"- load average of the machine, which other work may have shared: {said['load']}"]
    out += [f"- it took {said[TOOK]:.0f} s"]
    out += [f"- {key}: {cell(value)}" for key, value in result.configuration.items()]
    columns = _columns(result)
    if columns:
        out += [
            "",
            _line(name for name, _ in columns),
            _line("---:" if right else "---" for _, right in columns),
        ]
        out += [_line(cells) for cells in _cells(result)]
    if result.notes:
        out += ["", *(f"- {note}" for note in result.notes)]
    if result.ratios:
        out += ["", "| ratio | |", "| --- | ---: |", *(_line((k, cell(v))) for k, v in result.ratios.items())]
    return "\n".join(out) + "\n"


def cell(value: Any) -> str:
    """A value as a page has it: four digits that matter, thousands apart."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"{value}"
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1e4):
        return f"{int(value):,}" if abs(value) >= 1e5 else f"{int(value)}"
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _columns(result: Result) -> list[tuple[str, bool]]:
    """Names, and whether all that is in the column are numbers."""
    return [
        (name, all(isinstance(row.get(name, 0), (int, float)) or row[name] is None for row in result.rows))
        for name in result.columns
    ]


def _cells(result: Result) -> list[list[str]]:
    return [[cell(row.get(name)) for name in result.columns] for row in result.rows]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
