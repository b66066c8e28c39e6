"""Gsm8kInteraction: tells the model whether its last answer is right, until the answer is right.

Only the model's last message is scored. A conversation without such a message, and content that is not text, score 0.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from polyturn.interactions.base import BaseInteraction
from polyturn.rewards import gsm8k


class Gsm8kInteraction(BaseInteraction):
    """Grades answers in GSM8K's format `#### N` and asks for another try until the answer is right."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any) -> str:
        """Begin one episode whose right answer is `ground_truth`."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth, "reward": 0.0}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Score the last assistant message; a right answer ends the conversation."""
        last: dict[str, Any] = next((m for m in reversed(messages) if m.get("role") == "assistant"), {"content": ""})
        self._instance_dict[instance_id]["response"] = last.get("content")
        reward = await self.calculate_score(instance_id)
        if reward == 1.0:
            return True, "Your response is correct!", 1.0, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", reward, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return 1.0 if the last answer is right, else 0.0."""
        state = self._instance_dict[instance_id]  # type: ignore[index]
        return gsm8k.compute_score(  # looked up in the module, so that a replaced function is used
            state["response"], state["ground_truth"], method="strict", format_score=0.0, score=1.0
        )

    async def snapshot(self, instance_id: str) -> dict[str, Any]:
        """Return the state of the episode."""
        return self._instance_dict[instance_id]

    async def restore(self, instance_id: str, state: dict[str, Any]) -> None:
        """Restore the state of an episode that has been started again."""
        self._instance_dict[instance_id] = state

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Delete the episode's state; an unknown id raises KeyError."""
        del self._instance_dict[instance_id]  # type: ignore[arg-type]
