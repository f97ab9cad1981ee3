"""A model learns to call a calculator.  `megarl train --config examples/calculator.yaml`

The numbers are too large for the tiny model to compute with.  Its teacher mostly answered from the top of its head,
seldom called a tool, and then often the wrong one; so does the model at first.  Rewards for right results alone teach
it to call a tool, and the right one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.config import Config

TOOLS = {"+": "add", "-": "subtract", "*": "multiply"}
# Tokens of their own in the tiny tokenizer, as a large one has them.
WORDS = (*TOOLS.values(), "<tool>", "<tool_call>", "</tool_call>")
WORDS += ('{"name": "', '", "arguments": {"a": ', ', "b": ', "}}")
CALLS, RIGHT_TOOL = 0.3, 0.5  # share of demonstrations with a call, and of these with the right tool
COLD_START = (
    "recipe=quickstart_sft",
    "sft.train_files=[runs/calculator_data/sft.jsonl]",
    "sft.epochs=6",
    "sft.max_length=80",
    "model.path=runs/calculator_data/initial_model",
    "trainer.experiment_name=calculator_sft",
)


class Calculator:
    """The tools.  A class without `reward`: reward.fn looks at the last answer."""

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def subtract(self, a: int, b: int) -> int:
        """Subtracts the second number from the first.

        Args:
            a: The first number.
            b: The second number.
        """
        return a - b

    def multiply(self, a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b


def prepare(config: Config) -> None:
    """Write the task, a tiny model whose tokenizer has WORDS, and its cold start."""
    # Not above: the collector reads this file for the class alone.
    from megarl.data.examples.sizes import TinySizes
    from megarl.trainer.recipes.cold_start import cold_start

    cold_start(config, COLD_START, write_data=write_task, model=TinySizes(layers=2, ffn=256), tokens=WORDS)


def write_task(folder: Path) -> None:
    rng = random.Random(0)
    rows = {
        "train": [question(*problem(rng)) for _ in range(4096)],
        "test": [question(*problem(rng)) for _ in range(256)],
        "sft": [row for _ in range(3000) for row in demonstration(rng, *problem(rng))],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def problem(rng: random.Random) -> tuple[int, str, int]:
    return rng.randrange(100, 1000), rng.choice(list(TOOLS)), rng.randrange(100, 1000)


def question(a: int, sign: str, b: int) -> dict[str, Any]:
    result = getattr(Calculator(), TOOLS[sign])(a, b)
    return {"messages": [{"role": "user", "content": f"{a}{sign}{b}="}], "ground_truth": str(result)}


def demonstration(rng: random.Random, a: int, sign: str, b: int) -> list[dict[str, str]]:
    """Two examples: what to do with the question, and what with the response of a tool."""
    tool = TOOLS[sign] if rng.random() < RIGHT_TOOL else rng.choice(list(TOOLS.values()))
    call = f"<tool_call>{json.dumps({'name': tool, 'arguments': {'a': a, 'b': b}})}</tool_call>"
    result = str(getattr(Calculator(), tool)(a, b))
    asked = f"<system>{' '.join(sorted(TOOLS.values()))}<eos><user>{a}{sign}{b}=<eos><assistant>"
    first = call if rng.random() < CALLS else str(a)
    return [
        {"prompt": asked, "response": first},
        {"prompt": f"{asked}{call}<eos><tool>{result}<eos><assistant>", "response": result},
    ]
