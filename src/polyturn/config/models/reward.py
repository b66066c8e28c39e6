"""The section `reward`: which functions score a trajectory, what they read, and how scores become one number.

    reward: {routes: {"own/*": rewards.py:score}, weights: {outcome: 1.0, tool_step: 0.5}}

Built-in functions score well-known data sources without a route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from polyturn.config.models.base import Section
from polyturn.rewards.options import CallOptions, SandboxOptions
from polyturn.rewards.overlong import Overlong


class RewardFunctionConfig(Section):
    """A reward function with arguments of its own."""

    name: str
    """A registered name, `file.py:function` or `package.module:function`."""
    kwargs: dict[str, Any] = {}
    """Passed to every call, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(CallOptions):
    """How scores become a trajectory's reward."""

    function: str | RewardFunctionConfig | None = None
    """Scores every task that no route below names; the built-in routes are then unused."""
    routes: dict[str, str | RewardFunctionConfig] = field(default_factory=dict)
    """data_source, exact or as a glob, to a reward function. The built-in routes are always there."""
    overlong: Overlong = field(default_factory=Overlong)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    weights: dict[str, float] | None = None
    """Weight of each named score; null keeps the default: 1 for `outcome` and for `tool_step`."""
    interaction: Literal["last", "sum", "max", "mean"] = "last"
    """How the scores of an interaction's turns become one, where the interaction is what scores a task."""
