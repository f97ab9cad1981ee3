"""Files of finished groups that wait to be trained: written with a checkpoint, read by the run that resumes.

groups.safetensors   of all rows, end to end: token_ids int32 (without the prompt's, where a row begins with them),
                     log_probs float32, a tensor for each kind of column, two for a ragged one; of all prompts
                     prompt_ids int32
groups.jsonl         the format, a line for each group with everything else and the lengths, and the digests of both

Samples come back equal, floats to the last bit.  Nothing here executes what it reads.
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from megarl.samples.ragged import COUNTS, Ragged
from megarl.samples.sample import Prompt, Row, Sample, TurnSpan, VersionSpan, without_prefix

TENSORS, LINES = "groups.safetensors", "groups.jsonl"
FORMAT = 5  # of the files; goes up with every change


def save_groups(folder: Path, groups: Mapping[int, Sequence[Sample]]) -> None:
    """Write the groups of these visits; both files are on the disk at the end.  All samples of a group have its prompt.

    Raises ValueError for a prompt with a field that no file can hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = _Parts()
    lines = [json.dumps(line) for line in ({"format": FORMAT}, *(_line(*visit, parts) for visit in groups.items()))]
    save_file(parts.joined(), folder / TENSORS)
    text = "".join(f"{line}\n" for line in lines).encode()
    digests = {TENSORS: _digest_of(folder / TENSORS), LINES: _digest(text)}
    (folder / LINES).write_bytes(text + json.dumps(digests).encode())
    for name in (TENSORS, LINES):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())


def load_groups(folder: Path) -> dict[int, list[Sample]]:
    """The groups of `save_groups`, in their order.  Raises ValueError for a file that is missing or has changed."""
    try:
        text, newline, last = (folder / LINES).read_bytes().rpartition(b"\n")
        digests, text = json.loads(last), text + newline
        intact = digests == {TENSORS: _digest_of(folder / TENSORS), LINES: _digest(text)}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}: the waiting groups cannot be read ({error}); expected an unchanged folder"
        ) from error
    if not intact:
        raise ValueError(f"{folder}: {TENSORS} or {LINES} is damaged; expected an unchanged folder")
    head, *lines = map(json.loads, text.splitlines() or [b"{}"])
    if head.get("format") != FORMAT:
        raise ValueError(
            f"{folder}: its waiting groups were written by a version of megarl with another format; expected format "
            f"{FORMAT}: resume with that version, or set trainer.resume_mode=disable"
        )
    rest = _Rest(load_file(folder / TENSORS))
    return dict(_group(line, rest) for line in lines)


class _Parts:
    """Arrays on their way into the file: those that differ only in length are joined."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}
        self._kinds: dict[tuple[str, str, tuple[int, ...]], str] = {}

    def add(self, key: str, part: np.ndarray) -> None:
        self._parts.setdefault(key, []).append(part)

    def add_column(self, name: str, column: np.ndarray) -> str:
        """The key of the tensor that it becomes a part of: samples of other servers may have another kind of it."""
        key = self._kinds.setdefault((name, column.dtype.name, column.shape[1:]), f"column_{len(self._kinds)}")
        self.add(key, column)
        return key

    def joined(self) -> dict[str, np.ndarray]:
        tensors: dict[str, Any] = {key: np.concatenate(parts) for key, parts in self._parts.items()}
        for key, column in list(tensors.items()):
            if isinstance(column, Ragged):
                tensors[key], tensors[key + COUNTS] = column.values, column.counts
        if "log_probs" in tensors:
            tensors["log_probs"] = _as_narrow_as_exact(tensors["log_probs"])
        return tensors


class _Rest:
    """The file's tensors, of which each sample takes its part, in the order in which they were written."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self._tensors, self._at = tensors, dict.fromkeys(tensors, 0)

    def take(self, key: str, length: int) -> Any:
        """An array, or of a ragged column its lists."""
        if key + COUNTS in self._tensors:
            counts = self._run(key + COUNTS, length)
            return Ragged(counts, self._run(key, int(counts.sum())))
        return self._run(key, length)

    def _run(self, key: str, length: int) -> np.ndarray:
        start = self._at[key]
        self._at[key] += length
        return self._tensors[key][start : start + length]


def _line(visit: int, group: Sequence[Sample], parts: _Parts) -> dict[str, Any]:
    assert all(sample.prompt == group[0].prompt for sample in group), f"visit {visit} has samples of several prompts"
    samples = [_sample_to_json(sample, parts) for sample in group]
    return {"visit": visit, "prompt": _prompt_to_json(group[0].prompt, parts) if group else None, "samples": samples}


def _group(line: dict[str, Any], rest: _Rest) -> tuple[int, list[Sample]]:
    if line["prompt"] is None:
        return line["visit"], []
    prompt = _prompt(line["prompt"], rest)
    return line["visit"], [_sample(each, prompt, rest) for each in line["samples"]]


def _prompt_to_json(prompt: Prompt, parts: _Parts) -> dict[str, Any]:
    parts.add("prompt_ids", np.array(prompt.token_ids, dtype=np.int32))
    try:
        extra, truth = to_json(prompt.extra), to_json(prompt.ground_truth)
    except TypeError as error:
        raise ValueError(f"prompt {prompt.uid}: a field of its row cannot be saved, it holds {error}") from error
    return {
        "uid": prompt.uid,
        "num_tokens": len(prompt.token_ids),
        "text": prompt.text,
        "ground_truth": truth,
        "data_source": prompt.data_source,
        "extra": extra,
    }


