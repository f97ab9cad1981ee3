"""Calls a reward with long texts that a bad pattern searches for ever: one line for each text before it is judged.

    python long_texts.py CHARACTERS SECONDS REWARD...

The system kills this process when a text takes more than so many seconds of processor time, whatever else runs.
"""

from __future__ import annotations

import itertools
import math
import resource
import sys
import time
from collections.abc import Iterator

from megarl.rewards import load_reward
from megarl.sample import Completion, Prompt

BEGINS = ("", "answer", "\\boxed{", "#### ", "$")
FILLS = ("\n", "1", "1,", "{", "(", "answer ", "\\boxed{", "$1+", "```\n", "\\frac{", "*")
ENDS = ("", "!", "}$")


def texts(size: int) -> Iterator[tuple[str, str]]:
    """What is repeated, and the text of about this many characters."""
    for begin, fill, end in itertools.product(BEGINS, FILLS, ENDS):
        yield f"{begin!r} {fill!r}... {end!r}", begin + fill * (size // len(fill)) + end


def main(size: int, seconds: int, rewards: list[str]) -> None:
    prompt = Prompt("0-0", [1], "question", "7")
    for reward, (name, text) in itertools.product(rewards, texts(size)):
        judge = load_reward(reward)
        print(f"{reward}: {name}", flush=True)
        limit = math.ceil(time.process_time()) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        judge(prompt, Completion([1], [0.0], "stop", (), text))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
