"""ConversationView: facts about a conversation that its interaction may know, beyond the messages.

Most interactions need only the id, the messages and the row. One that speaks with the run's own model, that is sampled, or
that takes longer than others defines `respond` beside `generate_response`, and is called through it:

    class Partner(BaseInteraction):
        async def respond(self, view, instance_id, messages, **kwargs):
            said = await view.speak(messages, SpeakOptions(agent="user"))
            return False, said.text, 0.0, {}

Conversations that branched share an instance id, and each has a view of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from polyturn.core.errors import DataError
from polyturn.core.messages import Message
from polyturn.core.protocols import Interaction
from polyturn.core.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakOptions:
    """Options for the run's own model when it speaks for another role."""

    agent: str = "user"
    """Whose words they are in the records."""
    max_tokens: int = 256
    temperature: float | None = None
    """None samples as the run does."""
    top_p: float | None = None
    is_trained: bool = False
    """Whether its tokens are trained, with the trajectory's reward; they weigh 0 otherwise."""


class ConversationView(Protocol):
    """One conversation, seen by who answers it."""

    @property
    def id(self) -> str:
        """Unique among conversations that are live, branches of one episode included."""
        ...

    @property
    def seed(self) -> int:
        """The seed of every random choice in this conversation, from the run's seed, the task, the member and the branch."""
        ...

    @property
    def num_user_turns(self) -> int:
        """Number of replies that the conversation has had from its interaction."""
        ...

    async def speak(self, messages: Sequence[Mapping[str, Any]], options: SpeakOptions) -> Message:
        """Let the run's own model go on with `messages`, under another agent's name.

        Raises:
            InteractionError: the context leaves no room.
        """
        ...


@runtime_checkable
class SeesConversation(Protocol):
    """An interaction that sees its conversation."""

    reply_timeout_s: float | None
    """Deadline of a reply; None is the run's, `rollout.interaction_timeout_s`."""

    async def respond(
        self, view: ConversationView | None, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Do what `generate_response` does."""
        ...


@runtime_checkable
class AsksPerson(Protocol):
    """An interaction that may say that a person answers."""

    asks_person: bool
    """True: while a reply is waited for, the episode's time limit stands still, unless `rollout.limits.counts_people`. The
    deadline of a reply holds all the same."""


def check_row(interactions: Mapping[str, Interaction], task: Task) -> None:
    """Refuse a task whose interaction does not take what the row gives it, or says that the row lacks something.

    Raises:
        DataError: it does not, or it does.
    """
    partner = None if task.interaction is None else interactions.get(task.interaction.name)
    if task.interaction is not None and partner is not None:
        try:
            _check_kwargs(partner, task.interaction.kwargs)
            if isinstance(partner, ChecksItself):
                partner.check_row(task.interaction.kwargs)
        except DataError as problem:
            raise DataError(f"task {task.id!r}: {problem}") from problem


def check_setup(interactions: Mapping[str, Interaction]) -> None:
    """Refuse interactions that say that they cannot work.

    Raises:
        ConfigError: one does.
    """
    for partner in interactions.values():
        if isinstance(partner, ChecksItself):
            partner.check_setup()


def _check_kwargs(interaction: Interaction, kwargs: Mapping[str, Any]) -> None:
    """Refuse a row's interaction kwargs that the methods which are given them do not take.

    Raises:
        DataError: one does not.
    """
    answers = (interaction.respond, 3) if isinstance(interaction, SeesConversation) else (interaction.generate_response, 2)
    for method, num in ((interaction.start_interaction, 1), answers):
        try:
            inspect.signature(method).bind(*[None] * num, **kwargs)
        except TypeError as problem:
            raise DataError(
                f"{type(interaction).__name__}.{method.__name__} does not take the row's interaction_kwargs "
                f"{dict(kwargs)!r:.200}: {problem}; end its parameters with **kwargs"
            ) from problem
        except ValueError:
            continue  # a built-in without a signature


@runtime_checkable
class ChecksItself(Protocol):
    """An interaction that can say before a run that it cannot work."""

    def check_setup(self) -> None:
        """Refuse what cannot work, whatever the rows say; called once before a run.

        Raises:
            ConfigError: a service cannot be reached, a file is missing.
        """
        ...

    def check_row(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a row's interaction kwargs that lack something; called for every row before a run.

        Raises:
            DataError: they do.
        """
        ...
