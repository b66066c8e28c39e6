"""ToolContext: facts about the calling episode, for tools whose `execute` asks for `agent_data`.

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        seen = agent_data.extra_fields.setdefault("seen", [])

One object per episode, made when the first such tool is called, so that tools may leave things for one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class ToolContext:
    """An episode as its tools see it."""

    request_id: str
    """The episode's id."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation up to the turn that calls, in OpenAI's form; a copy."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's kwargs of each tool."""
    image_data: list[Any] | None = None
    video_data: list[Any] | None = None
    tool_rewards: list[float] = field(default_factory=list)
    """The step rewards so far."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """For the tools to use."""
