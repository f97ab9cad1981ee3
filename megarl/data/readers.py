"""Reads files into rows; each row knows its file and line, for error messages.

The size of a row is checked before it is built: one of more than `most` bytes is refused (data.max_row_bytes), and so
are rows that would fill the machine's memory.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megarl.io.durable_files import inside
from megarl.io.free_memory import free_bytes

_ROWS = 64  # after which the memory of the process is looked at
_BATCH_ROWS, _BATCH_BYTES = 2048, 2**26  # of a parquet file in a batch; Arrow cannot hold 2 GB of nested text
MOST = 2**24  # bytes of a row by default
_CELL_BYTES = 8  # that a value takes at least, as an element of a list
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class TooLarge(ValueError):
    """A row has more bytes than it may."""

    def __init__(self, where: str, most: int) -> None:
        wanted = "expected a shorter one, or a higher data.max_row_bytes"
        super().__init__(f"{where}: the row has more than {most:,} bytes; {wanted}")


class Record(NamedTuple):
    """One row of a file.  Example: Record("train.jsonl:3", {"prompt": "12+34=", "ground_truth": "46"})."""

    where: str  # file:line of a JSONL file, file:row (from 1) of the other kinds
    fields: dict[str, Any]
    has_gaps: bool = False  # null may stand for a field of an object that only other rows have: Arrow's columns


def read_jsonl(path: Path, most: int = MOST) -> Iterator[Record]:
    """One JSON object per line; empty lines are skipped."""
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(most + 1), b""), start=1):
            where = f"{path}:{number}"
            if len(line) > most:
                raise TooLarge(where, most)
            if not line.strip():
                continue
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


def _slices(batch: Any, path: Path, first: int, most: int) -> Iterator[Any]:
    """The parts of a batch or table of Arrow that have at most `most` bytes.

    `first`: the number of its first row in the file.  Raises TooLarge for a row that has more.
    """
    if sum(map(_bytes_of, batch.columns)) <= most:
        yield batch
    elif batch.num_rows == 1:
        raise TooLarge(f"{path}:{first}", most)
    else:
        half = batch.num_rows // 2
        yield from _slices(batch.slice(0, half), path, first, most)
        yield from _slices(batch.slice(half), path, first + half, most)


def _bytes_of(array: Any) -> int:
    """What a column takes when each of its values is made, also those of a dictionary, which holds them once."""
    from pyarrow import ChunkedArray, compute, types

    if isinstance(array, ChunkedArray):
        return sum(map(_bytes_of, array.chunks))
    if types.is_dictionary(array.type):
        used = array.indices.dictionary_encode()  # a batch may have few of the values of a large dictionary
        lengths = compute.binary_length(array.dictionary.take(used.dictionary)).take(used.indices)
        return len(array) * _CELL_BYTES + (compute.sum(lengths).as_py() or 0)
    if types.is_struct(array.type):
        return sum(map(_bytes_of, array.flatten()))
    if types.is_list(array.type) or types.is_large_list(array.type):
        return len(array) * _CELL_BYTES + _bytes_of(array.flatten())
    return len(array) * _CELL_BYTES + int(array.nbytes)


def read_parquet(path: Path, most: int = MOST) -> Iterator[Record]:
    """The rows of a parquet file, read in batches.  Texts stay in the dictionaries of the file until they are asked."""
    from pyarrow import ArrowException, ArrowNotImplementedError, parquet  # slow import, only needed for such files

    number = 0
    try:
        file = parquet.ParquetFile(path)
        groups = [file.metadata.row_group(at) for at in range(file.num_row_groups)]
        longest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
        size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, longest)))
        texts = [column.path for column in file.schema if column.physical_type == "BYTE_ARRAY"]
        texts = [text for text in texts if ".key_value." not in text]  # Arrow reads no maps so
        for batch in parquet.ParquetFile(path, read_dictionary=texts).iter_batches(size):
            for part in _slices(batch, path, number + 1, most):
                for fields in part.to_pylist():
                    number += 1
                    yield Record(f"{path}:{number}", fields, has_gaps=True)
    except (TooLarge, MemoryError):
        raise
    except ArrowNotImplementedError as error:
        where = f"{path}:{number + 1} or one of the {size} rows behind it"
        raise ValueError(f"{where}: Arrow cannot read it, which may be too large ({_line(error)})") from None
    except (ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path}: not a parquet file, or a damaged one ({_line(error)})") from None


def read_dataset_folder(path: Path, most: int = MOST) -> Iterator[Record]:
    """The rows of a folder that `datasets.Dataset.save_to_disk` wrote."""
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise ValueError(f"{path}: a folder of several splits; name one of them ({splits})")
    if not (path / "dataset_info.json").exists():
        raise ValueError(f"{path}: not a folder of `datasets.save_to_disk` (it has no dataset_info.json)")
    from datasets import load_from_disk  # slow import, only needed for such folders

    try:
        for part in json.loads((path / "state.json").read_bytes())["_data_files"]:
            inside(path, part["filename"])
        found, number = load_from_disk(str(path)), 1
        for table in found.with_format("arrow").iter(_ROWS):
            deque(_slices(table, path, number, most), maxlen=0)
            number += len(table)
        for number, fields in enumerate(found, start=1):
            yield Record(f"{path}:{number}", dict(fields), has_gaps=True)
    except (TooLarge, MemoryError):
        raise
    except Exception as error:  # a damaged folder: `datasets` raises errors of many types
        raise ValueError(f"{path}: `datasets` cannot load this folder ({_line(error)})") from error


# Reader by file extension; "" is a folder that `datasets.save_to_disk` wrote.
FILE_KINDS = {".jsonl": read_jsonl, ".json": read_jsonl, ".parquet": read_parquet, "": read_dataset_folder}


def read_rows(files: str | Sequence[str], most: int = MOST) -> list[Record]:
    """All rows of these files in order.

    Raises ValueError, naming the file, for one that is missing, of an unknown kind, or without rows, and for rows that
    take more than half of the memory that is free.
    """
    rows: list[Record] = []
    memory, free = psutil.Process().memory_info, free_bytes()
    before = memory().rss
    for path in paths_of(files):
        suffix = path.suffix.lower() if _is_file(path) else ""
        if suffix not in FILE_KINDS or (suffix == "" and not path.is_dir()):
            raise ValueError(f"{path}: unknown kind of file; expected .jsonl, .json (JSON lines), .parquet or a folder")
        number = len(rows)
        try:
            for row in FILE_KINDS[suffix](path, most):
                rows.append(row)
                if len(rows) % _ROWS == 0 and memory().rss - before > free // 2:
                    raise MemoryError
        except MemoryError:
            where = rows[-1].where if len(rows) > number else path
            raise ValueError(
                f"{where}: the rows to here take {memory().rss - before:,} bytes of memory, and {free:,} were free; "
                "expected fewer or shorter rows, or a machine with more memory"
            ) from None
        if len(rows) == number:
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
