"""Adapts interactions to one calling convention when they join a run.

`calculate_score` and `finalize_interaction` may lack the parameter for the instance id. Interactions with the usual
signatures are used unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from polyturn.core.protocols import Interaction
from polyturn.infra.plugin_shape import num_positional


def in_usual_form(interaction: Interaction) -> Interaction:
    """Return the interaction itself, or a wrapper if a method lacks the parameter for the instance id."""
    odd = [m for m in (interaction.calculate_score, interaction.finalize_interaction) if num_positional(m) == 0]
    return _View(interaction) if odd else interaction


class _View:
    """Wraps an interaction and drops the instance id for methods that do not take it."""

    def __init__(self, interaction: Interaction) -> None:
        self.name = interaction.name
        self.start_interaction = interaction.start_interaction
        self.generate_response = interaction.generate_response
        self.calculate_score = _without_id(interaction.calculate_score)
        self.finalize_interaction = _without_id(interaction.finalize_interaction)


def _without_id(method: Callable[..., Any]) -> Callable[..., Any]:
    if num_positional(method) != 0:
        return method

    @functools.wraps(method)
    def call(instance_id: str, **kwargs: Any) -> Any:
        return method()

    return call
