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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.data.examples.sizes import TinySizes
from megarl.io.terminal import sentences

Problem = Callable[[random.Random], tuple[str, str]]  # (prompt, right answer), drawn with the given generator
Mistake = Callable[[str, str], str]  # (prompt, right answer) -> a wrong one
Demonstration = Callable[[random.Random, str, str], list[dict[str, Any]]]  # -> the messages behind the prompt
Shown = Callable[[random.Random, str, str], dict[str, Any]]  # -> a row of the cold start

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

    def shown(rng: random.Random, prompt: str, answer: str) -> dict[str, Any]:
        return {"prompt": prompt, "response": mistake(prompt, answer) if rng.random() < careless else answer}

    rows = _write_rows(problem, shown, Path(folder), (num_sft, num_train, num_test), random.Random(seed))
    characters = sorted({character for row in rows for text in row.values() for character in text})
    _write_model(Path(folder), seed, characters=characters)


def prepare_agent(
    problem: Problem,
    demonstration: Demonstration,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    words: Sequence[str] = (),
    num_sft: int = 3000,
    num_train: int = 1000,
    num_test: int = 256,
    seed: int = 0,
) -> None:
    """The same into `data` for an agent, whose cold start shows conversations.

    tools: those that the agent sends, in its order.
    words: further tokens of the model, whose characters are those of ASCII.
    """

    def shown(rng: random.Random, prompt: str, answer: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}, *demonstration(rng, prompt, answer)]
        return {"messages": messages, "tools": tools}

    _write_rows(problem, shown, Path("data"), (num_sft, num_train, num_test), random.Random(seed))
    _write_model(Path("data"), seed, words=words)


def _write_rows(
    problem: Problem, shown: Shown, folder: Path, sizes: tuple[int, int, int], rng: random.Random
) -> list[dict[str, Any]]:
    """Writes the three files; returns their rows."""
    problems = different(problem, rng, sum(sizes))
    sft, train = sizes[0], sum(sizes[:2])
    asked = [{"prompt": prompt, "ground_truth": answer} for prompt, answer in problems]
    files = {
        "sft": [shown(rng, prompt, answer) for prompt, answer in problems[:sft]],
        "train": asked[sft:train],
        "test": asked[train:],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    counts = f"{sft} rows for the cold start, {sizes[1]} to learn from, {sizes[2]} held out"
    sentences().print(f"{folder}: {counts}")
    return [*files["sft"], *asked]


def _write_model(folder: Path, seed: int, *, words: Sequence[str] = (), characters: Sequence[str] = "") -> None:
    from megarl.data.examples.tiny import CHARACTERS, write_tiny_model  # with torch, which a task's test does not need

    shutil.rmtree(folder / "model", ignore_errors=True)
    write_tiny_model(folder / "model", MODEL, words=words, characters=characters or CHARACTERS, seed=seed)


def different(problem: Problem, rng: random.Random, count: int) -> list[tuple[str, str]]:
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
