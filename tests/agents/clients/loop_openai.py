"""The conversation by openai: `loop_openai.py chat|stream|responses`; prints the answer."""

import json
import sys

from conversation import FUNCTION, QUESTION, SYSTEM, add
from openai import OpenAI

client = OpenAI()
START = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def of_chat(messages):
    tools = [{"type": "function", "function": FUNCTION}]
    if sys.argv[1] == "chat":
        return client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message
    with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
        stream.until_done()
        return stream.get_final_completion().choices[0].message


def by_chat():
    messages = list(START)
    while True:
        message = of_chat(messages)
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def by_responses():
    items = list(START)
    while True:
        response = client.responses.create(model="policy", input=items, tools=[{"type": "function", **FUNCTION}])
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = add(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


print(by_responses() if sys.argv[1] == "responses" else by_chat())
