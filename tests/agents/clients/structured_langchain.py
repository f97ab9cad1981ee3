"""Structured output by langchain, in the ways that are named: prints the result of each."""

import json
import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    total: int


STRATEGIES = {"agent_provider": ProviderStrategy, "agent_tool": ToolStrategy}

found = []
for way in sys.argv[1:]:
    question, model = f"{way}: 12 + 3 as JSON?", ChatOpenAI(model="policy")
    if way in STRATEGIES:
        agent = create_agent(model, response_format=STRATEGIES[way](Sum))
        result = agent.invoke({"messages": [{"role": "user", "content": question}]})["structured_response"]
    else:
        result = model.with_structured_output(Sum, method=way).invoke(question)
    found.append(result.total)
print(json.dumps(found))
