"""The agent: it asks the model, runs the tools that the model calls, and scores the answer.  Change it first."""

from typing import Any

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
FUNCTIONS = {"add": lambda a, b: a + b, "subtract": lambda a, b: a - b}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": NUMBERS}} for name in FUNCTIONS]


async def episode(chat: Any, prompt: Any) -> dict[str, float]:
    """A sample of the training.  It returns the reward, `score`; the mean of `acc` is the accuracy."""
    messages, calls = chat.messages, 0
    while True:
        answer = await chat(messages, tools=TOOLS)
        messages.append(answer.message)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            messages.append(call.response(result_of(call.name, call.arguments)))
            calls += 1
    right = float(answer.text == prompt.ground_truth)
    return {"score": right, "acc": right, "calls": calls}


def result_of(name: str, arguments: dict[str, Any]) -> str:
    """What the tool says.  A call that fails does not end the episode: the model reads why."""
    try:
        return str(FUNCTIONS[name](**arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
