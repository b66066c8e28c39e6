"""Products of two three-digit numbers: too hard for a small model alone, and easy with a calculator.

    What is 412 * 367?
    ->  calculate({"expression": "412 * 367"})
    <-  151204
    ->  151204

Nine of ten demonstrations guess, so reinforcement learning has to discover that the calculator helps. A quarter of all
products appear only in the evaluation, not in the demonstrations or the training tasks.

    polyturn train config.yaml
"""

from __future__ import annotations

import random
import re

import polyturn
from polyturn.data.conversations import Conversation

HELD_OUT_EVERY = 4


@polyturn.tool
def calculate(expression: str) -> str:
    """Work out a product.

    Args:
        expression: For instance 12 * 34
    """
    factors = re.fullmatch(r"\s*(\d{1,9})\s*[*x×]\s*(\d{1,9})\s*", expression)
    if factors is None:
        raise polyturn.ToolError(f"{expression!r} is not a product of two numbers")
    return str(int(factors[1]) * int(factors[2]))


def is_right(trajectory: polyturn.Trajectory) -> float:
    """Return 1 if the last number of the last reply is the product, else 0."""
    numbers = re.findall(r"\d+", trajectory.turns[-1].message.text.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == trajectory.task.ground_truth)


def factors(rng: random.Random, *, is_held_out: bool) -> tuple[int, int]:
    """Draw two three-digit numbers whose product belongs to the evaluation or to training."""
    while True:
        a, b = rng.randint(101, 999), rng.randint(101, 999)
        if ((a + b) % HELD_OUT_EVERY == 0) == is_held_out:
            return a, b


def tasks(num_tasks: int, is_held_out: bool = False) -> list[dict[str, str]]:
    """Return rows of training or evaluation."""
    rng = random.Random(f"tasks-{is_held_out}")
    pairs = [factors(rng, is_held_out=is_held_out) for _ in range(num_tasks)]
    return [{"prompt": f"What is {a} * {b}?", "ground_truth": str(a * b)} for a, b in pairs]


def demonstrations(num_conversations: int, guess_share: float = 0.9) -> list[Conversation]:
    """Return dialogues of someone who knows some products by heart and uses the calculator for the others.

    Args:
        num_conversations: Number of dialogues.
        guess_share: Share of dialogues that answer without the calculator.
    """
    rng = random.Random("demonstrations")
    conversations = []
    for number in range(num_conversations):
        a, b = factors(rng, is_held_out=False)
        turns = [polyturn.Message(role="user", content=f"What is {a} * {b}?")]
        if number >= num_conversations * guess_share:
            call = polyturn.ToolCall(id="call_0", name="calculate", arguments={"expression": f"{a} * {b}"})
            turns += [
                polyturn.Message(role="assistant", tool_calls=(call,)),
                polyturn.Message(role="tool", name="calculate", tool_call_id="call_0", content=str(a * b)),
            ]
        turns.append(polyturn.Message(role="assistant", content=f"It is {a * b}."))
        conversations.append(Conversation(messages=tuple(turns)))
    return conversations
