"""Sorting of digits: "52841=" is "12458"."""

import random

from megarl.commands.tasks.prepare import prepare


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt and its right answer."""
    digits = rng.sample("0123456789", k=rng.randint(4, 6))
    return f"{''.join(digits)}=", "".join(sorted(digits))


def mistake(prompt: str, answer: str) -> str:
    """What a careless person answers, who leaves the last digit where it is: "52841=" gives "24581"."""
    digits = prompt.rstrip("=")
    return "".join(sorted(digits[:-1])) + digits[-1]


if __name__ == "__main__":
    prepare(problem, mistake)
