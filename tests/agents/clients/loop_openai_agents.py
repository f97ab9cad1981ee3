"""The conversation by openai-agents: `loop_openai_agents.py chat|responses`; prints the answer."""

import json
import sys

from agents import Agent, FunctionTool, Runner, set_default_openai_api, set_tracing_disabled
from conversation import ADD, NUMBERS, QUESTION, SYSTEM, add


async def called(_, arguments):
    return add(**json.loads(arguments))


set_tracing_disabled(True)
set_default_openai_api("chat_completions" if sys.argv[1] == "chat" else "responses")
tool = FunctionTool("add", ADD, NUMBERS, called, strict_json_schema=False)
print(Runner.run_sync(Agent("sums", instructions=SYSTEM, tools=[tool]), QUESTION).final_output)
