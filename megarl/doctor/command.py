"""`megarl doctor`: a table, or one JSON object, of what a machine has and a run needs; or why a run failed."""

from __future__ import annotations

import json
import os
from typing import Any

from rich.markup import escape
from rich.table import Table

from megarl import __version__
from megarl.config import Config
from megarl.config.names import REWARDS_OF_CODE
from megarl.config.validate.rewards import names_of
from megarl.doctor import compute, link, machine, versions
from megarl.doctor.finding import FAIL, NOTE, OK, Finding
from megarl.doctor.request import Request
from megarl.doctor.run_folder import FAILED, KILLED, explain
from megarl.network.auth import needed_token
from megarl.sandbox.layers import URL, layers
from megarl.terminal import pages, sentences

_COLOURS = {OK: "green", NOTE: "yellow", FAIL: "red"}
EXIT_CANNOT_RUN = EXIT_FAILED = 1


def main(request: Request, config: Config) -> int:
    """Print the findings; 0 if the quickstart can run here, else 1.  With `listen`, answer peers until interrupted."""
    if request.listen is not None:
        link.serve(request.listen, _token("--listen", request.listen), lambda line: print(line, flush=True))
    token = _token("--peer", request.peer) if request.peer is not None else ""
    sections = examine(config)
    if request.peer is not None:
        sections["network"] = link.findings(request.peer, token)
    failed = [finding.subject for rows in sections.values() for finding in rows if finding.verdict == FAIL]
    if request.json:
        print(json.dumps(as_json(sections), indent=2))
    else:
        _show(sections, failed)
    return EXIT_CANNOT_RUN if failed else 0


def explain_run(request: Request) -> int:
    """0: the run goes on, has finished, or was asked to stop; 1: it failed or was killed."""
    assert request.run is not None, "a folder was given"
    found = explain(request.run)
    if request.json:
        print(json.dumps(found._asdict(), indent=2))
    else:
        console = sentences()
        lines = [f"{request.run}: {found.state}", f"cause: {found.cause}", f"next: {found.next}"]
        for line in [*lines, *(f"  {line}" for line in found.evidence)]:
            console.print(line)
    return EXIT_FAILED if found.state in (FAILED, KILLED) else 0


def examine(config: Config) -> dict[str, list[Finding]]:
    """All findings, by section, in the order of the table."""
    gpu = compute.accelerator(config.trainer.device)
    return {
        "trainer": versions.trainer_findings(has_gpu=bool(gpu.value)),
        "servers": versions.server_findings(config, has_gpu=bool(gpu.value)),
        "compute": [gpu, *compute.parts()],
        "machine": machine.findings(config),
        "sandbox": _sandbox(config),
    }


def as_json(sections: dict[str, list[Finding]]) -> dict[str, Any]:
    """{"megarl": "0.1.0", "can_run": true, "findings": {"trainer": [{"subject": "python", ...}, ...], ...}}"""
    can_run = all(finding.verdict != FAIL for rows in sections.values() for finding in rows)
    findings = {section: [row._asdict() for row in rows] for section, rows in sections.items()}
    return {"megarl": __version__, "can_run": can_run, "findings": findings}


def _token(option: str, place: link.Place) -> str:
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
