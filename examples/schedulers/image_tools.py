"""ImageTools: shows tool results in a user message, including images.

    assistant  <tool_call>{"name": "image_zoom_in_tool", "arguments": {"bbox_2d": [0, 0, 64, 64]}}</tool_call>
    user       <tool_response> [image] the crop </tool_response>

It is for templates whose tool messages accept only text. The images are part of the message, so the engine, the training
sample and the record have the same images.

The example shows a `step` that handles one case and leaves the others to the default.

    rollout: {scheduler: examples/schedulers/image_tools.py:ImageTools, tools: {file: tools.yaml}, limits: {max_turns: 5}}
"""

from __future__ import annotations

from typing import Any

from polyturn import Episode, Message, MultiTurnScheduler, OpenTurn, Reply


class ImageTools(MultiTurnScheduler):
    """A scheduler that answers tool calls with a user message."""

    stateless = True
    scores_turns = False

    def __init__(self, *, opening: str = "<tool_response>", closing: str = "</tool_response>") -> None:
        self.opening = opening
        self.closing = closing

    async def step(self, episode: Episode, turn: OpenTurn) -> Any:
        """Run the calls and show their results; without calls, answer as the default does."""
        if not turn.message.tool_calls:
            return await super().step(episode, turn)
        reply = await episode.call_tools(turn)
        parts: list[dict[str, Any]] = []
        for message in reply.messages:
            content = message.content
            content_parts = (
                [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]
            )
            parts += [{"type": "text", "text": self.opening}, *content_parts, {"type": "text", "text": self.closing}]
        if all(part["type"] == "text" for part in parts):
            return Reply(messages=(Message(role="user", content="".join(part["text"] for part in parts)),))
        return Reply(messages=(Message(role="user", content=tuple(parts)),))
