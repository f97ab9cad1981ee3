"""The conversation by smolagents, in its own words: `loop_smolagents.py tools|code`; prints the answer."""

import sys

from conversation import QUESTION, add
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

kind = ToolCallingAgent if sys.argv[1] == "tools" else CodeAgent
agent = kind(tools=[tool(add)], model=OpenAIModel("policy"), max_steps=3, verbosity_level=0)
print(agent.run(QUESTION))
