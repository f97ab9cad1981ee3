"""The conversation by ag2, with its own schema of the tool: `loop_ag2.py chat|responses`; prints the answer."""

import asyncio
import sys

from ag2 import Agent, tool
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
from conversation import QUESTION, SYSTEM, add

config = OpenAIConfig if sys.argv[1] == "chat" else OpenAIResponsesConfig
agent = Agent("sums", SYSTEM, config=config(model="policy"), tools=[tool(add)])
print(asyncio.run(agent.ask(QUESTION)).body)
