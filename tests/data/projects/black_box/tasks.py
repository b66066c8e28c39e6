"""Small sums, and the text that the tokenizer is trained on."""

from __future__ import annotations

import random

from polyturn.core.messages import Message
from polyturn.core.task import Task


def tasks(*, seed: int = 0, num_tasks: int = 200) -> list[Task]:
    """Return sums of two small numbers."""
    rng = random.Random(seed)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(num_tasks)]
    return [
        Task(id=f"sum-{i}", prompt=(Message(role="user", content=f"What is {a} + {b}?"),), ground_truth=str(a + b))
        for i, (a, b) in enumerate(pairs)
    ]


def corpus() -> list[str]:
    """Return what the tokenizer learns its merges from."""
    said = ["What is 3 + 4?", "That is not it. Try again.", "The answer is 7.", "Solve it.", "Check it.", "Is it right?"]
    return [*said, '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'] * 20
