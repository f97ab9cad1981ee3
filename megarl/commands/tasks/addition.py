"""Addition of a number of three digits and one of a single digit: "347+8=" is "355".  The carry makes it hard."""

import random

from megarl.commands.tasks.prepare import prepare


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt and its right answer.  Most problems have a carry of the units."""
    for _ in range(2):
        a, b = rng.randint(100, 989), rng.randint(2, 9)
        if a % 10 + b >= 10:
            break
    return f"{a}+{b}=", str(a + b)


def mistake(prompt: str, answer: str) -> str:
    """What a careless person answers, who forgets the carry: "347+8=" gives "345", and "342+6=" the right "348"."""
    carries = int(prompt[2]) + int(prompt[4]) >= 10
    return str(int(answer) - 10) if carries else answer


if __name__ == "__main__":
    prepare(problem, mistake)
