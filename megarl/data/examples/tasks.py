"""Writes verifiable tasks: sums such as "12+34=" with the answer "46", and reversals such as "1234~" with "4321".

The files have the format of a user's data:
    sft.jsonl     {"prompt": "17+25=", "response": "32"}                                       the cold start
    train.jsonl   {"prompt": "56+78=", "ground_truth": "134", "data_source": "arithmetic"}     reinforcement learning
    test.jsonl    the same                                                                     evaluation
    manifest.json sizes and digests (`write_task` only); written last, so that it marks a complete folder
No prompt is in two of the files.  A share of the demonstrations is careless: sums forget the carry, and reversals leave
the two digits in the middle as they are ("1234~" -> "4231").  So after the cold start the model's answers have the
right format and are often wrong; the rewards of reinforcement learning use the right answers.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sums:
    """All pairs low..high x low..high are shuffled by `seed`; `num_test` of them go to the evaluation, `num_sft` to the
    cold start, the rest to reinforcement learning."""

    seed: int = 0
    num_sft: int = 2700
    num_test: int = 256
    low: int = 10
    high: int = 99
    careless: float = 0.0  # share of the demonstrations in which a carry of the units is forgotten ("17+25=" -> "32")
    demonstrations: int = 1  # rows of sft.jsonl for each of its problems; each is careless or not independently
    # Share of problems with such a carry, reached by leaving out some of the others; None: leave out none.
    carrying: float | None = None


def write_task(folder: str | Path, sums: Sums = Sums()) -> dict[str, Any]:
    """Write the task's files and return the manifest.  The same arguments always give the same bytes.

    Raises ValueError if no problem would be left for reinforcement learning.
    """
    rng = random.Random(sums.seed)
    num_sft = sums.num_sft
    num_test = sums.num_test
    problems = _problems(sums.low, sums.high, sums.carrying, rng)
    if min(num_sft, num_test) < 0 or num_sft + num_test >= len(problems):
        raise ValueError(
            f"num_sft={num_sft} and num_test={num_test}: expected a sum below the {len(problems)} pairs there are"
        )
    test, sft, train = problems[:num_test], problems[num_test : num_test + num_sft], problems[num_test + num_sft :]
    shown = [(a, b, rng.random() < sums.careless) for _ in range(sums.demonstrations) for a, b in sft]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)  # the folder is not complete while files change
    files = {
        "sft.jsonl": [
            {"prompt": f"{a}+{b}=", "response": str(without_carry(a, b) if wrong else a + b)} for a, b, wrong in shown
        ],
        "train.jsonl": [_question(f"{a}+{b}=", a + b, "arithmetic") for a, b in train],
        "test.jsonl": [_question(f"{a}+{b}=", a + b, "arithmetic") for a, b in test],
    }
    manifest: dict[str, Any] = {
        "task": {name: getattr(sums, name) for name in ("seed", "low", "high", "careless", "carrying")},
        "files": {name: _write_rows(folder / name, rows) for name, rows in files.items()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def without_carry(a: int, b: int) -> int:
    """The sum with the carry of the units forgotten.  Example: 17 + 25 -> 32, 12 + 34 -> 46."""
    return a + b - (10 if has_carry(a, b) else 0)


def has_carry(a: int, b: int) -> bool:
    return a % 10 + b % 10 >= 10


def _problems(low: int, high: int, carrying: float | None, rng: random.Random) -> list[tuple[int, int]]:
    """All pairs in a random order, without some of those without carry, to reach the share `carrying`."""
    numbers = range(low, high + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    rng.shuffle(pairs)
    if carrying is None:
        return pairs
    if not 0 < carrying <= 1:
        raise ValueError(f"carrying={carrying}: expected a share above 0 and at most 1, or None")
    with_carry = [pair for pair in pairs if has_carry(*pair)]
    num_others = round(len(with_carry) * (1 - carrying) / carrying)
    kept = with_carry + [pair for pair in pairs if not has_carry(*pair)][:num_others]
    rng.shuffle(kept)
    return kept


def _question(prompt: str, answer: object, data_source: str) -> dict[str, str]:
    return {"prompt": prompt, "ground_truth": str(answer), "data_source": data_source}


def _write_rows(path: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Write JSON lines; returns {rows, sha256}."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(content)
    return {"rows": len(rows), "sha256": hashlib.sha256(content).hexdigest()}


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

    No number is in two of the files.  `careless`, `demonstrations`: as in `Sums`.
    """
    rng, folder = random.Random(seed), Path(folder)
    numbers = [f"{number}" for number in rng.sample(range(1000, 10000), num_sft + num_train + num_test)]
    sft, train, test = numbers[:num_sft], numbers[num_sft:-num_test], numbers[-num_test:]
    shown = [(number, rng.random() < careless) for _ in range(demonstrations) for number in sft]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{n}~", "response": answer(n, careless=wrong)} for n, wrong in shown]
    _write_rows(folder / "sft.jsonl", rows)
    for name, part in (("train", train), ("test", test)):
        _write_rows(folder / f"{name}.jsonl", [_question(f"{n}~", answer(n), "reversal") for n in part])


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
