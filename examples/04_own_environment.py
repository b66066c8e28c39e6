"""An environment of your own: `reset`, `step` and `close`, as games have them. `--tiny` runs on a laptop."""

import random
import re
import sys

import polyturn


class Game:
    """A number from 1 to 9 to be found from hints."""

    def reset(self, *, seed):
        """Begin an episode; the same seed is the same number. What is returned is shown to the model."""
        self.number = random.Random(seed).randint(1, 9)
        return "Which number is it?"

    def step(self, action):
        """Take what the model wrote; return what it is shown, its reward, whether the episode is over, and anything else."""
        found = re.search(r"\d+", action)
        if found is None:
            return "That is no number.", 0.0, False, {}
        guess = int(found[0])
        return "lower" if guess > self.number else "higher", float(guess == self.number), guess == self.number, {}

    def close(self):
        """Free what the episode took; called once, whatever ended it."""


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
