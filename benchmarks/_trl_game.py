"""The games of `trl_comparison.py`: tasks, a tool, a reward. Both sides import this module; the variable GAME selects one.

A model of random weights learns to open boxes:

    user   Task 17. Open the boxes.                 model  <words of box one> <tool_call>open(box="one")</tool_call>
    tool   go on with two                           model  <words of box two> <tool_call>open(box="two")</tool_call>
    tool   enough                                   model  That is all. The answer is known. #### 7

The model has memorized the text before each box, so that both sides sample the same lengths at temperature 1 without a limit
on tokens. `even`: always three boxes. `ragged`: a game ends after 35 % of the boxes of each kind, at equal distances, and
after the last box, so that the lengths differ and their sum hardly depends on the order.

A pretrained model plays two other games. `calculator`: it multiplies two numbers with one tool call, which it learnt from a
few demonstrations, in two turns of equal lengths. `sums`: it adds two numbers in one turn, without a tool or demonstrations,
so the lengths differ.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable

BOXES = ("one", "two", "three", "four", "five")
WORDS = {
    "one": "I begin with the first box, which stands near the door, and I look into it.",
    "two": "The second box is higher up.",
    "three": "Now the third box; it is heavy and old, and its lid is hard to lift, but in time I see what lies in it.",
    "four": "The fourth box is small and quickly opened.",
    "five": "The last box lies under all the others, so I move these aside one after the other, and open it too.",
}
ANSWER = "That is all there is in the boxes, and the answer is known. #### 7"
CALL = '<tool_call>\n{"name": "open_box", "arguments": {"box": "%s"}}\n</tool_call>'
ENOUGH_SHARE = 0.35
NUM_TASKS = 4096

_opened: dict[str, int] = {}
_chance = random.Random(int(os.environ.get("GAME_SEED", "0")))


def kind() -> str:
    """Return the name of the game of this process."""
    return os.environ.get("GAME", "even")


def tools() -> list[Callable[[str], str]]:
    """Return the tools of the game."""
    return {"sums": [], "calculator": [calculate]}.get(kind(), [open_box])


def max_tokens() -> int:
    """Return the largest number of tokens of a turn."""
    return {"sums": 48, "calculator": 192}.get(kind(), 1024)


def factors(number: int) -> tuple[int, int]:
    """Return two three-digit numbers, drawn for a task."""
    rng = random.Random(number)
    return rng.randint(101, 999), rng.randint(101, 999)


def prompt(number: int) -> str:
    """Return the user's message of a task."""
    if kind() in ("calculator", "sums"):
        a, b = factors(number)
        return f"What is {a} {'*' if kind() == 'calculator' else '+'} {b}?"
    return f"Task {number}. Open the boxes."


def is_right(question: str, answer: str) -> bool:
    """Return whether the last number of `answer` is the product or sum that `question` asks for."""
    a, operation, b = question.removeprefix("What is ").removesuffix("?").split()
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and int(numbers[-1]) == (int(a) * int(b) if operation == "*" else int(a) + int(b))


def calculate(expression: str) -> str:
    """
    Work out a product.

    Args:
        expression: For instance 12 * 34
    """
    a, _, b = expression.partition("*")
    return str(int(a) * int(b)) if a.strip().isdigit() and b.strip().isdigit() else "not a product"


def opening(box: str) -> str:
    """Return the memorized text for opening a box, including the call."""
    return f"{WORDS[box]}\n{CALL % box}"


def following(box: str, *, is_enough: bool) -> str:
    """Return the tool's answer."""
    at = BOXES.index(box)
    return "enough" if is_enough or at == len(BOXES) - 1 else f"go on with {BOXES[at + 1]}"


def open_box(box: str) -> str:
    """
    Open a box.

    Args:
        box: Which box to open.
    """
    is_ragged = kind() == "ragged"
    number = _opened[box] = _opened.get(box, 0) + 1
    is_its_turn = int(number * ENOUGH_SHARE) > int((number - 1) * ENOUGH_SHARE)
    return following(box, is_enough=is_its_turn if is_ragged else box == "three")


def reward() -> float:
    """Return a reward that differs within a group for any texts, so that every sample is trained."""
    return _chance.random()
