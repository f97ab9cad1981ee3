"""A game of several turns, learnt from its end.  `megarl train --config examples/guessing_game.yaml`

The model guesses a number from 1 to 7 and hears "higher" or "lower".  Its teacher guessed at random and forgot half of
what it heard; a reward that falls with every guess teaches the model to listen, and to halve what is left.  The best
plan needs 17/7 = 2.43 guesses on average, a score of 0.714.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.agents.chat import Chat
    from megarl.config import Config
    from megarl.samples.sample import Prompt

LARGEST, MOST_GUESSES = 7, 5
QUESTION = f"1-{LARGEST}?"
WORDS = ("higher", "lower")
COLD_START = (
    "recipe=quickstart_sft",
    "sft.train_files=[runs/guessing_game_data/sft.jsonl]",
    "sft.epochs=4",
    "sft.max_length=40",
    "model.path=runs/guessing_game_data/initial_model",
    "trainer.experiment_name=guessing_game_sft",
)


async def episode(chat: Chat, prompt: Prompt) -> dict[str, float]:
    """1 for the number at the first guess, 0.2 less for each further one; 0 for none, or for what is no number."""
    messages = chat.messages
    for guesses in range(1, MOST_GUESSES + 1):
        answer = await chat(messages)
        if answer.text == prompt.ground_truth:
            return {"score": 1.0 - 0.2 * (guesses - 1), "found": 1.0, "guesses": guesses}
        if not answer.text.isdecimal():
            break
        hint = "higher" if int(answer.text) < int(prompt.ground_truth) else "lower"
        messages += [answer.message, {"role": "user", "content": hint}]
    return {"score": 0.0, "found": 0.0, "guesses": guesses}


def prepare(config: Config) -> None:
    """Write the task, a tiny model whose tokenizer has WORDS, and its cold start."""
    # Not above: the collector reads this file for the episode alone.
    from megarl.data.examples.sizes import TinySizes
    from megarl.trainer.recipes.cold_start import cold_start

    cold_start(config, COLD_START, write_data=write_task, model=TinySizes(layers=2, ffn=256), tokens=WORDS)


def write_task(folder: Path) -> None:
    """Every number is asked for equally often; the model cannot know which it is."""
    rng = random.Random(0)
    question = {"messages": [{"role": "user", "content": QUESTION}]}
    rows: dict[str, list[dict[str, Any]]] = {
        "train": [question | {"ground_truth": str(1 + row % LARGEST)} for row in range(32 * LARGEST)],
        "test": [question | {"ground_truth": str(1 + row)} for row in range(LARGEST)],
        "sft": [example for _ in range(3000) for example in demonstrations(rng)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def demonstrations(rng: random.Random) -> list[dict[str, str]]:
    """A game of the teacher, who forgets at every second guess what was said: an example for each guess."""
    secret, low, high = rng.randint(1, LARGEST), 1, LARGEST
    text, examples = f"<user>{QUESTION}<eos><assistant>", []
    for _ in range(MOST_GUESSES):
        guess = rng.randint(low, high) if rng.random() < 0.5 else rng.randint(1, LARGEST)
        examples.append({"prompt": text, "response": str(guess)})
        if guess == secret:
            break
        if guess < secret:
            hint, low = "higher", max(low, guess + 1)
        else:
            hint, high = "lower", min(high, guess - 1)
        text += f"{guess}<eos><user>{hint}<eos><assistant>"
    return examples
