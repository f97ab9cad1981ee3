"""A game on a server of OpenEnv that runs already: `uvicorn my_game.server.app:app --port 8000`.  Rows have a seed.

agent.command=[.venv-environments/bin/python,examples/environments/with_openenv.py,"http://127.0.0.1:8000","{seed}"]
"""

import sys

from openai import OpenAI
from openenv.core import GenericEnvClient

client, messages = OpenAI(), []  # it finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY
with GenericEnvClient(base_url=sys.argv[1]).sync() as game:
    found = game.reset(seed=int(sys.argv[2]))
    while not found.done:
        messages.append({"role": "user", "content": found.observation["text"]})
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        messages.append({"role": "assistant", "content": answer})
        found = game.step({"text": answer})
client.post("/reward", body={"reward": found.reward}, cast_to=object)
