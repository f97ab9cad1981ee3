"""Reads files into rows; each row knows its file and line, for error messages."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple

# Rows of a parquet file that become one batch.  Arrow cannot hold 2 GB of nested text in one; then rows come alone.
_BATCHES = (256, 1)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Record(NamedTuple):
    """One row of a file.  Example: Record("train.jsonl:3", {"prompt": "12+34=", "ground_truth": "46"})."""

    where: str  # file:line of a JSONL file, file:row (from 1) of the other kinds
    fields: dict[str, Any]
    has_gaps: bool = False  # null may stand for a field of an object that only other rows have: Arrow's columns


def read_jsonl(path: Path) -> Iterator[Record]:
    """One JSON object per line; empty lines are skipped."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8, or nested thousands of times
                raise ValueError(f"{where}: not JSON ({error}); expected one JSON object a line") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{where}: a JSON {type(fields).__name__}; expected one JSON object a line")
            if _SURROGATE.search(line):
                _check_is_unicode(where, fields)
            yield Record(where, fields)


def _check_is_unicode(where: str, fields: dict[str, Any]) -> None:
    r"""Raises ValueError for half of a surrogate pair, which JSON can write (\\ud800) and no tokenizer takes."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{where}: it holds {half} alone, half of a character; expected Unicode text") from None


def read_parquet(path: Path) -> Iterator[Record]:
    """The rows of a parquet file, read in batches."""
    from pyarrow import ArrowException, ArrowNotImplementedError, parquet  # slow import, only needed for such files

    number = 0  # of rows that were read
    for size in _BATCHES:
        try:
            for batch in islice(parquet.ParquetFile(path).iter_batches(size), number // size, None):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}:{number}", fields, has_gaps=True)
            return
        except ArrowNotImplementedError as error:
            if size == _BATCHES[-1]:
                raise ValueError(f"{path}:{number + 1}: Arrow cannot read this row ({_line(error)})") from None
        except (ArrowException, OSError, ValueError) as error:
            raise ValueError(f"{path}: not a parquet file, or a damaged one ({_line(error)})") from None


def read_dataset_folder(path: Path) -> Iterator[Record]:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote."""
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise ValueError(f"{path}: a folder of several splits; name one of them ({splits})")
    if not (path / "dataset_info.json").exists():
        raise ValueError(f"{path}: not a folder of `datasets.save_to_disk` (it has no dataset_info.json)")
    from datasets import load_from_disk  # slow import, only needed for such folders

    try:
        for number, fields in enumerate(load_from_disk(str(path)), start=1):
            yield Record(f"{path}:{number}", dict(fields), has_gaps=True)
    except Exception as error:  # a damaged folder: `datasets` raises whatever its contents lead to
        raise ValueError(f"{path}: `datasets` cannot load this folder ({_line(error)})") from error


def read_rows(files: str | Sequence[str], kinds: Mapping[str, Any]) -> list[Record]:
    """All rows of these files in order.  `kinds`: readers by file extension, as data.FILE_KINDS.

    Raises ValueError, naming the file, for one that is missing, of an unknown kind, or without rows.
    """
    rows: list[Record] = []
    for path in paths_of(files):
        suffix = path.suffix.lower() if _is_file(path) else ""
        if suffix not in kinds or (suffix == "" and not path.is_dir()):
            raise ValueError(f"{path}: unknown kind of file; expected .jsonl, .json (JSON lines), .parquet or a folder")
        before = len(rows)
        rows.extend(kinds[suffix](path))
        if len(rows) == before:
            raise ValueError(f"{path}: no rows")
    return rows


def missing(files: Sequence[str]) -> Iterator[str]:
    """One sentence for each of these files that is not there."""
    for path in paths_of(files):
        try:
            _is_file(path)
        except ValueError as error:
            yield str(error)


def _is_file(path: Path) -> bool:
    """Raises ValueError for what is neither a file nor a folder: nothing at all, a pipe, a device."""
    try:
        mode = path.stat().st_mode
        is_there = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    except (OSError, ValueError):  # not there, or no name of a file
        is_there = False
    if not is_there:
        raise ValueError(f"{path}: no such file or folder; expected a .jsonl or .parquet file, or a `datasets` folder")
    return stat.S_ISREG(mode)


def _line(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def paths_of(files: str | Sequence[str]) -> list[Path]:
    """One name or several, as paths."""
    return [Path(expanduser(name)) for name in ([files] if isinstance(files, str) else files)]


def content_digest(files: str | Sequence[str]) -> str:
    """16 hexadecimal digits that depend on the bytes of the files, not on their paths."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths_of(files):
        parts = sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
        for part in parts:
            with part.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()
