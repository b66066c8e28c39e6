"""The model's part of a trajectory, as the text that reward functions read, without observations.

answer   the last message, without its reasoning and tool calls
turn     the last message as it was written: <think>…</think>, content, the markup of its calls
turns    every message as it was written, a line break between them
"""

from __future__ import annotations

from typing import Literal

from polyturn.core.messages import Message
from polyturn.core.trajectory import Trajectory

TextOf = Literal["answer", "turn", "turns"]
"""Which of its texts stands for a trajectory."""


def written(trajectory: Trajectory, which: TextOf = "answer") -> str:
    """Return one of the texts of a trajectory; empty if the model wrote nothing."""
    if not trajectory.turns:
        return ""
    if which == "answer":
        return trajectory.turns[-1].message.text
    if which == "turn":
        return as_written(trajectory.turns[-1].message)
    return "\n".join(as_written(turn.message) for turn in trajectory.turns if not turn.is_continued)


def as_written(message: Message) -> str:
    """Return a message with its reasoning in <think> tags and its calls as the model wrote them."""
    reasoning = "" if message.reasoning is None else f"<think>{message.reasoning}</think>"
    return reasoning + message.text + "".join(call.raw for call in message.tool_calls)
