"""Counting of a letter in a word: "b:abbcaba=" is "3"."""

import random

from megarl.tasks.prepare import prepare


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt and its right answer."""
    word = "".join(rng.choices("abc", k=7))
    letter = rng.choice("abc")
    return f"{letter}:{word}=", str(word.count(letter))


def mistake(prompt: str, answer: str) -> str:
    """What a careless person answers, who does not look at the last three letters: "b:abbcaba=" gives "2"."""
    letter, word = prompt.rstrip("=").split(":")
    return str(word[:-3].count(letter))


if __name__ == "__main__":
    prepare(problem, mistake, careless=0.6)
