"""Sums asked in words, of which the model gets one in ten right: what the model is asked, and the right answers."""

import random

from megarl.commands.tasks.pretrained import prepare_pretrained

NAMES = ["Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo"]
THINGS = ["pens", "apples", "coins", "books", "cards", "stones"]
FORMS = ("What is {a} + {b}?", "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?")


def problem(rng: random.Random) -> tuple[str, str]:
    """A question and its right answer."""
    a, b = rng.randint(1, 20), rng.randint(1, 9)
    question = rng.choice(FORMS).format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))
    return question, str(a + b)


if __name__ == "__main__":
    prepare_pretrained(problem)
