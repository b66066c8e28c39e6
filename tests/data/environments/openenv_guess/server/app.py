"""An OpenEnv environment: guess a number that the seed decides; raises for 13 and ends its own process for 666."""

import os
import random

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = random.Random(seed).randint(1, 9)
        self._state = State(episode_id=episode_id)
        return Hint(hint="Guess from 1 to 9.", metadata={"solution": self._number})

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.number == 13:
            raise RuntimeError("unlucky")
        if action.number == 666:
            os._exit(3)
        if action.number == self._number:
            return Hint(hint="Right.", done=True, reward=1.0)
        return Hint(hint="higher" if action.number < self._number else "lower", reward=-0.1)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=2)
