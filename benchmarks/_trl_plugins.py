"""The games of `trl_comparison.py` for polyturn: tasks, demonstrations, the tool, the reward."""

from __future__ import annotations

import random
from typing import Any

import _trl_game as game

import polyturn
from polyturn.data.conversations import Conversation

open_box = polyturn.tool(game.open_box)
calculate = polyturn.tool(game.calculate)


def tasks() -> list[polyturn.Task]:
    """Return the training tasks of both sides."""
    return [
        polyturn.Task(id=f"boxes-{i}", data_source="boxes", prompt=(polyturn.Message(role="user", content=game.prompt(i)),))
        for i in range(game.NUM_TASKS)
    ]


def demonstrations(num_conversations: int) -> list[Conversation]:
    """Return demonstrations: products, or games of boxes of which every other one is ragged."""
    if game.kind() == "calculator":
        return [_product(number) for number in range(game.NUM_TASKS, game.NUM_TASKS + num_conversations)]
    chance, dialogues = random.Random(0), []
    for number in range(num_conversations):
        messages = [polyturn.Message(role="user", content=game.prompt(chance.randrange(game.NUM_TASKS)))]
        heard = f"go on with {game.BOXES[0]}"
        while heard != "enough":
            box = heard.rpartition(" ")[2]
            messages.append(polyturn.Message(role="assistant", content=game.opening(box)))
            heard = game.following(box, is_enough=box == "three" if number % 2 else chance.random() < game.ENOUGH_SHARE)
            messages.append(polyturn.Message(role="tool", name="open_box", content=heard))
        dialogues.append(Conversation(messages=(*messages, polyturn.Message(role="assistant", content=game.ANSWER))))
    return dialogues


def _product(number: int) -> Conversation:
    a, b = game.factors(number)
    call = polyturn.ToolCall(id="call_0", name="calculate", arguments={"expression": f"{a} * {b}"})
    return Conversation(
        messages=(
            polyturn.Message(role="user", content=game.prompt(number)),
            polyturn.Message(role="assistant", tool_calls=(call,)),
            polyturn.Message(role="tool", name="calculate", tool_call_id="call_0", content=str(a * b)),
            polyturn.Message(role="assistant", content=str(a * b)),
        )
    )


def corpus() -> list[str]:
    """Return the texts to train the tokenizer on."""
    return [game.prompt(1234567890), game.ANSWER, *map(game.opening, game.BOXES)] * 4


def by_chance(trajectory: Any) -> float:
    """Return a random reward for a trajectory."""
    return game.reward()


def by_product(trajectory: Any) -> float:
    """Return 1 if the last turn ends with the right product or sum."""
    return float(game.is_right(str(trajectory.task.prompt[-1].content), trajectory.text_of("answer")))
