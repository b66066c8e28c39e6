"""React: tool calls as text inside one assistant message, in the form of ReAct (Yao et al. 2022).

    sampled   Thought: add them.
              Action: calculator
              Action Input: {"expression": "2+2"}
    shown     Observation: 4                              masked, in the same assistant message
    sampled   Thought: done. Final Answer: 4

The tools are the run's own, and a call that fails is an observation like any other. What the model makes up behind its
call (an observation of its own) is cut away and counted.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn.core.messages import ToolCall
from polyturn.rollout.calls import keeps_deadlines
from polyturn.rollout.episode import Episode
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import MultiTurnScheduler
from polyturn.rollout.schedulers.registry import schedulers

_CALL = re.compile(
    r"Action:[ \t]*(?P<name>[^\n]*)\n[ \t]*Action Input:[ \t]*(?P<input>.*?)(?=\s*\nObservation:|\s*\Z)", re.DOTALL
)


@schedulers.register("react")
@keeps_deadlines
class React(MultiTurnScheduler):
    """Runs the first `Action:` of a turn and lets the message go on behind what it came to."""

    stateless = True

    def __init__(self, *, prefix: str = "\nObservation: ", suffix: str = "\n") -> None:
        self.prefix = prefix
        self.suffix = suffix

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Run the call; a turn without one ends the episode."""
        if (found := _CALL.search(turn.text)) is None:
            return None
        kept = turn.text[: found.end()]
        call = read_call(found["name"].strip(), found["input"], schemas=episode.tool_schemas, id=f"call_{turn.index}")
        turn.message = dataclasses.replace(turn.message, tool_calls=(call,))
        reply = await episode.call_tools(turn)
        said = " ".join(message.text for message in reply.messages)
        return episode.go_on(f"{self.prefix}{said}{self.suffix}", keep=kept)


def read_call(name: str, written: str, *, schemas: Sequence[Mapping[str, Any]], id: str) -> ToolCall:
    """Return a call of the tool `name`: its input is a JSON object, or the value of the tool's only parameter."""
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):  # a number of thousands of digits, a thousand brackets
        arguments = None
    if isinstance(arguments, dict):
        return ToolCall(id=id, name=name, arguments=arguments, raw=written)
    of: Mapping[str, Any] = next((s["function"] for s in schemas if s["function"]["name"] == name), {})
    parameters = list(of.get("parameters", {}).get("properties", {}))
    if len(parameters) == 1:
        return ToolCall(id=id, name=name, arguments={parameters[0]: written.strip()}, raw=written)
    error = f"Action Input must be a JSON object with {parameters}" if parameters else None
    return ToolCall(id=id, name=name, arguments={}, raw=written, error=error)
