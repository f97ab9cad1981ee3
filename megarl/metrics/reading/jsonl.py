"""JSONL files of a run's folder: their names; appended during the run, truncated when it resumes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.io.durable_files import kept, write_bytes

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TOKENS = "tokens.jsonl"
TIMELINE = "timeline.jsonl"
VISITS = "visits.jsonl"  # {"step", "trained": [visits of prompts], "filtered": [...], "lost": [...], "skipped": [...]}
ADVICE = "advice.jsonl"
EVALUATED = "evaluations"  # folder of the folders 1, 2, ..., each of one `megarl evaluate`
ANSWERS = "answers.jsonl"  # in such a folder: every answer, as samples.jsonl has some of a training
ROLLBACKS = "rollbacks.jsonl"  # {"step": of the save, "bad_step", "what", "skipped": [visits]}

NO_METRICS = ("step", "time", "kind")  # of a line of METRICS; kind: train, or evaluation

Series = dict[str, tuple[list[int], list[float]]]  # metric -> steps, values

log = logging.getLogger(__name__)


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append all rows in one write, or nothing: what a full disk cut off is taken back, and a run waits for room.

    A number that is not finite becomes null, because JSON has no such number.
    """
    text = "".join(json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    kept(path, lambda: _append(path, text.encode()))


def _append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file.  An incomplete last line, which a killed run can leave, is ignored."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: expected one JSON object a line, {error}") from error
            yield row


class Followed:
    """The lines of a file that grows.  A file that was replaced, as by a run that resumes, is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file = 0

    def look(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file has begun anew, and the objects of its new whole lines; damaged ones are left out."""
        if not self._path.is_file():
            return self._reset(0), []
        with self._path.open("rb") as file:
            size, number = self._path.stat().st_size, self._path.stat().st_ino
            anew = self._reset(number) if number != self._file or size < self._offset else False
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return anew, [row for line in whole.splitlines(keepends=True) if (row := _row(line)) is not None]

    def _reset(self, number: int) -> bool:
        begun = self._offset > 0
        self._offset = 0
        self._file = number
        return begun


def drop_after(path: Path, step: int | None, also: Callable[[Mapping[str, Any]], bool] = lambda row: False) -> None:
    """Keep the lines up to `step`, which the resumed run will not write again; None keeps nothing.

    `also`: rows that are dropped too.  Lines that a power failure or another program has damaged are dropped with a
    warning: a run that can resume must not stop for its log.  The file is replaced atomically, when the
    new one is on the disk, so that an interruption loses nothing.
    """
    if not path.exists():
        return
    kept: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if step is not None else (), 1):
        row = _row(line)
        if row is None:
            log.warning("%s:%d is no whole line with a step, and is left out", path, number)
        elif row["step"] <= step and not also(row):
            kept.append(line)
    write_bytes(path, b"".join(kept))


def _row(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if the line is damaged."""
    try:
        row = json.loads(line)
    except ValueError:  # no UTF-8, or no JSON
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int) else None


def plain(value: Any) -> Any:
    """The value as JSON can say it: a number that is not finite is None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def read_series(path: Path) -> Series:
    """Each metric with its steps; nulls are left out; if a step was logged twice, the last value counts."""
    by_step: dict[str, dict[int, float]] = {}
    for row in read_lines(path):
        for name, value in row.items():
            if name not in NO_METRICS and value is not None:
                by_step.setdefault(name, {})[row["step"]] = value
    return {name: (sorted(points), [points[s] for s in sorted(points)]) for name, points in by_step.items()}
