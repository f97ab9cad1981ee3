"""Makes what an own task needs before its first training: the rows, and a tiny model of the task's own characters.

    data/sft.jsonl     {"prompt": "melon=", "response": "nelom"}      the cold start: its form, and mistakes
    data/train.jsonl   {"prompt": "tiger=", "ground_truth": "regit"}  reinforcement learning
    data/test.jsonl    the same                                       evaluation
    data/model/        a tiny Qwen3 with random weights, one token for each character that the rows have

No prompt is in two of the files.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.data.examples.sizes import TinySizes
from megarl.io.terminal import sentences

Problem = Callable[[random.Random], tuple[str, str]]  # (prompt, right answer), drawn with the given generator
Mistake = Callable[[str, str], str]  # (prompt, right answer) -> a wrong one

MODEL = TinySizes(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=256)
LIMIT = 50  # times as many draws as problems that are wanted: a task that repeats itself more often is too small


def prepare(
    problem: Problem,
    mistake: Mistake,
    *,
    folder: str | Path = "data",
    num_sft: int = 4000,
    num_train: int = 1000,
    num_test: int = 256,
    careless: float = 0.7,
    seed: int = 0,
) -> None:
    """Write the rows and the model into `folder`.  The same arguments always give the same bytes.

    careless: share of the demonstrations of the cold start that are `mistake`s.  They are why the model does not know
    the task before reinforcement learning; the right ones are why it is right often enough to learn from.
    Raises ValueError if the task has fewer different prompts than are wanted.
    """
    from megarl.data.examples.tiny import write_tiny_model  # with torch, which a test of the task does not need

    rng, folder = random.Random(seed), Path(folder)
    rows = _different(problem, rng, num_sft + num_train + num_test)
    sft, train, test = rows[:num_sft], rows[num_sft:-num_test], rows[-num_test:]
    shown = [(prompt, mistake(prompt, answer) if rng.random() < careless else answer) for prompt, answer in sft]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "sft.jsonl", shown, "response")
    _write(folder / "train.jsonl", train, "ground_truth")
    _write(folder / "test.jsonl", test, "ground_truth")
    characters = sorted({character for row in (*rows, *shown) for text in row for character in text})
    shutil.rmtree(folder / "model", ignore_errors=True)
    write_tiny_model(folder / "model", MODEL, characters=characters, seed=seed)
    sizes = f"{len(sft)} rows for the cold start, {len(train)} to learn from, {len(test)} held out"
    sentences().print(f"{folder}: {sizes}; a model of {len(characters)} characters")


def _different(problem: Problem, rng: random.Random, count: int) -> list[tuple[str, str]]:
    """So many problems, no two with the same prompt, in an order in which rare ones do not come late."""
    found: dict[str, str] = {}
    for _ in range(LIMIT * count):
        prompt, answer = problem(rng)
        found.setdefault(prompt, answer)
        if len(found) == count:
            rows = list(found.items())
            rng.shuffle(rows)
            return rows
    raise ValueError(f"the task has {len(found)} different prompts; expected {count} (num_sft + num_train + num_test)")


def _write(path: Path, rows: Sequence[tuple[str, str]], answer: str) -> None:
    path.write_text("".join(f"{json.dumps({'prompt': prompt, answer: text})}\n" for prompt, text in rows))
