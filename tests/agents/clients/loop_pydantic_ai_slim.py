"""The conversation by pydantic-ai: `loop_pydantic_ai_slim.py anthropic|openai-chat|openai-responses`."""

import sys

from conversation import ADD, NUMBERS, QUESTION, SYSTEM, add
from pydantic_ai import Agent, Tool

agent = Agent(f"{sys.argv[1]}:policy", system_prompt=SYSTEM, tools=[Tool.from_schema(add, "add", ADD, NUMBERS)])
print(agent.run_sync(QUESTION).output)
