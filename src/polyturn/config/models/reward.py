"""The section `reward`: the functions that score a trajectory, their inputs, and the combination of scores.

    reward: {routes: {"own/*": rewards.py:score}, weights: {outcome: 1.0, tool_step: 0.5}}

Well-known data sources have built-in functions and need no route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from polyturn.config.parts import BY_NAME, OwnPart
from polyturn.rewards.options import CallOptions, SandboxOptions
from polyturn.rewards.overlong import Overlong


class RewardFunctionConfig(OwnPart):
    """A reward function. Further keys are keyword arguments of every call."""

    PART: ClassVar[str] = "any reward function"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(CallOptions):
    """The reward of a trajectory and its scores."""

    function: Annotated[RewardFunctionConfig, BY_NAME] | None = None
    """Scores every task without a route below; the built-in routes are then unused."""
    routes: dict[str, Annotated[RewardFunctionConfig, BY_NAME]] = field(default_factory=dict)
    """data_source, exact or as a glob -> reward function. The built-in routes are added."""
    overlong: Overlong = field(default_factory=Overlong)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    weights: dict[str, float] | None = None
    """Weight of each named score; null takes 1 for `outcome` and for `tool_step`."""
    interaction: Literal["last", "sum", "max", "mean"] = "last"
    """Reduction of an interaction's turn scores to one score, if the interaction scores the task."""
