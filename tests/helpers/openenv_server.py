"""A server of openenv-core with a game, as people write them; it runs in an environment that has the package."""

from random import Random

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    text: str


class Heard(Observation):
    text: str


class Guessing(Environment):
    """A number from 1 to 9 in four guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, **_):
        self.number, self.left = Random(seed).randint(1, 9), 4
        return Heard(text="Guess my number, from 1 to 9.")

    def step(self, action, **_):
        guess, self.left = int(action.text), self.left - 1
        text = "It is higher." if guess < self.number else "It is lower."
        return Heard(text=text, done=guess == self.number or not self.left, reward=float(guess == self.number))


app = create_fastapi_app(Guessing, Say, Heard, max_concurrent_envs=64)
