"""Writes a second verifiable task: numbers of four digits such as "1234~" with the answer "4321".

The files are those of `arithmetic.py`, and their data_source is "reversal".  A careless demonstration leaves the two
digits in the middle as they stand: "1234~" -> "4231".
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def write_reversals(
    folder: str | Path,
    *,
    seed: int = 0,
    num_sft: int = 3200,
    num_train: int = 1400,
    num_test: int = 256,
    careless: float = 0.0,
    demonstrations: int = 1,
) -> None:
    """Write sft.jsonl, train.jsonl and test.jsonl.  The same arguments always give the same bytes.

    No number is in two of the files.  `careless`, `demonstrations`: as in `arithmetic.write_task`.
    """
    rng, folder = random.Random(seed), Path(folder)
    numbers = [f"{number}" for number in rng.sample(range(1000, 10000), num_sft + num_train + num_test)]
    sft, train, test = numbers[:num_sft], numbers[num_sft:-num_test], numbers[-num_test:]
    shown = [(number, rng.random() < careless) for _ in range(demonstrations) for number in sft]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "sft.jsonl", ({"prompt": f"{n}~", "response": answer(n, careless=wrong)} for n, wrong in shown))
    for name, own in (("train", train), ("test", test)):
        _write(folder / f"{name}.jsonl", map(_question, own))


def answer(number: str, *, careless: bool = False) -> str:
    """The digits from last to first.  Example: "1234" -> "4321", carelessly "4231"."""
    right = number[::-1]
    return f"{right[0]}{number[1:-1]}{right[-1]}" if careless else right


def join(folder: str | Path, parts: Sequence[str | Path]) -> None:
    """Write the files of several tasks as one, row after row of each task in turn."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("sft.jsonl", "train.jsonl", "test.jsonl"):
        files = [(Path(part) / name).read_text().splitlines() for part in parts]
        longest = max(map(len, files))
        lines = [lines[at] for at in range(longest) for lines in files if at < len(lines)]
        (folder / name).write_text("".join(f"{line}\n" for line in lines))


def _question(number: str) -> dict[str, str]:
    return {"prompt": f"{number}~", "ground_truth": answer(number), "data_source": "reversal"}


def _write(path: Path, rows: Iterator[dict[str, Any]] | map[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
