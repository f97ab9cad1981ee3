"""The conversation by anthropic: `loop_anthropic.py messages|tool_runner`; prints the answer."""

import sys

import anthropic
from conversation import ADD, NUMBERS, QUESTION, SYSTEM, add

client = anthropic.Anthropic()
ASKED = {"model": "policy", "max_tokens": 200, "system": SYSTEM}
START = [{"role": "user", "content": QUESTION}]


def by_messages():
    messages, tools = list(START), [{"name": "add", "description": ADD, "input_schema": NUMBERS}]
    while True:
        answer = client.messages.create(messages=messages, tools=tools, **ASKED)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return answer.content[-1].text
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": add(**block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def by_tool_runner():
    tool = anthropic.beta_tool(add, name="add", description=ADD, input_schema=NUMBERS)
    return client.beta.messages.tool_runner(messages=START, tools=[tool], **ASKED).until_done().content[-1].text


print(by_messages() if sys.argv[1] == "messages" else by_tool_runner())
