"""Runs a list of checks, the rungs of a ladder, one after another in the time that there is, and keeps what they said.

    python launch/ladder.py launch/one_gpu.toml --list
    python launch/ladder.py launch/one_gpu.toml --minutes 9 --from step --out runs/one_gpu --python .venv/bin/python

A rung that fails or takes too long is written down, and the next one runs.  Each rung leaves NN_NAME.json and
NN_NAME.log in the folder, tests also NN_NAME.xml; `summary.md` has a line for each rung, also of earlier calls with
the same folder.  At the end, also when the time is up or the ladder is interrupted, FOLDER.tar.gz has all of it except
large files.

Exit code: 0 if all rungs that ran passed, 1 if one did not, 2 for a wrong word, 130 if interrupted.  Needs Python 3.11
and no package; the rungs run with --python.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO
from xml.etree import ElementTree

from gpu_processes import on_gpus, wait_for_gpus

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 10.0  # from the request to end to the kill
GPU_FREE_S = 30.0  # for the driver to free the memory of killed processes
LAST_LINES = 40
ARCHIVED = {".md", ".log", ".json", ".jsonl", ".xml", ".txt", ".png", ".gz"}
ARCHIVED_BYTES = 4_000_000  # of a file: larger ones stay behind
PASSED = "passed"
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


@dataclass(frozen=True)
class Rung:
    """One check.  `needs` and the commands may contain {python}, {out} (the folder) and {page} (out/NN_NAME)."""

    name: str
    seconds: float  # limit of all its commands
    about: str
    commands: tuple[str, ...]  # run in this order until one fails
    needs: str = ""  # a command; if it fails, the rung is not run, and the last line that it prints is the reason


@dataclass(frozen=True)
class Page:
    """What a rung left behind; NN_NAME.json has these fields."""

    name: str
    about: str
    verdict: str  # PASSED, or what happened instead
    seconds: float = 0.0
    limit_s: float = 0.0
    commands: tuple[str, ...] = ()
    tests: str = ""
    last_lines: tuple[str, ...] = ()

    @property
    def ran(self) -> bool:
        return bool(self.commands)


def read_ladder(file: Path) -> list[Rung]:
    """The rungs of a TOML file.  Raises ValueError for a name that occurs twice."""
    rungs = [Rung(**{**row, "commands": tuple(row["commands"])}) for row in tomllib.loads(file.read_text())["rung"]]
    twice = [name for name, count in Counter(rung.name for rung in rungs).items() if count > 1]
    if twice:
        raise ValueError(f"{file}: rung {twice[0]}: expected each name once")
    return rungs


class Ladder:
    """Runs rungs, and writes their pages into a folder."""

    def __init__(self, rungs: list[Rung], out: Path, python: str, minutes: float | None) -> None:
        self.rungs, self.out, self.python = rungs, out, python
        self.deadline = time.monotonic() + (60 * minutes if minutes is not None else float("inf"))
        self.failed = False

    def run(self, first: str | None) -> int:
        """Run the rungs from `first` on; returns the exit code."""
        names = [rung.name for rung in self.rungs]
        start = names.index(first) if first else 0
        self.out.mkdir(parents=True, exist_ok=True)
        interrupted = False
        try:
            for rung in self.rungs[start:]:
                before = on_gpus()
                page = self._run(rung)
                self._keep(rung, page)
                if page.ran and page.verdict != PASSED and not wait_for_gpus(before, self._left(GPU_FREE_S)):
                    print(f"{rung.name}: processes that began with it still hold GPU memory", flush=True)
        except KeyboardInterrupt:
            interrupted = True
        archive(self.out)
        print(f"{self.out}/summary.md has a line for each rung; {self.out}.tar.gz has everything", flush=True)
        return EXIT_INTERRUPTED if interrupted else int(self.failed)

    def _left(self, seconds: float) -> float:
        """As many seconds, or what is left of the ladder's time."""
        return min(seconds, self.deadline - time.monotonic())

    def _page(self, rung: Rung) -> Path:
        """The path of the rung's files, without their endings."""
        return self.out / f"{self.rungs.index(rung) + 1:02}_{rung.name}"

    def _words(self, rung: Rung, command: str) -> list[str]:
        known = {"python": self.python, "out": str(self.out), "page": str(self._page(rung))}
        return [word.format(**known) for word in shlex.split(command)]

    def _run(self, rung: Rung) -> Page:
        page, begun = Page(rung.name, rung.about, PASSED), time.monotonic()
        limit = self._left(rung.seconds)
        if limit < 1:
            return replace(page, verdict="not run: the time was up")
        print(f"{rung.name}: {rung.about} (at most {limit:.0f} s)", flush=True)
        log, junit = (self._page(rung).with_suffix(end) for end in (".log", ".xml"))
        junit.unlink(missing_ok=True)
        commands = [self._words(rung, command) for command in rung.commands]
        with log.open("wb") as out:
            if rung.needs and run_command(self._words(rung, rung.needs), out, limit) != 0:
                return replace(page, verdict=f"not run: {(last_lines(log) or ('',))[-1]}")
            try:
                for words in commands:
                    out.write(f"$ {shlex.join(words)}\n".encode())
                    out.flush()
                    status = run_command(words, out, limit - (time.monotonic() - begun))
                    if status != 0:
                        page = replace(page, verdict=self._failure(rung, status, limit))
                        break
            except KeyboardInterrupt:
                page = replace(page, verdict="interrupted")
                self._keep(rung, self._told(page, commands, time.monotonic() - begun, limit, log, junit))
                raise
        return self._told(page, commands, time.monotonic() - begun, limit, log, junit)

    def _failure(self, rung: Rung, status: int | None, limit: float) -> str:
        if status is not None:
            return f"failed with exit status {status}"
        return f"ended after {limit:.0f} s, " + ("its limit" if limit == rung.seconds else "when the time was up")

    def _told(
        self, page: Page, commands: list[list[str]], seconds: float, limit: float, log: Path, junit: Path
    ) -> Page:
        tests = what_tests_say(junit)
        if page.verdict == PASSED and tests and not tests.num_run:
            page = replace(page, verdict="failed: every test was skipped")
        return replace(
            page,
            seconds=round(seconds, 1),
            limit_s=limit,
            commands=tuple(shlex.join(words) for words in commands),
            tests=str(tests or ""),
            last_lines=last_lines(log),
        )

    def _keep(self, rung: Rung, page: Page) -> None:
        """Write the rung's page, and the summary again."""
        self.failed |= page.ran and page.verdict != PASSED
        self._page(rung).with_suffix(".json").write_text(json.dumps(asdict(page), indent=1) + "\n")
        (self.out / "summary.md").write_text(self._summary())
        if page.ran:
            said = "; ".join(filter(None, (page.verdict, page.tests)))
            print(f"{rung.name}: {said}; {page.seconds:.0f} s", flush=True)
        else:
            print(f"{rung.name}: {page.verdict}", flush=True)

    def _summary(self) -> str:
        lines = ["| rung | what happened | tests | seconds | limit |", "| --- | --- | --- | ---: | ---: |"]
        for rung in self.rungs:
            file = self._page(rung).with_suffix(".json")
            said = json.loads(file.read_text()) if file.exists() else asdict(Page(rung.name, rung.about, "not run"))
            cells = (rung.name, said["verdict"], said["tests"], said["seconds"] or "", f"{rung.seconds:g}")
            lines.append(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |")
        return "\n".join(lines) + "\n"


def run_command(words: Sequence[str], log: IO[bytes], limit_s: float) -> int | None:
    """Run words, which write to `log`; returns the exit status, or None if they were ended after `limit_s`.

    Afterwards no process of its group is left.  126 if the words cannot be started.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONWARNINGS": "ignore", **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    try:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        log.write(f"{error}\n".encode())
        return 126
    ended = False
    try:
        ended = wait(process.pid, limit_s)
    finally:
        if not ended:
            os.killpg(process.pid, signal.SIGTERM)
            wait(process.pid, GRACE_S)
        # Also what it left behind.  It is not reaped yet, so no other group can have its number.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode if ended else None


def wait(pid: int, limit_s: float) -> bool:
    """Whether the child ends within `limit_s`; it is not reaped."""
    deadline = time.monotonic() + limit_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def last_lines(log: Path) -> tuple[str, ...]:
    """The last lines of a log, without those that are empty."""
    lines = log.read_bytes()[-64_000:].decode(errors="replace").splitlines()
    return tuple(line[:500] for line in lines if line.strip())[-LAST_LINES:]


@dataclass(frozen=True)
class Tests:
    """Numbers of a junit file, and how many tests each reason has skipped."""

    num_run: int
    num_failed: int
    skipped: Counter[str]

    def __str__(self) -> str:
        reasons = [f"{count} skipped: {reason}" for reason, count in self.skipped.items()]
        return ", ".join([f"{self.num_run} run, {self.num_failed} failed", *reasons])


def what_tests_say(junit: Path) -> Tests | None:
    """Of the file that pytest writes at its end; None if it did not come to that."""
    try:
        cases = list(ElementTree.parse(junit).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return None
    skipped = Counter(skip.get("message", "") for case in cases for skip in case.findall("skipped"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    return Tests(len(cases) - skipped.total(), failed, skipped)


def archive(folder: Path) -> Path:
    """Pack the pages, logs and junit files of a folder into FOLDER.tar.gz; models and other large files stay behind."""
    packed = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(packed, "w:gz") as tar:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.suffix in ARCHIVED and file.stat().st_size <= ARCHIVED_BYTES:
                tar.add(file, f"{folder.name}/{file.relative_to(folder)}")
    return packed


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("ladder", type=Path, help="a TOML file with the rungs")
    parser.add_argument("--list", action="store_true", help="print the rungs, run none")
    parser.add_argument("--minutes", type=float, help="no rung runs longer than this after the start")
    parser.add_argument("--from", dest="first", metavar="RUNG", help="begin with this rung")
    parser.add_argument("--out", type=Path, help="folder of the pages (default: runs/ and the name of the ladder)")
    parser.add_argument("--python", default=sys.executable, help="the Python of the rungs (default: this one)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        rungs = read_ladder(options.ladder)
        names = [rung.name for rung in rungs]
        if options.first not in (None, *names):
            raise ValueError(f"--from {options.first}: expected one of {', '.join(names)}")
        if options.minutes is not None and options.minutes <= 0:
            raise ValueError(f"--minutes {options.minutes:g}: expected more than 0")
        if (python := shutil.which(options.python)) is None:
            raise ValueError(f"--python {options.python}: expected a Python that can be started")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if options.list:
        for rung in rungs:
            print(f"{rung.name:<{max(map(len, names))}}  {rung.seconds:>5g} s  {rung.about}")
        return 0
    out = options.out or ROOT / "runs" / options.ladder.stem
    return Ladder(rungs, out.resolve(), os.path.abspath(python), options.minutes).run(options.first)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
