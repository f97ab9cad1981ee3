"""Reads files into rows; each row knows its file and line, for error messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Record(NamedTuple):
    """One row of a file.  Example: Record("train.jsonl:3", {"prompt": "12+34=", "ground_truth": "46"})."""

    where: str  # file:line of a JSONL file, file:row (from 1) of the other kinds
    fields: dict[str, Any]


def read_jsonl(path: Path) -> Iterator[Record]:
    """One JSON object per line; empty lines are skipped."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                fields = json.loads(line)
            except ValueError as error:  # bad JSON or bad UTF-8
                raise ValueError(f"{where}: not JSON ({error}); expected one JSON object a line") from None
            if not isinstance(fields, dict):
                raise ValueError(f"{where}: a JSON {type(fields).__name__}; expected one JSON object a line")
            yield Record(where, fields)


def read_parquet(path: Path) -> Iterator[Record]:
    """The rows of a parquet file, read in batches."""
    from pyarrow import ArrowInvalid, parquet  # slow import, only needed for such files

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for fields in batch.to_pylist():
                number += 1
                yield Record(f"{path}:{number}", fields)
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file ({error})") from None


def read_dataset_folder(path: Path) -> Iterator[Record]:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote."""
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise ValueError(f"{path}: a folder of several splits; name one of them ({splits})")
    if not (path / "dataset_info.json").exists():
        raise ValueError(f"{path}: not a folder of `datasets.save_to_disk` (it has no dataset_info.json)")
    from datasets import load_from_disk  # slow import, only needed for such folders

    for number, fields in enumerate(load_from_disk(str(path)), start=1):
        yield Record(f"{path}:{number}", dict(fields))


def read_rows(files: str | Sequence[str], kinds: Mapping[str, Any]) -> list[Record]:
    """All rows of these files in order.  `kinds`: readers by file extension, as data.FILE_KINDS.

    Raises ValueError, naming the file, for one that is missing, of an unknown kind, or without rows.
    """
    rows: list[Record] = []
    for path in paths_of(files):
        if not path.exists():
            raise ValueError(
                f"{path}: no such file or folder; expected a .jsonl or .parquet file, or a `datasets` folder"
            )
        suffix = "" if path.is_dir() else path.suffix.lower()
        if suffix not in kinds or (suffix == "" and path.is_file()):
            raise ValueError(f"{path}: unknown kind of file; expected .jsonl, .json (JSON lines), .parquet or a folder")
        before = len(rows)
        rows.extend(kinds[suffix](path))
        if len(rows) == before:
            raise ValueError(f"{path}: no rows")
    return rows


def paths_of(files: str | Sequence[str]) -> list[Path]:
    """One name or several, as paths."""
    return [Path(name).expanduser() for name in ([files] if isinstance(files, str) else files)]


def content_digest(files: str | Sequence[str]) -> str:
    """16 hexadecimal digits that depend on the bytes of the files, not on their paths."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths_of(files):
        parts = sorted(part for part in path.rglob("*") if part.is_file()) if path.is_dir() else [path]
        for part in parts:
            with part.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()
