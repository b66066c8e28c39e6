"""People who want to know what a sum is, and who are content once they were told."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import polyturn


def tasks(seed: int, num_tasks: int) -> list[polyturn.Task]:
    """Return tasks whose user wants to know a sum."""
    rng = random.Random(f"people-{seed}")
    found = []
    for number in range(num_tasks):
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        kwargs = {"name": "user", "goal": f"Find out what {a} + {b} is."}
        found.append(
            polyturn.Task(
                id=f"sum-{number}",
                prompt=(polyturn.Message(role="user", content=f"What is {a} + {b}? Answer as #### number."),),
                ground_truth=str(a + b),
                interaction=polyturn.InteractionRef(name="user", kwargs=kwargs),
            )
        )
    return found


def has_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last thing that the model said is the sum that was asked for."""
    asked = re.search(r"(\d+) \+ (\d+)", str(messages[0]["content"]))
    said = next(str(m["content"]) for m in reversed(messages) if m["role"] == "assistant")
    answers = re.findall(r"#### (-?\d+)", said)
    return asked is not None and bool(answers) and int(answers[-1]) == int(asked[1]) + int(asked[2])
