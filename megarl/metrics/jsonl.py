"""JSONL files of a run: appended during the run, truncated when it resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append all rows in one write.  A number that is not finite becomes null, because JSON has no such number."""
    text = "".join(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


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


def drop_after(path: Path, step: int | None) -> None:
    """Keep the lines up to `step`, which the resumed run will not write again; None keeps nothing.

    Each line has a "step".  The file is replaced atomically, so that an interruption loses nothing.
    """
    if not path.exists():
        return
    kept = [] if step is None else [row for row in read_lines(path) if row["step"] <= step]
    other = path.with_name(path.name + ".part")
    other.unlink(missing_ok=True)
    append_lines(other, kept)
    os.replace(other, path)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
