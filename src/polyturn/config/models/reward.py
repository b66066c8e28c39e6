"""The section `reward`: which functions score a trajectory, what they read, and how scores become one number.

    reward: {routes: {"own/*": rewards.py:score}, weights: {outcome: 1.0, tool_step: 0.5}}

Built-in functions score well-known data sources without a route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from polyturn.config.parts import BY_NAME, OwnPart
from polyturn.rewards.options import CallOptions, SandboxOptions
from polyturn.rewards.overlong import Overlong


class RewardFunctionConfig(OwnPart):
    """A reward function. Further keys are passed to every call, by name."""

    PART: ClassVar[str] = "any reward function"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(CallOptions):
    """The reward of a trajectory, and the scores that it is made of."""

    function: Annotated[RewardFunctionConfig, BY_NAME] | None = None
    """Scores every task that no route below names; the built-in routes are then unused."""
    routes: dict[str, Annotated[RewardFunctionConfig, BY_NAME]] = field(default_factory=dict)
    """data_source, exact or as a glob, to a reward function. The built-in routes are always there."""
    overlong: Overlong = field(default_factory=Overlong)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    weights: dict[str, float] | None = None
    """Weight of each named score; null keeps the default: 1 for `outcome` and for `tool_step`."""
    interaction: Literal["last", "sum", "max", "mean"] = "last"
    """The reduction of the scores of an interaction's turns to one, where the interaction is what scores a task."""
