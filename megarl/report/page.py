"""Makes the page: one HTML file that holds the data of a run, plotly.js, and a policy that lets nothing else in or out.

plotly.js is part of the package `plotly`; the page holds it compressed (2 MB in place of 5), and the browser unpacks
it.  The page's Content-Security-Policy names the digests of the two scripts, and forbids every request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.metrics.trackers.console import warn
from megarl.report.curves import groups_of, stages_of
from megarl.report.folder import METRICS, RunFolder
from megarl.report.samples import samples_of, timeline_of, tokens_of
from megarl.report.settings import settings_of

REPORT = "report.html"
FACTS = {
    "model": ("model", "path"),
    "loss": ("algorithm", "policy_loss_fn"),
    "advantages": ("algorithm", "adv_estimator"),
    "engine": ("rollout", "engine"),
    "device": ("trainer", "device"),
}
_HERE = Path(__file__).parent


def write_report(run: Path, against: Path | None = None, failure: str = "") -> Path:
    """Write `report.html` into the folder of a run; returns its path.  `failure`: the sentence with which it stopped.

    Raises: ValueError, one sentence, for a folder without metrics.
    """
    target = run / REPORT
    part = target.with_name(f"{REPORT}.part")
    part.write_text(page(data_of(RunFolder(run), RunFolder(against) if against else None, failure)), encoding="utf-8")
    os.replace(part, target)
    return target


@contextmanager
def reported(run: Path) -> Iterator[None]:
    """Write the report at the end of the block, also if it raises; a report that fails is one line of warning.

    Not after Ctrl-C or SIGTERM, which should end a run soon, nor of a run that has added no metrics.
    """
    before = _size_of(run / METRICS)
    try:
        yield
    except Exception as error:
        if _size_of(run / METRICS) != before:
            _try_to_write(run, str(error) or type(error).__name__)
        raise
    if (run / METRICS).is_file():
        _try_to_write(run)


def _size_of(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _try_to_write(run: Path, failure: str = "") -> None:
    try:
        write_report(run, failure=failure)
    except Exception as error:  # of whatever kind: it must not take a run's result
        warn(f"{run / REPORT} could not be written: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def data_of(run: RunFolder, against: RunFolder | None = None, failure: str = "") -> dict[str, Any]:
    """All that a page shows, as JSON."""
    for folder in (run, against):
        if folder is not None:
            folder.require_metrics()
    other_config = against.config if against else {}
    return {
        "name": run.name,
        "recipe": run.config.get("trainer", {}).get("recipe"),
        "other": _name_beside(against, run) if against else None,
        "made_by": f"megarl {__version__}",
        "seconds": run.seconds,
        "status": run.status,
        "summary": run.summary,
        "failure": failure,
        "facts": _facts(run.config),
        "groups": groups_of(run.series, against.series if against else {}),
        "time": stages_of(run.series),
        "timeline": timeline_of(run.timeline()),
        "samples": samples_of(run.samples()),
        "tokens": tokens_of(run.tokens()),
        "settings": settings_of(run.config, other_config),
        "advice": run.advice(),
        "rollbacks": [{name: row[name] for name in ("step", "bad_step", "what")} for row in run.rollbacks()],
    }


def _name_beside(other: RunFolder, run: RunFolder) -> str:
    """The name of the other run, or its folder if both have the same name."""
    return other.name if other.name != run.name else str(other.path)


def _facts(config: Mapping[str, Any]) -> dict[str, str]:
    """What the page's head says of the run."""
    found = {name: config.get(group, {}).get(key) for name, (group, key) in FACTS.items()}
    return {name: str(value) for name, value in found.items() if value}


def page(data: dict[str, Any]) -> str:
    """The HTML of some data."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digests = " ".join(_digest(text) for text in (script, _plotly_js()))
    parts = {
        "@POLICY@": f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "@STYLE@": (_HERE / "page.css").read_text(encoding="utf-8"),
        "@PLOTLY@": _packed_plotly(),
        "@SCRIPT@": script,
        "@DATA@": _inert(json.dumps(data, ensure_ascii=False, separators=(",", ":"))),  # last: it may hold such words
    }
    text = (_HERE / "page.html").read_text(encoding="utf-8")
    for mark, content in parts.items():
        text = text.replace(mark, content, 1)
    return text


def _inert(text: str) -> str:
    """JSON that cannot end the element around it: it holds no `<`, and no `@` of a mark of the page."""
    return text.replace("<", "\\u003c").replace("@", "\\u0040")


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def _packed_plotly() -> str:
    return base64.b64encode(gzip.compress(_plotly_js().encode(), compresslevel=9, mtime=0)).decode()


@cache
def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs  # only needed at the end of a run

    return str(get_plotlyjs())
