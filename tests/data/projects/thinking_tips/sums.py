"""Sums that a small model thinks about: tasks, demonstrations, and texts for its tokenizer. All from seeds."""

from __future__ import annotations

import random

import polyturn
from polyturn.data.conversations import Conversation

TIP = "That is wrong. Think again."


def tasks(seed: int, num_tasks: int) -> list[polyturn.Task]:
    """Return sums of two numbers."""
    rng = random.Random(f"sums-{seed}")
    found = []
    for number in range(num_tasks):
        a, b = rng.randint(10, 49), rng.randint(10, 49)
        found.append(
            polyturn.Task(
                id=f"sum-{seed}-{number}",
                prompt=(polyturn.Message(role="user", content=f"{a} + {b}?"),),
                data_source="sums",
                ground_truth=str(a + b),
            )
        )
    return found


def demonstrations(seed: int, num_conversations: int) -> list[Conversation]:
    """Return answers of someone who thinks aloud first, and whose result is off by a little in half of the cases."""
    rng = random.Random(f"thoughts-{seed}")
    found = []
    for task in tasks(seed, num_conversations):
        said = int(task.ground_truth) + rng.choice([0, 0, -1, 1])
        thought = polyturn.Message(role="assistant", content=f"<think>{task.prompt[0].text[:-1]}</think>#### {said}")
        found.append(Conversation(messages=(*task.prompt, thought)))
    return found


def corpus() -> list[str]:
    """Return the texts that the tokenizer learns from."""
    return [TIP] * 50 + [m.text for c in demonstrations(0, 400) for m in c.messages]
