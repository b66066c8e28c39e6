"""A calculator whose keys have lost their signs: only the reward says which key multiplies.

    What is 53 * 40?
    ->  press({"keys": "53 A 40"})
    <-  2120
    ->  It is 2120.

The demonstrations press every key as often at every sign, so a third of their answers are right, and a model that always
presses the same key gets no more. Reinforcement learning has to find out which key belongs to which sign. A quarter of all
pairs of numbers appear only in the evaluation: neither the demonstrations nor the training tasks have them.

    polyturn train config.yaml
"""

from __future__ import annotations

import itertools
import operator
import random
import re

import polyturn
from polyturn.data.conversations import Conversation

HELD_OUT_EVERY = 4
OPERATIONS = {"A": operator.mul, "B": operator.add, "C": operator.sub}
KEY_OF = {"*": "A", "+": "B", "-": "C"}


@polyturn.tool
def press(keys: str) -> str:
    """Use a calculator whose keys have lost their signs.

    Args:
        keys: A number, one of A, B and C, and a number
    """
    pressed = re.fullmatch(r"\s*(\d{1,9})\s*([ABC])\s*(\d{1,9})\s*", keys)
    if pressed is None:
        raise polyturn.ToolError(f"{keys!r} is not a number, one of A, B and C, and a number")
    return str(OPERATIONS[pressed[2]](int(pressed[1]), int(pressed[3])))


def is_right(trajectory: polyturn.Trajectory) -> float:
    """1 if the last number of the last reply is the result, else 0."""
    numbers = re.findall(r"-?\d+", trajectory.turns[-1].message.text.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == trajectory.task.ground_truth)


def two_numbers(rng: random.Random, *, is_held_out: bool) -> tuple[int, int]:
    """Two two-digit numbers, the larger first, that belong to the evaluation or to the training."""
    while True:
        smaller, larger = sorted(rng.sample(range(11, 100), 2))
        if ((smaller + larger) % HELD_OUT_EVERY == 0) == is_held_out:
            return larger, smaller


def tasks(num_tasks: int, is_held_out: bool = False) -> list[dict[str, str]]:
    """The rows of training or of the evaluation, the signs in turn."""
    rng = random.Random(f"tasks-{is_held_out}")
    rows = []
    for _, sign in zip(range(num_tasks), itertools.cycle(KEY_OF)):
        a, b = two_numbers(rng, is_held_out=is_held_out)
        rows.append({"prompt": f"What is {a} {sign} {b}?", "ground_truth": str(OPERATIONS[KEY_OF[sign]](a, b))})
    return rows


def demonstrations(num_conversations: int, guess_share: float = 0.0) -> list[Conversation]:
    """Dialogues of someone who does not know the keys, and presses each of them as often at each sign.

    Args:
        num_conversations: How many.
        guess_share: Which share of them answers right without the calculator.
    """
    rng = random.Random("demonstrations")
    conversations = []
    for number, (sign, key) in zip(range(num_conversations), itertools.cycle(itertools.product(KEY_OF, OPERATIONS))):
        has_calculator = number >= guess_share * num_conversations
        a, b = two_numbers(rng, is_held_out=False)
        turns = [polyturn.Message(role="user", content=f"What is {a} {sign} {b}?")]
        result = OPERATIONS[key if has_calculator else KEY_OF[sign]](a, b)
        if has_calculator:
            call = polyturn.ToolCall(id="call_0", name="press", arguments={"keys": f"{a} {key} {b}"})
            turns += [
                polyturn.Message(role="assistant", tool_calls=(call,)),
                polyturn.Message(role="tool", name="press", tool_call_id="call_0", content=str(result)),
            ]
        turns.append(polyturn.Message(role="assistant", content=f"It is {result}."))
        conversations.append(Conversation(messages=tuple(turns)))
    return conversations
