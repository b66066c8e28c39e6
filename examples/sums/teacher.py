"""A teacher who asks for sums and says "That is wrong. Try again." The tasks of the evaluation are never trained on."""

from __future__ import annotations

import random
import re
from typing import Any

import polyturn


class Teacher(polyturn.BaseInteraction):
    """Compares the last number of a reply with the sum."""

    async def generate_response(self, instance_id, messages, **kwargs):
        """Return whether the dialogue is over, the teacher's reply, the turn's score, and further values for the record."""
        numbers = re.findall(r"\d+", messages[-1]["content"])
        if numbers and numbers[-1] == kwargs["ground_truth"]:
            return True, "", 1.0, {}
        return False, "That is wrong. Try again.", 0.0, {}


def sums(*, seed: int, num_held_out: int, is_held_out: bool, largest: int = 20) -> list[dict[str, Any]]:
    """Return the rows of training or evaluation: sums of two numbers from 2 to `largest`, in a seeded order."""
    pairs = [(a, b) for a in range(2, largest + 1) for b in range(2, largest + 1)]
    random.Random(seed).shuffle(pairs)
    chosen = pairs[:num_held_out] if is_held_out else pairs[num_held_out:]
    return [{"prompt": f"What is {a} + {b}? Answer with one number.", "ground_truth": str(a + b)} for a, b in chosen]
