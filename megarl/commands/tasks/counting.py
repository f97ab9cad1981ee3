"""Counting of a letter in a word, aloud: "b:abbcaba=" is "0122233", the count after each letter; it is 3 in the end.

A tiny model that is to give the last digit at once does not learn it; with the counts on the way, each step is easy.
"""

import random

from megarl.commands.tasks.prepare import prepare


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt and its right answer."""
    word = "".join(rng.choices("abc", k=7))
    letter = rng.choice("abc")
    return f"{letter}:{word}=", "".join(str(word[:end].count(letter)) for end in range(1, len(word) + 1))


def mistake(prompt: str, answer: str) -> str:
    """What a careless person answers, who does not look at the last three letters: "b:abbcaba=" gives "0122222"."""
    return answer[:-3] + answer[-4] * 3


if __name__ == "__main__":
    prepare(problem, mistake)
