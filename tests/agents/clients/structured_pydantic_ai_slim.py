"""Structured output by pydantic-ai, by PROVIDER-WAY of the words: prints the result of each."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput


class Sum(BaseModel):
    total: int


KINDS = {"native": NativeOutput, "prompted": PromptedOutput, "tool": ToolOutput}

found = []
for word in sys.argv[1:]:
    provider, _, way = word.rpartition("-")
    agent = Agent(f"{provider}:policy", output_type=KINDS[way](Sum))
    found.append(agent.run_sync(f"{word}: 12 + 3?").output.total)
print(json.dumps(found))
