"""Blackjack of gymnasium, told as text.  Rows have a seed, so that all samples of a group are dealt the same cards.

agent.command=[.venv-environments/bin/python,examples/environments/with_gymnasium.py,"{prompt}","{seed}"]
"""

import sys

import gymnasium
from openai import OpenAI

client = OpenAI()  # it finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY
game = gymnasium.make("Blackjack-v1")
(mine, dealer, ace), _ = game.reset(seed=int(sys.argv[2]))
messages, done, reward = [{"role": "system", "content": sys.argv[1]}], False, 0.0
while not done:
    state = f"You have {mine}, the dealer shows {dealer}. Hit or stick?"
    messages.append({"role": "user", "content": state})
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
    (mine, dealer, ace), reward, done, _, _ = game.step(int("hit" in answer.lower()))
client.post("/reward", body={"reward": reward}, cast_to=object)
