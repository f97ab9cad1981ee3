"""A verifiable task made here: sums such as "12+34=" with the answer "46".

`python -m megarl.data.arithmetic FOLDER` writes, as a user's data would come,
    sft.jsonl     {"prompt": "12+34=", "response": "46"}                                       the cold start
    train.jsonl   {"prompt": "56+78=", "ground_truth": "134", "data_source": "arithmetic"}     reinforcement learning
    test.jsonl    the same                                                                     evaluation
    manifest.json sizes and digests; written last, so that it stands for a complete folder
No prompt is in two of the files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import operator
import random
from pathlib import Path
from typing import Any

from rich.console import Console

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def write_task(
    folder: str | Path,
    *,
    seed: int = 0,
    num_sft: int = 2700,
    num_test: int = 256,
    low: int = 10,
    high: int = 99,
    operation: str = "+",
) -> dict[str, Any]:
    """Write the task's files and return the manifest.  The same arguments always give the same bytes.

    All pairs low..high x low..high (8100 by default) are shuffled by `seed`; `num_test` of them go to the evaluation,
    `num_sft` to the cold start, the rest to reinforcement learning.
    Raises ValueError when nothing would be left for reinforcement learning.
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation={operation!r}: want one of {' '.join(OPERATIONS)}")
    num_pairs = max(0, high - low + 1) ** 2
    if min(num_sft, num_test) < 0 or num_sft + num_test >= num_pairs:
        raise ValueError(f"num_sft={num_sft} and num_test={num_test}: want a sum below the {num_pairs} pairs there are")
    numbers = range(low, high + 1)
    problems = [(f"{a}{operation}{b}=", str(OPERATIONS[operation](a, b))) for a in numbers for b in numbers]
    random.Random(seed).shuffle(problems)
    test, sft, train = (
        problems[:num_test],
        problems[num_test : num_test + num_sft],
        problems[num_test + num_sft :],
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)  # while files change, nothing claims to be complete
    files = {
        "sft.jsonl": [{"prompt": prompt, "response": answer} for prompt, answer in sft],
        "train.jsonl": [_question(prompt, answer) for prompt, answer in train],
        "test.jsonl": [_question(prompt, answer) for prompt, answer in test],
    }
    manifest: dict[str, Any] = {
        "task": {"seed": seed, "low": low, "high": high, "operation": operation},
        "files": {name: _write_rows(folder / name, rows) for name, rows in files.items()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def _question(prompt: str, answer: str) -> dict[str, str]:
    return {"prompt": prompt, "ground_truth": answer, "data_source": "arithmetic"}


def _write_rows(path: Path, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Write JSON lines; returns {rows, sha256}."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(content)
    return {"rows": len(rows), "sha256": hashlib.sha256(content).hexdigest()}


def main() -> None:
    """The command line: a folder, and the sizes."""
    parser = argparse.ArgumentParser(description="Write a verifiable arithmetic task as JSONL files.")
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-sft", type=int, default=2700)
    parser.add_argument("--num-test", type=int, default=256)
    arguments = parser.parse_args()
    manifest = write_task(arguments.folder, seed=arguments.seed, num_sft=arguments.num_sft, num_test=arguments.num_test)
    sizes = ", ".join(f"{name} {entry['rows']}" for name, entry in manifest["files"].items())
    Console().print(f"{arguments.folder}: {sizes} rows")


if __name__ == "__main__":
    main()
