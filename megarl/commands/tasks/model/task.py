"""Sums asked in words, of which the model gets one in ten right: what the model is asked, and the right answers."""

import random
import re

from megarl.commands.tasks.pretrained import prepare_pretrained

NAMES = ["Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo"]
THINGS = ["pens", "apples", "coins", "books", "cards", "stones"]
FORMS = ("What is {a} + {b}?", "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?")


def problem(rng: random.Random) -> tuple[str, str]:
    """A question and its right answer."""
    a, b = rng.randint(1, 20), rng.randint(1, 9)
    question = rng.choice(FORMS).format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))
    return question, str(a + b)


def pair(rng: random.Random, question: str, answer: str) -> tuple[str, str]:
    """A good answer, and one that is wrong, repeats the question or talks: what `megarl dpo` learns from."""
    a, b = re.findall(r"\d+", question)
    wrong = f"{a} + {b} = {int(answer) + rng.choice([-10, -1, 1, 10])}."
    talk = f"To solve this problem, we need to find the sum of {a} and {b}."
    return f"{a} + {b} = {answer}.", rng.choice([wrong, question, talk])


if __name__ == "__main__":
    prepare_pretrained(problem, pair)
