"""The conversation by langgraph's agent of langchain: `loop_langgraph.py chat|responses|stream`; prints the answer."""

import sys

from conversation import ADD, NUMBERS, QUESTION, SYSTEM, add
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

way = sys.argv[1]
model = ChatOpenAI(model="policy", use_responses_api=way == "responses", streaming=way == "stream")
tool = StructuredTool.from_function(add, name="add", description=ADD, args_schema=NUMBERS)
agent = create_agent(model, tools=[tool], system_prompt=SYSTEM)
print(agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})["messages"][-1].text)
