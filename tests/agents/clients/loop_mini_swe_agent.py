"""The conversation by mini-swe-agent, whose tool is a shell: `loop_mini_swe_agent.py tools|text`; prints the answer."""

import sys
from importlib.resources import files

import yaml
from conversation import QUESTION
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

kind, name = (LitellmModel, "mini") if sys.argv[1] == "tools" else (LitellmTextbasedModel, "mini_textbased")
settings = yaml.safe_load((files("minisweagent") / "config" / f"{name}.yaml").read_text())
model = kind(model_name="openai/policy", cost_tracking="ignore_errors", **settings["model"])
names = ("system_template", "instance_template")
agent = DefaultAgent(model, LocalEnvironment(), **{name: settings["agent"][name] for name in names})
print(agent.run(QUESTION)["submission"].strip())
