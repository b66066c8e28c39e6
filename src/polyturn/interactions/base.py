"""BaseInteraction: the base class of interactions.

One object serves all episodes concurrently, so it must keep an episode's state under the instance id and free it in
`finalize_interaction`. The class is concrete: if a config names it, it gives every turn the same answer. A method that is
not async runs in a thread, concurrently with other episodes, and may block.

    id = await interaction.start_interaction(ground_truth="72")
    done, content, score, metadata = await interaction.generate_response(id, messages)
    await interaction.finalize_interaction(id)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from polyturn.interactions.context import ConversationView


class BaseInteraction:
    """An interaction that accepts every answer and never ends the conversation."""

    stateless: bool = False
    """Whether an episode's state depends on `start_interaction` only, so that a conversation can continue after a restart.
    An interaction with more state can have `snapshot` and `restore` instead (see `core/snapshots.py`)."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = {} if config is None else config
        self.name: str = self.config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode and return its instance id.

        Args:
            instance_id: The episode's id; None generates one.
            kwargs: The row's interaction kwargs, including `name`.
        """
        return str(uuid4()) if instance_id is None else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the conversation so far.

        Args:
            instance_id: The episode's id.
            messages: The whole conversation in OpenAI's form; the last message is the model's turn.
            kwargs: The row's interaction kwargs.

        Returns:
            (should_terminate, content, score of this turn, metadata).
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of the current turn. The framework does not call it; authors call it in `generate_response`."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End the episode and free its state. Called exactly once per start.

        After a failed start it is called with the id passed to that start, and an error from it is ignored.
        """


class ViewInteraction(BaseInteraction):
    """An interaction that gets a view of its conversation: it answers in `respond`; `view` is None outside an episode."""

    reply_timeout_s: float | None = None
    """Seconds within which a reply must come; None uses the run's `rollout.interaction_timeout_s`."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return the answer of `respond`, whose score may be None."""
        return await self.respond(None, instance_id, messages, **kwargs)  # type: ignore[return-value]

    async def respond(
        self, view: ConversationView | None, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the conversation so far; subclasses implement it."""
        raise NotImplementedError
