"""A2AInteraction: an agent with the A2A protocol answers the model's turns (needs the extra `a2a`).

    interaction:
      - name: negotiator
        class_name: polyturn.interactions.a2a.A2AInteraction
        config: {url: "http://127.0.0.1:9000", timeout: 60}

    row   "interaction_kwargs": {"name": "negotiator", "brief": "You sell a used car and want 5000 at least."}

Each turn of the model is sent to the agent as one message; an episode is one conversation (`contextId`). The conversation
ends when the agent's task ends or the metadata of its answer have `done`; `score` (or `reward`) there is the turn's score.
"""

from __future__ import annotations

from typing import Any

from polyturn.core.errors import ConfigError, ToolError
from polyturn.core.messages import Message
from polyturn.interactions.base import BaseInteraction
from polyturn.tools.a2a import agent_of
from polyturn.tools.a2a_parts import A2AConversation
from polyturn.tools.schema import ToolResponse

_ENDS = ("completed", "rejected", "canceled")


class A2AInteraction(BaseInteraction):
    """Config: `url`, `token` or `token_env`, `headers`, `timeout` (60 s), and `score` (0.0) of an unscored turn."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.agent = agent_of(config)
        self.timeout: float = config.get("timeout", 60)
        self.score: float = config.get("score", 0.0)
        for name, value in (("timeout", self.timeout), ("score", self.score)):
            if not isinstance(value, int | float) or isinstance(value, bool) or (name == "timeout" and value <= 0):
                raise ConfigError(f"{name} is {value!r}; use a number, and for a timeout a positive one")
        self._conversations: dict[str, A2AConversation] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode without sending a message."""
        chosen = await super().start_interaction(instance_id)
        self.agent.open()
        self._conversations[chosen] = A2AConversation()
        return chosen

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, Any, float, dict[str, Any]]:
        """Send the model's turn to the agent and return its answer; the row's `brief` is sent before the first turn.

        Raises:
            ToolError: the agent cannot be reached, timed out, or failed. The model is not at fault.
        """
        conversation = self._conversations[instance_id]
        text = _last_words(messages)
        if not conversation.context_id and kwargs.get("brief"):
            text = f"{kwargs['brief']}\n\n{text}"
        answer = await self.agent.ask(conversation, text=text, timeout_s=self.timeout)
        is_done = answer.state in _ENDS or bool(answer.metadata.get("done"))
        content = ToolResponse(text=answer.text, image=list(answer.images)) if answer.images else answer.text
        info = {"state": answer.state, **{k: v for k, v in answer.metadata.items() if isinstance(v, str | int | float)}}
        return is_done, content, _score(answer.metadata, self.score), info

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End the conversation; cancel the agent's task if it is still waiting for input."""
        self.agent.leave(self._conversations.pop(str(instance_id)))
        await self.agent.close()


def _last_words(messages: list[dict[str, Any]]) -> str:
    last = next((m for m in reversed(messages) if m["role"] == "assistant"), None)
    return "" if last is None else Message.from_openai(last).text


def _score(metadata: Any, default: float) -> float:
    score = metadata.get("score", metadata.get("reward"))
    if score is None:
        return default
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ToolError(f"the agent returned the score {score!r:.60}; it must be a number")
    return float(score)
