"""Write your own environment with `reset`, `step` and `close`, as in Gymnasium. `--tiny` runs on a laptop."""

import random
import re
import sys

import polyturn


class Game:
    """A game: find a number from 1 to 9 from hints."""

    def reset(self, *, seed):
        """Start an episode and return the first observation; the same seed gives the same number."""
        self.number = random.Random(seed).randint(1, 9)
        return "Which number is it?"

    def step(self, action):
        """Apply the model's text; return the observation, the reward, whether the episode is over, and further info."""
        number = re.search(r"\d+", action)
        if number is None:
            return "That is not a number.", 0.0, False, {}
        guess = int(number[0])
        return "lower" if guess > self.number else "higher", float(guess == self.number), guess == self.number, {}

    def close(self):
        """Release the episode's resources; called once, however the episode ended."""


TINY = {"steps": 2, "groups_per_step": 2, "group_size": 4, "max_tokens_per_turn": 32}
REAL = {"steps": 100, "groups_per_step": 16}
run = polyturn.train(
    model=polyturn.tiny("Qwen/Qwen3-0.6B") if "--tiny" in sys.argv else "Qwen/Qwen3-0.6B",
    env={"name": Game, "prompt": "Find a number from 1 to 9. Write nothing but a number.", "tasks": 64},
    max_turns=4,
    name="own_environment",
    **(TINY if "--tiny" in sys.argv else REAL),
)
print(run)
