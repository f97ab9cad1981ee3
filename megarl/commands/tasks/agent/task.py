"""What the agent is asked, "347-258=", and what the cold start shows the model: numbers too long to compute with.

The teacher of the cold start mostly answers off the top of its head, seldom calls a tool, and then often the wrong one.
Rewards for right answers teach the model to call a tool, and the right one.
"""

import json
import random
from typing import Any

from agent import FUNCTIONS, TOOLS, result_of

from megarl.commands.tasks.prepare import prepare_agent

CALLS, RIGHT_TOOL = 0.3, 0.6  # share of demonstrations with a call, and of these with the right tool
# Tokens of their own in the tiny tokenizer, as a large one has them.
MARKS = ("<tool>", "<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"a": ', ', "b": ', "}}")


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt and its right answer."""
    a, sign, b = rng.randrange(100, 1000), rng.choice("+-"), rng.randrange(100, 1000)
    return f"{a}{sign}{b}=", str(a + b if sign == "+" else a - b)


def demonstration(rng: random.Random, prompt: str, answer: str) -> list[dict[str, Any]]:
    """The messages behind the prompt, in the form of OpenAI's."""
    sign = prompt[3]
    a, b = map(int, prompt.rstrip("=").split(sign))
    if rng.random() > CALLS:
        return [{"role": "assistant", "content": str(a)}]
    right, wrong = ("add", "subtract") if sign == "+" else ("subtract", "add")
    name, arguments = right if rng.random() < RIGHT_TOOL else wrong, {"a": a, "b": b}
    result = result_of(name, arguments)
    call = {"id": "0", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "0", "content": result},
        {"role": "assistant", "content": result},
    ]


if __name__ == "__main__":
    prepare_agent(problem, demonstration, tools=TOOLS, words=(*FUNCTIONS, *MARKS))
