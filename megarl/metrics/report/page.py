"""Makes the page: one HTML file that holds the data of runs, plotly.js, and a policy that lets nothing else in or out.

plotly.js is part of the package `plotly`; the page holds it compressed (2 MB in place of 5), and the browser unpacks
it.  The page's Content-Security-Policy names the digests of the two scripts, and forbids every request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from megarl import __version__
from megarl.config.settings import show
from megarl.io.terminal import say, sentences
from megarl.metrics.reading.jsonl import ADVICE, METRICS, ROLLBACKS, SAMPLES, TIMELINE, TOKENS
from megarl.metrics.report.curves import groups_of, stages_of
from megarl.metrics.report.folder import SWEEP, RunFolder, changed_files, runs_of, samples_of, timeline_of, tokens_of
from megarl.metrics.report.settings import settings_of
from megarl.plugins.options import Options, folder

REPORT = "report.html"
_ROWS = {"rows": ("sft", "train_files"), "batch": ("sft", "batch_size")}
FACTS = {  # of the page's head, by what a run trains
    "policy": {
        "loss": ("algorithm", "policy_loss_fn"),
        "advantages": ("algorithm", "adv_estimator"),
        "reward": ("reward", "fn"),
        "engine": ("rollout", "engine"),
    },
    "sft": _ROWS,
    "rm": _ROWS,
    "dpo": {"loss": ("dpo", "loss"), "beta": ("dpo", "beta"), **_ROWS},
}
KINDS = {"sft": "supervised training", "rm": "reward model", "dpo": "DPO on pairs", "policy": "reinforcement learning"}
_HERE = Path(__file__).parent


class Request(NamedTuple):
    run: Path
    against: Sequence[Path]


def parse(words: Sequence[str]) -> Request:
    """Raises ValueError, one sentence, for words that are no request."""
    return Request(**OPTIONS.values(words))


def main(request: Request) -> int:
    """`megarl report`: write the page and print where it is.  Raises ValueError for a folder without metrics."""
    target = write_report(request.run, request.against)
    sentences().print(f"report: {target.resolve()}")
    return 0


def write_report(run: Path, against: Sequence[Path] = ()) -> Path:
    """Write `report.html` into the folder of a run or sweep; returns its path.

    `against`: others that are shown beside it.
    Raises: ValueError, one sentence, for a folder without metrics, and for a run that is named twice.
    """
    runs = [each for folder in (run, *against) for each in runs_of(folder)]
    for place, times in Counter(each.path.resolve() for each in runs).items():
        if times > 1:
            raise ValueError(f"{place}: it is named {times} times; expected each run once")
    target = run / REPORT
    part = target.with_name(f"{REPORT}.part")
    part.write_text(page(data_of(runs, run)), encoding="utf-8")
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
    except Exception:
        if _size_of(run / METRICS) != before:
            _try_to_write(run)
        raise
    if (run / METRICS).is_file():
        _try_to_write(run)


def _size_of(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _try_to_write(run: Path) -> None:
    try:
        write_report(run)
    except Exception as error:  # of whatever kind: it must not take a run's result
        line = str(error).partition("\n")[0]
        say(f"warning: {run / REPORT} could not be written: {type(error).__name__}: {line}")


def data_of(runs: Sequence[RunFolder], home: Path) -> dict[str, Any]:
    """All that a page in the folder `home` shows of runs, as JSON; samples and times are the first one's."""
    first, names = runs[0], [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    facts = [_facts_of(run) for run in runs]
    return {
        "name": _title(home, names),
        "recipe": first.config.get("trainer", {}).get("recipe"),
        "runs": [
            {
                "name": name,
                "page": quote(os.path.relpath(page, home), safe="/=,") if run.path != home and page.is_file() else None,
                "seconds": run.seconds,
                "status": run.status,
                "summary": run.summary,
                "failure": run.failure,
                "advice": list(run.lines(ADVICE)),
                "rollbacks": [{key: row[key] for key in ("step", "bad_step", "what")} for row in run.lines(ROLLBACKS)],
            }
            for name, run, page in zip(names, runs, [run.path / REPORT for run in runs], strict=True)
        ],
        "made_by": f"megarl {__version__}",
        "facts": {name: value for name, value in facts[0].items() if all(each.get(name) == value for each in facts)},
        "groups": groups_of([run.series for run in runs]),
        "time": stages_of(first.series),
        "timeline": timeline_of(first.lines(TIMELINE)),
        "samples": samples_of(first.lines(SAMPLES)),
        "tokens": tokens_of(first.lines(TOKENS)),
        "settings": settings_of([run.config for run in runs]),
        "files": changed_files(names, [run.code for run in runs]),
    }


def _facts_of(run: RunFolder) -> dict[str, str]:
    kind = next((kind for kind in KINDS if f"{kind}/loss" in run.series), "policy")
    keys = {"model": ("model", "path"), **FACTS[kind], "device": ("trainer", "device")}
    found = {name: run.config.get(group, {}).get(key) for name, (group, key) in keys.items()}
    return {"kind": KINDS[kind]} | {name: show(value) for name, value in found.items() if value}


def _title(home: Path, names: Sequence[str]) -> str:
    if (home / SWEEP).is_file():
        return home.resolve().name
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


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
    """Writes report.html into a run's folder: one page that needs no network and no server. Every run of `megarl
train`, sft, rm and dpo writes it at its end; a run that goes on can be looked at too.""",
    [
        "megarl report runs/quickstart",
        "megarl report runs/quickstart --against runs/quickstart_again runs/quickstart_grpo",
        "megarl report runs/quickstart_sweep",
    ],
    usage="megarl report RUN [--against RUN ...]",
)
OPTIONS.add_argument("run", type=folder, help="the folder of a run, such as runs/quickstart, or of a sweep (train -m)")
OPTIONS.add_argument(
    "--against",
    type=folder,
    metavar="RUN",
    nargs="+",
    action="extend",
    default=[],
    help="runs or sweeps to show beside it",
)
