"""`megarl doctor`: a table, or one JSON object, of what a machine has and a run needs; or why a run failed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.markup import escape
from rich.table import Table

from megarl import __version__
from megarl.commands.doctor import machine, versions
from megarl.commands.doctor.machine import FAIL, NOTE, OK, Finding
from megarl.commands.doctor.run_folder import FAILED, KILLED, explain
from megarl.commands.this_machine import described_place
from megarl.config import Config, load_config
from megarl.config.names import REWARDS_OF_CODE
from megarl.config.validate.rewards import names_of
from megarl.io.auth import needed_token
from megarl.io.terminal import one_line, pages, say, sentences
from megarl.plugins.options import Options, Place, folder, place_of
from megarl_sandbox.layers import URL, layers

_COLOURS = {OK: "green", NOTE: "yellow", FAIL: "red"}
EXIT_CANNOT_RUN = EXIT_FAILED = 1


class Request(NamedTuple):
    json: bool
    run: Path | None  # the folder of a run that is to be explained; None: the machine
    listen: Place | None  # where peers measure the network to this machine
    peer: Place | None  # to which the network is measured
    settings: list[str]


def parse(words: Sequence[str]) -> Request:
    """The options among these words, and the settings.  Raises ValueError, one sentence, for words that are neither."""
    given, settings = OPTIONS.values_and_settings(words)
    request = Request(**given, settings=settings)
    others = [f"--{option}" for option in ("run", "listen", "peer") if given[option] is not None] + settings[:1]
    if request.listen and request.json:
        others.append("--json")
    if len(others) > 1 and (request.run or request.listen):
        OPTIONS.error(f"{others[0]} and {others[1]} exclude each other")
    return request


def main(request: Request) -> int:
    """Print the findings; 0 if the quickstart can run here, else 1.  With `listen`, answer peers until interrupted."""
    if request.run is not None:
        return explain_run(request.run, as_object=request.json)
    config, warnings = load_config(request.settings, command="doctor")
    for warning in warnings:
        say(f"warning: {warning}")
    place, mend = described_place(config, os.environ)
    if request.listen or request.peer:
        from megarl.commands.doctor import link  # with torch, which the options do not need
    if request.listen is not None:
        link.serve(request.listen, _token("--listen", request.listen), sentences().print)
    token = _token("--peer", request.peer) if request.peer is not None else ""
    sections = examine(config)
    verdict = NOTE if mend else OK
    sections["machine"].insert(0, Finding("place in a run", place, "optional: several machines", verdict, mend))
    if request.peer is not None:
        sections["network"] = link.findings(request.peer, token)
    failed = [finding.subject for rows in sections.values() for finding in rows if finding.verdict == FAIL]
    if request.json:
        print(json.dumps(as_json(sections), indent=2))
    else:
        _show(sections, failed)
    return EXIT_CANNOT_RUN if failed else 0


def explain_run(run: Path, *, as_object: bool) -> int:
    """Why a run ended.  0: it goes on, has finished, or was asked to stop; 1: it failed or was killed."""
    explanation = explain(run)
    if as_object:
        print(json.dumps(explanation._asdict(), indent=2))
    else:
        lines = [f"{run}: {explanation.state}", f"cause: {explanation.cause}", f"next: {explanation.next}"]
        for line in [*map(one_line, lines), *(f"  {one_line(line)}" for line in explanation.evidence)]:
            sentences().print(line)
    return EXIT_FAILED if explanation.state in (FAILED, KILLED) else 0


def examine(config: Config) -> dict[str, list[Finding]]:
    """All findings, by section, in the order of the table."""
    gpu = machine.accelerator(config.trainer.device)
    return {
        "trainer": versions.trainer_findings(has_gpu=bool(gpu.value)),
        "servers": versions.server_findings(config, has_gpu=bool(gpu.value)),
        "compute": [gpu, *machine.parts()],
        "machine": machine.findings(config),
        "sandbox": _sandbox(config),
    }


def as_json(sections: dict[str, list[Finding]]) -> dict[str, Any]:
    """{"megarl": VERSION, "can_run": true, "findings": {"trainer": [{"subject": "python", ...}, ...], ...}}"""
    can_run = all(finding.verdict != FAIL for rows in sections.values() for finding in rows)
    findings = {section: [row._asdict() for row in rows] for section, rows in sections.items()}
    return {"megarl": __version__, "can_run": can_run, "findings": findings}


def _token(option: str, place: Place) -> str:
    return needed_token(os.environ, f"megarl doctor {option} {place}")


def _show(sections: dict[str, list[Finding]], failed: list[str]) -> None:
    console = pages(markup=True)
    table = Table("", "found", "tested or wanted", "")
    for rows in sections.values():
        for row in rows:
            verdict = f"[{_COLOURS[row.verdict]}]{row.verdict}[/]"
            table.add_row(escape(row.subject), escape(row.found), escape(row.wanted), verdict)
        table.add_section()
    console.print(table)
    for row in (row for rows in sections.values() for row in rows if row.mend and row.verdict != OK):
        console.print(f"{row.subject}: {row.mend}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        console.print(f"[red]A run cannot start here:[/] {', '.join(failed)}.")
    else:
        console.print("[green]The quickstart can run here:[/] megarl train recipe=quickstart")


def _sandbox(config: Config) -> list[Finding]:
    """The layers that confine code of a model."""
    *parts, whole = layers()
    runs_code = [fn for fn in names_of(config) if fn in REWARDS_OF_CODE]
    is_wanted = bool(runs_code) and not config.reward.sandbox.startswith(URL)
    wanted = f"the reward {runs_code[0]} needs one" if is_wanted else "optional: reward.fn=code"
    verdict = OK if whole.is_there else FAIL if is_wanted else NOTE
    mend = "" if whole.is_there else "apt-get install bubblewrap"
    return [
        *(Finding(part.name, part.found, "optional: a layer of the sandbox", OK) for part in parts),
        Finding(whole.name, whole.found, wanted, verdict, mend),
    ]


OPTIONS = Options("doctor", "", [])  # its page is that of a command with settings
OPTIONS.add_argument("--json", action="store_true")
OPTIONS.add_argument("--run", type=folder)
OPTIONS.add_argument("--listen", type=place_of, metavar="ADDRESS:PORT")
OPTIONS.add_argument("--peer", type=place_of, metavar="ADDRESS:PORT")
