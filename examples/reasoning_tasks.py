"""Endless tasks of the package reasoning-gym as data, scored by the package itself.

pip install reasoning-gym
python examples/reasoning_tasks.py data/reasoning chain_sum countdown    # writes train.jsonl and test.jsonl
megarl train --config examples/reasoning_tasks.yaml
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ANSWER = "answer:"
FORM = f"\n\nThink first. End with a line that begins with '{ANSWER}' and has nothing but your answer behind it."


def score(prompt: Any, completion: Any) -> float:
    """What the task's own function says about the text behind the last "answer:", from 0 to 1."""
    from reasoning_gym import get_score_answer_fn

    head, mark, answer = completion.text.rpartition(ANSWER)
    if not mark:
        return 0.0
    entry = {"question": prompt.extra["question"], "answer": prompt.ground_truth, "metadata": prompt.extra["metadata"]}
    return float(get_score_answer_fn(prompt.data_source)(answer.strip(), entry))


def rows(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    from reasoning_gym import create_dataset

    return [
        {
            "prompt": [{"role": "user", "content": entry["question"] + FORM}],
            "ground_truth": str(entry["answer"]),
            "data_source": task,
            "question": entry["question"],
            "metadata": entry["metadata"],
        }
        for entry in create_dataset(task, size=size, seed=seed)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("tasks", nargs="+", help="names of reasoning-gym's data sets")
    parser.add_argument("--train", type=int, default=10_000, help="rows of each")
    parser.add_argument("--test", type=int, default=128)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, size, seed in (("train", options.train, 0), ("test", options.test, 1)):
        found = [row for task in options.tasks for row in rows(task, size, seed)]
        (options.folder / f"{name}.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in found))


if __name__ == "__main__":
    main()
