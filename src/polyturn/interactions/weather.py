"""WeatherInteraction: ends after one turn, with a score of 1.0 if a tool has answered, else 0.0.

It is a small example of an interaction that reads tool results.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from polyturn.interactions.base import BaseInteraction

NO_TOOL_CALL = "no tool call"


class WeatherInteraction(BaseInteraction):
    """Scores 1.0 if the conversation has a tool result, else 0.0, and always ends the conversation."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any) -> str:
        """Begin one episode."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._instance_dict[instance_id] = {"response": NO_TOOL_CALL, "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Score the conversation by its last tool message, and end it."""
        last: dict[str, Any] = next((m for m in reversed(messages) if m.get("role") == "tool"), {"content": NO_TOOL_CALL})
        state = self._instance_dict[instance_id]
        state["response"] = last.get("content")
        state["reward"] = reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "Thank you for your weather query!", reward, {}
        return True, "Please use the weather tool to get the weather information.", reward, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return 0.0 if no tool has answered yet, else 1.0."""
        text = self._instance_dict[instance_id]["response"]  # type: ignore[index]
        return 0.0 if isinstance(text, str) and NO_TOOL_CALL in text else 1.0

    async def snapshot(self, instance_id: str) -> dict[str, Any]:
        """Return the state of the episode."""
        return self._instance_dict[instance_id]

    async def restore(self, instance_id: str, state: dict[str, Any]) -> None:
        """Restore the state of an episode that has been started again."""
        self._instance_dict[instance_id] = state

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Delete the episode's state; an unknown id raises KeyError."""
        del self._instance_dict[instance_id]  # type: ignore[arg-type]
