"""The events of an episode in the debug log, a line for each, with the episode's id.

    g5/2 starts: task gsm8k-17 (openai/gsm8k), 212 prompt tokens, 2 tools, interaction gsm8k
    g5/2 turn 0: 341 tokens, stop, 1.82 s: "Let me add. <tool_call>{…"
    g5/2 turn 0: calls add({"a": 2, "b": 2})
    g5/2 turn 0: add answered in 3 ms: "4"
    g5/2 turn 1: interaction answered (score 0): "Your answer is not correct. …"
    g5/2 ends: max_turns after 3 turns
    g5/2 reward 1: outcome 1, interaction 0

Separate so that the loop has one line for each event. A caller asks `is_on()` first: off, an event costs one look
at the logger's level, and no text is made. Text of the model and of the environment is cut and quoted, so a line is a line.
"""

from __future__ import annotations

import json
import logging

from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import ToolCall
from polyturn.core.task import Task
from polyturn.core.trajectory import Trajectory
from polyturn.rollout.open_turn import OpenTurn, Reply

logger = logging.getLogger(__name__)

MAX_TEXT = 160
"""Characters of a text that a line shows."""


def is_on() -> bool:
    """Return whether debug lines are written at all."""
    return logger.isEnabledFor(logging.DEBUG)


def started(id: str, *, task: Task, num_tokens: int, num_tools: int) -> None:
    """Log the prompt that an episode begins with."""
    partner = "" if task.interaction is None else f", interaction {task.interaction.name}"
    source = task.data_source or "no data source"
    logger.debug(
        "%s starts: task %s (%s), %d prompt tokens, %d tools%s", id, task.id, source, num_tokens, num_tools, partner
    )


def sampled(id: str, turn: OpenTurn) -> None:
    """Log a completion, and the calls that were read in it."""
    took = turn.timings.get("generate", 0.0)
    reason = turn.finish_reason.value
    logger.debug("%s turn %d: %d tokens, %s, %.2f s: %s", id, turn.index, turn.num_tokens, reason, took, short(turn.text))
    if turn.message.tool_calls:
        calls = "; ".join(map(_call, turn.message.tool_calls))
        logger.debug("%s turn %d: calls %s", id, turn.index, calls)


def tools_answered(id: str, turn: OpenTurn) -> None:
    """Log the results of a turn's calls."""
    for result in turn.tool_results:
        how = "failed" if result.error is not None else "answered"
        reward = "" if result.reward is None else f" (reward {result.reward:g})"
        content = result.content if isinstance(result.content, str) else repr(result.content)
        milliseconds = 1000 * result.duration_s
        logger.debug(
            "%s turn %d: %s %s in %.0f ms%s: %s",
            id, turn.index, short(result.name, quoted=False), how, milliseconds, reward, short(content),
        )  # fmt: skip


def interaction_answered(id: str, turn: OpenTurn, reply: Reply) -> None:
    """Log the interaction's reply, and its score if it gave one."""
    score = turn.scores.get("interaction")
    notes = ["no score" if score is None else f"score {score:g}", *(["ends the episode"] if reply.is_done else [])]
    text = " ".join(m.text for m in reply.messages)
    logger.debug("%s turn %d: interaction answered (%s): %s", id, turn.index, ", ".join(notes), short(text))


def limited(id: str, *, turn: int, reason: StopReason) -> None:
    """Log the limit that forbids another turn."""
    logger.debug("%s limit: %s forbids turn %d", id, reason.value, turn)


def ended(trajectory: Trajectory) -> None:
    """Log how an episode ended, and its reward."""
    why = "" if trajectory.error is None else f": {short(trajectory.error, quoted=False)}"
    took = trajectory.metrics.get("duration_s", 0.0)
    logger.debug(
        "%s ends: %s after %d turns, %.2f s%s",
        trajectory.id, trajectory.stop_reason.value, len(trajectory.turns), took, why,
    )  # fmt: skip
    if trajectory.reward is not None:
        parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.reward.components.items())
        logger.debug("%s reward %g: %s", trajectory.id, trajectory.reward.total, parts)


def short(text: str, *, quoted: bool = True) -> str:
    """Return the beginning of a text on one line, nothing in it that a terminal would obey."""
    shown = _cut(json.dumps(text[: MAX_TEXT + 1], ensure_ascii=False)[1:-1])
    return f'"{shown}"' if quoted else shown


def _cut(text: str) -> str:
    cut = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return "".join(c if c.isprintable() else "�" for c in cut)


def _call(call: ToolCall) -> str:
    if call.error is not None:
        return f"{short(call.raw or call.name)}, which cannot be read ({short(call.error, quoted=False)})"
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False, default=str)
    return f"{short(call.name, quoted=False)}({_cut(arguments)})"
