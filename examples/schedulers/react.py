"""React: tool calls as text inside one assistant message, in the form of ReAct (Yao et al. 2022).

    sampled   Thought: add them.
              Action: calculator
              Action Input: {"expression": "2+2"}
    shown     Observation: 4                              masked, in the same assistant message
    sampled   Thought: done. Final Answer: 4

If the chat template does not render tools, the scheduler adds them and the format of a call to the system message. The tools
are the run's, and a failed call is an observation like any other. Text after the call, such as an invented observation, is
removed and counted.

The example shows `show_tools`, `episode.call_tools` with a call that the scheduler parsed, and `episode.go_on`.

    rollout:
      scheduler: examples/schedulers/react.py:React
      tools: {functions: ["tools.py:calculator"]}
      limits: {max_turns: 8}
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyturn import Episode, Message, MultiTurnScheduler, OpenTurn, ToolCall

_CALL = re.compile(
    r"Action:[ \t]*(?P<name>[^\n]*)\n[ \t]*Action Input:[ \t]*(?P<input>.*?)(?=\s*\nObservation:|\s*\Z)", re.DOTALL
)
FORM = """You can use these tools; the JSON schema of a tool's arguments stands below its name:

{tools}

To use a tool, write these lines and wait for the observation:
Thought: why you need the tool
Action: one of {names}
Action Input: the arguments as a JSON object

When you know the answer, write:
Final Answer: the answer"""


class React(MultiTurnScheduler):
    """A scheduler that runs the first `Action:` of a turn and continues the message after the observation."""

    stateless = True
    scores_turns = False
    shows_tools = True

    def __init__(self, *, prefix: str = "\nObservation: ", suffix: str = "\n") -> None:
        self.prefix = prefix
        self.suffix = suffix

    def show_tools(self, episode: Episode) -> None:
        """Add the tools and the format of a call to the system message, unless the chat template renders tools.

        If the template has no system role, they are put before the first user message.
        """
        schemas, template = episode.tool_schemas, episode.codec.template
        if not schemas or template.shows_tools(schemas):
            return
        text, messages = describe(schemas), list(episode.messages)
        if messages[0].role != "system":
            system = Message(role="system", content=text)
            if text in (template.try_render([system, *messages]) or ""):
                episode.rewrite([system, *messages])
                return
        first = messages[0]
        content = f"{text}\n\n{first.content}" if isinstance(first.content, str) else (_part(text), *first.content)
        episode.rewrite([dataclasses.replace(first, content=content), *messages[1:]])

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Run the call; a turn without one ends the episode."""
        if (match := _CALL.search(turn.text)) is None:
            return None
        kept = turn.text[: match.end()]
        call = read_call(match["name"].strip(), match["input"], schemas=episode.tool_schemas, id=f"call_{turn.index}")
        turn.message = dataclasses.replace(turn.message, tool_calls=(dataclasses.replace(call, raw=match[0]),))
        reply = await episode.call_tools(turn)
        text = " ".join(message.text for message in reply.messages)
        return episode.go_on(f"{self.prefix}{text}{self.suffix}", keep=kept)


def describe(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return the tools of a run and the format of a call, as instructions to the model.

    Args:
        schemas: The tools' schemas in OpenAI's format: `{"type": "function", "function": {"name": ..., ...}}`.
    """
    tools = [schema["function"] for schema in schemas]
    lines = [f"{t['name']}: {t.get('description', '')}\n  {json.dumps(t.get('parameters', {}))}" for t in tools]
    return FORM.format(tools="\n".join(lines), names=", ".join(t["name"] for t in tools))


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": f"{text}\n\n"}


def read_call(name: str, written: str, *, schemas: Sequence[Mapping[str, Any]], id: str) -> ToolCall:
    """Return a call of the tool `name`; its input is a JSON object, or the value of the tool's only parameter."""
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):  # a number with thousands of digits; a thousand nested brackets
        arguments = None
    if isinstance(arguments, dict):
        return ToolCall(id=id, name=name, arguments=arguments, raw=written)
    of: Mapping[str, Any] = next((s["function"] for s in schemas if s["function"]["name"] == name), {})
    parameters = list(of.get("parameters", {}).get("properties", {}))
    if len(parameters) == 1:
        return ToolCall(id=id, name=name, arguments={parameters[0]: written.strip()}, raw=written)
    error = f"Action Input must be a JSON object with {parameters}" if parameters else None
    return ToolCall(id=id, name=name, arguments={}, raw=written, error=error)
