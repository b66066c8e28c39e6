"""ToolContext: facts about the calling episode, for tools whose `execute` takes `agent_data`.

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        seen = agent_data.extra_fields.setdefault("seen", [])

The first call of such a tool creates the episode's only `ToolContext`; the episode's tools share data through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class ToolContext:
    """The facts about an episode that its tools may use."""

    request_id: str
    """The episode's id."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation up to and including the calling turn, in OpenAI's format; a copy."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The row's kwargs for each tool, by the tool's name."""
    image_data: list[Any] | None = None
    video_data: list[Any] | None = None
    tool_rewards: list[float] = field(default_factory=list)
    """The step rewards so far."""
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Free for use by tools."""
