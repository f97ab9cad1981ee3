"""smolagents calculates, and posts its reward: as agent.command, from the folder of the repository,

[.venv-agents/bin/python,tests/agents/clients/smolagents_calculator.py,"{prompt}","{ground_truth}"]
"""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from calculator import TOOLS, Calculator  # noqa: E402
from smolagents import OpenAIModel, ToolCallingAgent, tool  # noqa: E402

question, truth = sys.argv[1:]
tools = [tool(getattr(Calculator(), name)) for name in TOOLS.values()]
agent = ToolCallingAgent(tools=tools, model=OpenAIModel(os.environ["OPENAI_MODEL"]), max_steps=2, verbosity_level=0)
agent.prompt_templates["system_prompt"] = ""
answer = agent.run(question)
reward = json.dumps({"reward": float(str(answer) == truth)}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/reward", reward, key))
