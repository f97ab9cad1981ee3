"""The conversation by litellm: `loop_litellm.py openai|anthropic`, whose API it speaks; prints the answer."""

import json
import sys

from conversation import FUNCTION, QUESTION, SYSTEM, add
from litellm import completion

messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
while True:
    answer = completion(f"{sys.argv[1]}/policy", messages, tools=[{"type": "function", "function": FUNCTION}])
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = add(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
