"""BaseInteraction: the base class of conversation partners.

One object serves all episodes at once, so the state of an episode is kept under its instance id and freed in
`finalize_interaction`. The class is concrete: a config may name it, and it then gives every turn the same answer. A plain
method runs in a thread, concurrently with those of other episodes, and may block.

    id = await partner.start_interaction(ground_truth="72")
    done, content, score, metadata = await partner.generate_response(id, messages)
    await partner.finalize_interaction(id)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from polyturn.interactions.context import ConversationView


class BaseInteraction:
    """A partner that finds every answer acceptable and never ends the conversation."""

    stateless: bool = False
    """Whether what it keeps of an episode comes from `start_interaction` alone, so that a conversation goes on after a
    restart; one with state may offer `snapshot` and `restore` instead (see `core/snapshots.py`)."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = {} if config is None else config
        self.name: str = self.config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode; return the id that is used from then on.

        Args:
            instance_id: The episode's id; None asks for a new one.
            kwargs: The row's interaction kwargs, `name` included.
        """
        return str(uuid4()) if instance_id is None else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the conversation so far.

        Args:
            instance_id: The episode.
            messages: The whole conversation in OpenAI's form, the model's turn last.
            kwargs: The row's interaction kwargs.

        Returns:
            (should_terminate, content, score of this turn, metadata).
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of the current turn. Authors call it themselves; see `generate_response`."""
        return 0.0

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """End the episode and free what it held. Called exactly once per start.

        Also after a start that failed on its way, with the id that it was given; what this raises then counts for nothing.
        """


class ViewInteraction(BaseInteraction):
    """An interaction that sees its conversation: it answers in `respond`, with `view` None where there is no episode."""

    reply_timeout_s: float | None = None
    """Deadline of a reply; None is the run's, `rollout.interaction_timeout_s`."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer as `respond` does; it may give no score."""
        return await self.respond(None, instance_id, messages, **kwargs)  # type: ignore[return-value]

    async def respond(
        self, view: ConversationView | None, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the conversation so far; a subclass does it."""
        raise NotImplementedError
