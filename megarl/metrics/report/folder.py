"""Reads the folders of runs, finished or not, and picks some steps of their logs for a page of bounded size."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config.settings import read_yaml
from megarl.io.terminal import say
from megarl.metrics.reading.jsonl import ANSWERS, METRICS, Series, read_lines, read_series
from megarl.metrics.reading.status import STOPS, read_status

SWEEP = "sweep.json"  # in a folder with the folders of runs
CODE = "code.json"  # the files of rewards, plug-ins and agents, as they were when the run began
MAX_STEPS = 24  # of a page, the first and the last among them
MAX_PER_STEP = 16
MAX_TEXT = 4000  # characters of a prompt or an answer; the middle is left out
MAX_CHARS = 700_000  # of all samples of a page, again of those token by token, and again of the timeline
SHOWN = (
    *("uid", "ground_truth", "reward", "reward_extra", "finish_reason", "versions", "num_tokens", "num_turns"),
    "messages",  # of an episode; they are short already
)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Example: RunFolder(Path("runs/quickstart")).series["critic/score/mean"]; files that are not there are empty."""

    path: Path

    def require_metrics(self) -> None:
        """Raises ValueError, one sentence, for a folder without metrics."""
        if not (self.path / METRICS).is_file():
            if (self.path / ANSWERS).is_file():
                raise ValueError(
                    f"{self.path}: an evaluation has no curves; its numbers are in summary.json, its answers in "
                    "answers.jsonl; expected the folder of a run that trains, or of a sweep"
                )
            if self.status:
                raise ValueError(
                    f"{self.path}: the run has no {METRICS}, as it ended before its first step; "
                    f"megarl doctor --run {self.path} says why"
                )
            raise ValueError(f"{self.path}: no {METRICS} there; expected the folder of a run, such as runs/quickstart")

    @cached_property
    def series(self) -> Series:
        return read_series(self.path / METRICS) if (self.path / METRICS).is_file() else {}

    @cached_property
    def seconds(self) -> float:
        """From the first line of the metrics to the last."""
        times = [row["time"] for row in read_lines(self.path / METRICS) if "time" in row]
        return times[-1] - times[0] if times else 0.0

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The settings as the file has them, also of another version of megarl; {} without config.yaml."""
        file = self.path / "config.yaml"
        return read_yaml(file) if file.is_file() else {}

    @property
    def name(self) -> str:
        return self.config.get("trainer", {}).get("experiment_name") or self.path.resolve().name

    @property
    def summary(self) -> dict[str, Any]:
        """{} unless the run has finished."""
        return self._json("summary.json")

    @property
    def failure(self) -> str:
        """Why the run stopped; "" if it goes on, has finished, or was asked to stop."""
        end = self.status.get("end") or {"error": None}
        return "" if end["error"] in (None, *STOPS) else end["why"] or end["error"]

    @property
    def status(self) -> dict[str, Any]:
        return read_status(self.path) or {}

    @cached_property
    def code(self) -> dict[str, list[str]]:
        """The lines of each file of rewards, plug-ins and agents."""
        return {name: text.splitlines() for name, text in self._json(CODE).items()}

    def _json(self, name: str) -> dict[str, Any]:
        return read_object(self.path / name) if (self.path / name).is_file() else {}

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Of a log, such as samples.jsonl."""
        file = self.path / name
        return read_lines(file) if file.is_file() else iter(())


def runs_of(folder: Path) -> list[RunFolder]:
    """The run of this folder, or of a sweep those that have metrics.  Raises ValueError, one sentence, for no run."""
    if not (folder / SWEEP).is_file():
        RunFolder(folder).require_metrics()
        return [RunFolder(folder)]
    rows = read_object(folder / SWEEP)["runs"]
    found = [RunFolder(folder / Path(row["folder"]).name) for row in rows]
    runs = [run for run in found if (run.path / METRICS).is_file()]
    if not runs:
        raise ValueError(
            f"{folder}: none of the runs of {SWEEP} has {METRICS}; expected a sweep with a run that has begun"
        )
    if without := [run.path.name for run in found if run not in runs]:
        say(f"warning: {folder}: these runs have no {METRICS} and are not on the page: {', '.join(without)}")
    return runs


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file.  Raises ValueError that names the file."""
    try:
        return dict(json.loads(file.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: expected a JSON object, {error}") from error


def changed_files(names: Sequence[str], codes: Sequence[Mapping[str, list[str]]]) -> list[dict[str, Any]]:
    """What `code` of each run has otherwise than that of the first: [{"file", "what", "diff": [lines]}]."""
    found = []
    for name, code in zip(names[1:], codes[1:], strict=True):
        for file in sorted(codes[0].keys() | code.keys()):
            first, other = codes[0].get(file), code.get(file)
            if first == other:
                continue
            what = f"changed in {name}" if first and other else f"only in {name if first is None else names[0]}"
            diff = difflib.unified_diff(first or [], other or [], names[0], name, lineterm="")
            found.append({"file": file, "what": what, "diff": list(diff)})
    return found


def samples_of(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Lines of samples.jsonl -> [{"step", "samples": [...]}], steps that are spread evenly over the run."""
    return _steps_of(rows, _sample)


def tokens_of(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The same for lines of tokens.jsonl."""
    return _steps_of(rows, _tokens)


def timeline_of(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Lines of timeline.jsonl -> [{"step", "stages", "calls"}]."""
    steps = _steps_of(rows, lambda row: {name: row[name] for name in ("stages", "calls")})
    return [{"step": step["step"], **step["samples"][-1]} for step in steps]


def _steps_of(rows: Iterable[Row], shown: Callable[[Row], dict[str, Any]]) -> list[dict[str, Any]]:
    by_step: dict[int, list[Row]] = {}
    for row in rows:
        kept = by_step.setdefault(row["step"], [])
        if len(kept) < MAX_PER_STEP:
            kept.append(row)
    num_steps = MAX_STEPS
    while True:
        steps = spread(sorted(by_step), num_steps)
        page = [{"step": step, "samples": [shown(row) for row in by_step[step]]} for step in steps]
        if num_steps == 1 or len(json.dumps(page)) <= MAX_CHARS:
            return page
        num_steps = num_steps * 2 // 3


def spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of these at equal distances, the first and the last among them; all if there are no more."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(at * (len(items) - 1) / (count - 1))] for at in range(count)]


def cut(text: str) -> str:
    """A text of at most MAX_TEXT characters, and what was left out of its middle."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - MAX_TEXT} characters ...]\n{text[-half:]}"


def _sample(row: Row) -> dict[str, Any]:
    texts = {"prompt": cut(row["prompt"]), "completion": cut(row["completion"])}
    return texts | {name: row.get(name) for name in SHOWN}


def _tokens(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("uid", "reward", "rows")}
