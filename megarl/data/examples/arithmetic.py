"""Writes a verifiable task: sums such as "12+34=" with the answer "46", and flawed demonstrations for the cold start.

`write_task` writes these files, in the format of a user's data:
    sft.jsonl     {"prompt": "17+25=", "response": "32"}                                       the cold start
    train.jsonl   {"prompt": "56+78=", "ground_truth": "134", "data_source": "arithmetic"}     reinforcement learning
    test.jsonl    the same                                                                     evaluation
    manifest.json sizes and digests; written last, so that it marks a complete folder
No prompt is in two of the files.  A share of the demonstrations forgets the carry.  So after the cold start the model's
answers have the right format and are often wrong; the rewards of reinforcement learning use the right answers.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any


def write_task(
    folder: str | Path,
    *,
    seed: int = 0,
    num_sft: int = 2700,
    num_test: int = 256,
    low: int = 10,
    high: int = 99,
    careless: float = 0.0,
    demonstrations: int = 1,
    carrying: float | None = None,
) -> dict[str, Any]:
    """Write the task's files and return the manifest.  The same arguments always give the same bytes.

    All pairs low..high x low..high are shuffled by `seed`; `num_test` of them go to the evaluation, `num_sft` to the
    cold start, the rest to reinforcement learning.
    careless: share of the demonstrations in which a carry of the units is forgotten ("17+25=" -> "32").
    demonstrations: rows of sft.jsonl for each of its problems; each is careless or not independently.
    carrying: share of problems with such a carry, reached by leaving out some of the others; None: leave out none.
    Raises ValueError if no problem would be left for reinforcement learning.
    """
    rng = random.Random(seed)
    problems = _problems(low, high, carrying, rng)
    if min(num_sft, num_test) < 0 or num_sft + num_test >= len(problems):
        raise ValueError(
            f"num_sft={num_sft} and num_test={num_test}: expected a sum below the {len(problems)} pairs there are"
        )
    test, sft, train = problems[:num_test], problems[num_test : num_test + num_sft], problems[num_test + num_sft :]
    shown = [(a, b, rng.random() < careless) for _ in range(demonstrations) for a, b in sft]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)  # the folder is not complete while files change
    files = {
        "sft.jsonl": [
            {"prompt": f"{a}+{b}=", "response": str(without_carry(a, b) if wrong else a + b)} for a, b, wrong in shown
        ],
        "train.jsonl": [_question(a, b) for a, b in train],
        "test.jsonl": [_question(a, b) for a, b in test],
    }
    task = {"seed": seed, "low": low, "high": high, "careless": careless, "carrying": carrying}
    manifest: dict[str, Any] = {
        "task": task,
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


def _question(a: int, b: int) -> dict[str, str]:
    return {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "data_source": "arithmetic"}


def _write_rows(path: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Write JSON lines; returns {rows, sha256}."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(content)
    return {"rows": len(rows), "sha256": hashlib.sha256(content).hexdigest()}
