"""Checks the set-up of interactions, and the kwargs that rows have for them, before a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from polyturn.core.errors import DataError
from polyturn.core.protocols import Interaction
from polyturn.core.task import Task
from polyturn.interactions.base import ViewInteraction


@runtime_checkable
class AsksPerson(Protocol):
    """An interaction that may be answered by a person."""

    asks_person: bool
    """If True, the episode's time limit is paused while a reply is awaited, unless `rollout.limits.counts_people` is
    set. The deadline of a reply still applies."""


def check_row(interactions: Mapping[str, Interaction], task: Task) -> None:
    """Refuse a task whose interaction does not accept the row's kwargs.

    Raises:
        DataError: a method lacks a parameter for them, or the interaction's `check_row` refuses them.
    """
    interaction = None if task.interaction is None else interactions.get(task.interaction.name)
    if task.interaction is not None and interaction is not None:
        try:
            _check_kwargs(interaction, task.interaction.kwargs)
            if isinstance(interaction, ChecksItself):
                interaction.check_row(task.interaction.kwargs)
        except DataError as problem:
            raise DataError(f"task {task.id!r}: {problem}") from problem


def check_setup(interactions: Mapping[str, Interaction]) -> None:
    """Run the interactions' own set-up checks.

    Raises:
        ConfigError: an interaction cannot work.
    """
    for interaction in interactions.values():
        if isinstance(interaction, ChecksItself):
            interaction.check_setup()


def _check_kwargs(interaction: Interaction, kwargs: Mapping[str, Any]) -> None:
    """Refuse a row's interaction kwargs if the interaction's methods do not accept them.

    Raises:
        DataError: a method does not accept them.
    """
    answers = (interaction.respond, 3) if isinstance(interaction, ViewInteraction) else (interaction.generate_response, 2)
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
    """An interaction that checks its set-up and rows before a run."""

    def check_setup(self) -> None:
        """Check everything that does not depend on a row; called once before a run.

        Raises:
            ConfigError: for example, a service cannot be reached, or a file is missing.
        """
        ...

    def check_row(self, kwargs: Mapping[str, Any]) -> None:
        """Check a row's interaction kwargs; called for every row before a run.

        Raises:
            DataError: the interaction cannot work with the kwargs.
        """
        ...
