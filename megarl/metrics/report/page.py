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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megarl import __version__
from megarl.io.terminal import say, sentences
from megarl.metrics.reading.jsonl import ADVICE, METRICS, ROLLBACKS, SAMPLES, TIMELINE, TOKENS
from megarl.metrics.report.curves import groups_of, stages_of
from megarl.metrics.report.folder import RunFolder, samples_of, timeline_of, tokens_of
from megarl.metrics.report.settings import settings_of
from megarl.plugins.options import Options, folder

REPORT = "report.html"
FACTS = {
    "model": ("model", "path"),
    "loss": ("algorithm", "policy_loss_fn"),
    "advantages": ("algorithm", "adv_estimator"),
    "engine": ("rollout", "engine"),
    "device": ("trainer", "device"),
}
_HERE = Path(__file__).parent


class Request(NamedTuple):
    run: Path
    against: Path | None


def parse(words: Sequence[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    return Request(**OPTIONS.values(words))


def main(request: Request) -> int:
    """`megarl report`: write the page and print where it is.  Raises ValueError for a folder without metrics."""
    target = write_report(request.run, request.against)
    sentences().print(f"report: {target.resolve()}")
    return 0


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
        line = str(error).partition("\n")[0]
        say(f"warning: {run / REPORT} could not be written: {type(error).__name__}: {line}")


def data_of(run: RunFolder, against: RunFolder | None = None, failure: str = "") -> dict[str, Any]:
    """All that a page shows, as JSON."""
    for each in (run, against):
        if each is not None:
            each.require_metrics()
    facts = {name: run.config.get(group, {}).get(key) for name, (group, key) in FACTS.items()}
    is_namesake = against is not None and against.name == run.name
    return {
        "name": run.name,
        "recipe": run.config.get("trainer", {}).get("recipe"),
        "other": (str(against.path) if is_namesake else against.name) if against else None,
        "made_by": f"megarl {__version__}",
        "seconds": run.seconds,
        "status": run.status,
        "summary": run.summary,
        "failure": failure,
        "facts": {name: str(value) for name, value in facts.items() if value},  # of the page's head
        "groups": groups_of(run.series, against.series if against else {}),
        "time": stages_of(run.series),
        "timeline": timeline_of(run.lines(TIMELINE)),
        "samples": samples_of(run.lines(SAMPLES)),
        "tokens": tokens_of(run.lines(TOKENS)),
        "settings": settings_of(run.config, against.config if against else {}),
        "advice": list(run.lines(ADVICE)),
        "rollbacks": [{name: row[name] for name in ("step", "bad_step", "what")} for row in run.lines(ROLLBACKS)],
    }


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


OPTIONS = Options(
    "report",
    """Writes report.html into a run's folder: one page that needs no network and no server. Every run of `megarl train`
and `megarl sft` writes it at its end; a run that goes on can be looked at too.""",
    ["megarl report runs/quickstart", "megarl report runs/quickstart --against runs/quickstart_again"],
)
OPTIONS.add_argument("run", type=folder, help="the folder of a run, such as runs/quickstart")
OPTIONS.add_argument("--against", type=folder, metavar="RUN", help="another run, beside whose curves these are drawn")
