"""Drives the endpoint with the stock package openai-agents; prints JSON."""

import asyncio
import json

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


async def main():
    client = AsyncOpenAI(max_retries=0)
    out = []
    for model in (OpenAIChatCompletionsModel("policy", client), OpenAIResponsesModel("policy", client)):
        agent = Agent(name="sums", instructions=f"You add with {type(model).__name__}.", tools=[add], model=model)
        out.append((await Runner.run(agent, "12 + 3?")).final_output)
        streamed = Runner.run_streamed(agent, "And 12 + 3?")
        async for _ in streamed.stream_events():
            pass
        out.append(streamed.final_output)
    print(json.dumps(out))


asyncio.run(main())
