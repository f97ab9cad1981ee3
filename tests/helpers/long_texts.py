"""Calls a reward with long texts that a bad pattern searches for ever: one line for each text before it is judged.

    python long_texts.py CHARACTERS SECONDS REWARD...

The system kills this process when a text takes more than so many seconds of processor time, whatever else runs.  It
ends itself when it has taken more than two GiB of memory.
"""

import itertools
import math
import resource
import sys
import time
from collections.abc import Iterator

from megarl.rewards import load_reward, surroundings
from megarl.samples.sample import Completion, Prompt

BEGINS = ("", "answer", "\\boxed{", "#### ", "$")
FILLS = ("\n", "1", "1,", "{", "(", "answer ", "\\boxed{", "$1+", "```\n", "\\frac{", "*")
ENDS = ("", "!", "}$")
MEMORY_KIB = 2 << 20
# What a program that reads mathematics parses, or calculates, for ever; short where a long one is harmless.
MATHEMATICS = {
    "tower": lambda size: "9**" * size + "9",
    "tower of exponents": lambda size: "$" + "9^{" * size + "9" + "}" * size + "$",
    "short tower": lambda size: "\\boxed{9^{9^{9^{9}}}}",
    "short tower as text": lambda size: "9**9**9**9",
    "power": lambda size: "$10^{10^{10}}$",
    "power of a sum": lambda size: "$(w+x+y+z+1)^{99}$",
    "root of a power": lambda size: "$\\sqrt{(10^{99})!}$",
    "factorial": lambda size: "$99999999!$",
    "factorials": lambda size: "$9" + "!" * size + "$",
    "binomial": lambda size: "$\\binom{1000000}{500000}$",
    "product": lambda size: "$\\prod_{i=1}^{10000000} i$",
    "sum": lambda size: "$\\sum_{i=1}^{100000} \\frac{1}{i!}$",
    "integer": lambda size: "$" + "9" * size + "$",
    "powers of integers": lambda size: f"${'9' * 400}^{{{'9' * 400}}}$",
    "fractions": lambda size: "$" + "\\frac{1}{1+" * size + "1" + "}" * size + "$",
    "ten fractions": lambda size: "$" + "\\frac{1}{1+" * 10 + "1" + "}" * 10 + "$",
    "roots": lambda size: "$" + "\\sqrt{2}+" * 100 + "1$",
    "ten braces": lambda size: "\\boxed{" + "{" * 9 + "1" + "}" * 9 + "}",
    "brackets": lambda size: "\\boxed{" + "(" * 30 + "1" + ")" * 30 + "}",
    "set": lambda size: "$\\{" + "1," * 480 + "1\\}$",
    "letters": lambda size: "$" + "x" * 900 + "$",
    "boxes that do not end": lambda size: "\\[\\(\\boxed{}" * size,
    "twenty boxes": lambda size: "\\[\\boxed{}" * 20 + "}" * 800,
    "spaces between answers": lambda size: "final answer is " + ("$1$" + " " * size + ",") * 6,
    "many answers": lambda size: "answer: $1$ and " * size,
}


def texts(size: int) -> Iterator[tuple[str, str]]:
    """What is repeated, and the text of about this many characters."""
    for begin, fill, end in itertools.product(BEGINS, FILLS, ENDS):
        yield f"{begin!r} {fill!r}... {end!r}", begin + fill * (size // len(fill)) + end
    for name, text in MATHEMATICS.items():
        yield name, text(size)


def main(size: int, seconds: int, rewards: list[str]) -> None:
    surroundings._Process.timeout_s = 1.0  # of a sample, in which `math` gives up what it cannot calculate
    for reward, (name, text) in itertools.product(rewards, texts(size)):
        judge, prompt = load_reward(reward), Prompt("0-0", [1], "question", "B" if reward == "choice" else "7")
        print(f"{reward}: {name}", flush=True)
        limit = math.ceil(time.process_time()) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        judge(prompt, Completion([1], [0.0], "stop", (), text))
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MEMORY_KIB:
            sys.exit("this text takes too much memory")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
