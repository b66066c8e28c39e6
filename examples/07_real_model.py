"""Teach SmolLM2-135M, a real instruction-tuned model, to add, with a teacher who says "That is wrong. Try again."

The model comes from the package index (93 MB), so no model hub is needed. Two CPU cores are enough. The sums of the
evaluation are never trained on. `--tiny` takes two steps with a small model of random weights, as a check of the setup.
"""

import random
import re
import sys

import polyturn


class Teacher(polyturn.BaseInteraction):
    """Compares the last number of a reply with the sum."""

    async def generate_response(self, instance_id, messages, **kwargs):
        """Return whether the dialogue is over, the teacher's reply, the turn's score, and further values for the record."""
        numbers = re.findall(r"\d+", messages[-1]["content"])
        if numbers and numbers[-1] == kwargs["ground_truth"]:
            return True, "", 1.0, {}
        return False, "That is wrong. Try again.", 0.0, {}


pairs = [(a, b) for a in range(2, 21) for b in range(2, 21)]
random.Random(0).shuffle(pairs)
rows = [{"prompt": f"What is {a} + {b}? Answer with one number.", "ground_truth": str(a + b)} for a, b in pairs]

TINY = {"steps": 2, "groups_per_step": 2, "group_size": 4}
REAL = {"steps": 16, "groups_per_step": 8, "group_size": 8, "lr": 1e-5}
run = polyturn.train(
    model=polyturn.tiny("Qwen/Qwen3-0.6B") if "--tiny" in sys.argv else "smollm2",
    tasks=rows[64:],
    eval_tasks=rows[:8] if "--tiny" in sys.argv else rows[:64],
    interaction=Teacher,
    max_turns=2,
    max_tokens_per_turn=12,
    name="sums",
    **(TINY if "--tiny" in sys.argv else REAL),
)
print(run)
