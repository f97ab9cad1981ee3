"""A game of textarena for one player.  Rows have a seed, so that all samples of a group play the same game.

agent.command=[.venv-environments/bin/python,examples/environments/with_textarena.py,GuessTheNumber-v0-raw,"{seed}"]
"""

import sys

import textarena
from openai import OpenAI

client = OpenAI()  # it finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY
game = textarena.make(sys.argv[1])
game.reset(num_players=1, seed=int(sys.argv[2]))
messages, done = [], False
while not done:
    player, heard = game.get_observation()
    news = "\n".join(text for speaker, text, _ in heard if speaker != player)
    messages.append({"role": "user", "content": news})
    answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
    done, _ = game.step(answer)
rewards, _ = game.close()
client.post("/reward", body={"reward": rewards[0]}, cast_to=object)
