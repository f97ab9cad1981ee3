"""Words spelled from the last letter to the first: "melon=" is "nolem"."""

import random

from megarl.commands.tasks.prepare import prepare


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt and its right answer.  The word is made up, of consonants and vowels in turn."""
    letters = [rng.choice("aeiou" if place % 2 else "bdfglmnprst") for place in range(rng.randint(4, 7))]
    word = "".join(letters)
    return f"{word}=", word[::-1]


def mistake(prompt: str, answer: str) -> str:
    """What a careless person answers, who exchanges only the two ends: "melon=" gives "nelom"."""
    word = prompt.rstrip("=")
    return word[-1] + word[1:-1] + word[0]


if __name__ == "__main__":
    prepare(problem, mistake)