def _prompt(line: dict[str, Any], rest: _Rest) -> Prompt:
    token_ids = rest.take("prompt_ids", line.pop("num_tokens")).tolist()
    return Prompt(
        token_ids=token_ids, **{**line, **{name: from_json(line[name]) for name in ("extra", "ground_truth")}}
    )


def _sample_to_json(sample: Sample, parts: _Parts) -> dict[str, Any]:
    return {
        "rows": [_row_to_json(row, sample.prompt, parts) for row in sample.rows],
        "reward": sample.reward,
        "reward_extra": sample.reward_extra,
        "greedy_reward": sample.greedy_reward,
        "truncated": sample.truncated,
        "pred": sample.pred,
        "text": sample.text,
        "messages": sample.messages,
    }


def _sample(line: dict[str, Any], prompt: Prompt, rest: _Rest) -> Sample:
    return Sample(prompt, tuple(_row(each, prompt, rest) for each in line.pop("rows")), **line)


def _row_to_json(row: Row, prompt: Prompt, parts: _Parts) -> dict[str, Any]:
    num_shared, token_ids = without_prefix(row.token_ids, prompt.token_ids)
    parts.add("token_ids", np.array(token_ids, dtype=np.int32))
    parts.add("log_probs", np.array(row.log_probs, dtype=np.float64))
    return {
        "num_shared": num_shared,  # tokens of the prompt
        "num_tokens": len(token_ids),
        "learnt": [astuple(span) for span in row.learnt],
        "versions": [astuple(span) for span in row.versions],
        "finish_reason": row.finish_reason,
        "rewards": row.rewards,
        "columns": {name: parts.add_column(name, column) for name, column in row.columns.items()},
    }


def _row(line: dict[str, Any], prompt: Prompt, rest: _Rest) -> Row:
    learnt = tuple(TurnSpan(*span) for span in line["learnt"])
    whole = line["num_shared"] + line["num_tokens"]
    return Row(
        token_ids=prompt.token_ids[: line["num_shared"]] + rest.take("token_ids", line["num_tokens"]).tolist(),
        learnt=learnt,
        log_probs=rest.take("log_probs", sum(span.end - span.start for span in learnt)).tolist(),
        versions=tuple(VersionSpan(*span) for span in line["versions"]),
        finish_reason=line["finish_reason"],
        rewards=tuple(line["rewards"]),
        # Copies: a view would keep the tensor of all groups in memory until the last of them is trained.
        columns={name: rest.take(key, whole).copy() for name, key in line["columns"].items()},
    )


def _as_narrow_as_exact(numbers: np.ndarray) -> np.ndarray:
    """float64 as float32 if that loses no bit, as for the log-probs of every engine that computes them in float32."""
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    is_exact = np.array_equal(narrow.astype(np.float64).view(np.int64), numbers.view(np.int64))
    return narrow if is_exact else numbers


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest_of(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# ---- JSON of the values in a row of a data set that comes back equal: also bytes, times, tuples and keys that are no
# text.  Everything that JSON has is written as it is; the other kinds are objects with the one key `KIND`.

KIND = "megarl:kind"

# A type (subclasses first) -> its name in the file, to a JSON value, and back.
_KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: ("bytes", lambda value: b64encode(value).decode(), b64decode),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
    timedelta: ("timedelta", lambda d: [d.days, d.seconds, d.microseconds], lambda parts: timedelta(*parts)),
    Decimal: ("decimal", str, Decimal),
    tuple: ("tuple", lambda value: [to_json(x) for x in value], lambda items: tuple(from_json(x) for x in items)),
    dict: (
        "pairs",
        lambda value: [[to_json(x) for x in pair] for pair in value.items()],
        lambda pairs: {from_json(key): from_json(x) for key, x in pairs},
    ),
}
_BY_NAME = {name: decode for name, _, decode in _KINDS.values()}


def to_json(value: Any) -> Any:
    """A value that `json` can write.  Raises TypeError for a type that is not among those above."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [to_json(x) for x in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and KIND not in value:
        return {key: to_json(x) for key, x in value.items()}
    for kind, (name, encode, _) in _KINDS.items():
        if isinstance(value, kind):
            return {KIND: [name, encode(value)]}
    raise _unknown(value)


def check_writable(value: Any) -> None:
    """Raises the TypeError that `to_json` would raise, without its work."""
    if isinstance(value, dict):
        for pair in value.items():
            check_writable(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_writable(item)
    elif value is not None and not isinstance(value, (bool, int, float, str, *_KINDS)):
        raise _unknown(value)


def _unknown(value: Any) -> TypeError:
    return TypeError(f"a {type(value).__name__}; expected text, numbers, bytes, times, or lists and objects of these")


def from_json(value: Any) -> Any:
    """The value that `to_json` got."""
    if isinstance(value, list):
        return [from_json(x) for x in value]
    if not isinstance(value, dict):
        return value
    if KIND in value:
        name, inner = value[KIND]
        return _BY_NAME[name](inner)
    return {key: from_json(x) for key, x in value.items()}
