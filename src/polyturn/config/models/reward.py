"""The section `reward`: which functions score a trajectory, what they read, and how scores become one number.

    reward: {routes: {"own/*": rewards.py:score}, weights: {outcome: 1.0, tool_step: 0.5}}

Built-in functions score well-known data sources without a route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from polyturn.config.models.base import Section
from polyturn.rewards.options import CallOptions
from polyturn.rewards.overlong import Overlong


class RewardFunctionConfig(Section):
    """A reward function with arguments of its own."""

    name: str
    """A registered name, `file.py:function` or `package.module:function`."""
    kwargs: dict[str, Any] = {}
    """Passed to every call, by name."""


class SandboxConfig(Section):
    """The sandbox that runs the model's programs for the reward of code."""

    url: str | None = None
    """Address of a SandboxFusion `run_code` endpoint; null runs programs on this machine, isolated by bubblewrap."""
    python: str | None = None
    """The interpreter for programs that run on this machine, whose packages they may import; null is this one's, with the
    standard library alone."""
    token_env: str | None = None
    """The environment variable that holds the token which the sandbox demands."""
    max_concurrent: int = Field(64, ge=1)
    """Programs that run at once."""
    memory_limit_mb: int = Field(1024, ge=16)
    """Megabytes that one program may use."""
    timeout_s: float = Field(10.0, gt=0)
    """How long one test may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(CallOptions):
    """How scores become a trajectory's reward."""

    function: str | RewardFunctionConfig | None = None
    """Scores every task that no route below names; the built-in routes are then unused."""
    routes: dict[str, str | RewardFunctionConfig] = field(default_factory=dict)
    """data_source, exact or as a glob, to a reward function. The built-in routes are always there."""
    overlong: Overlong = field(default_factory=Overlong)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    weights: dict[str, float] | None = None
    """Weight of each named score; null keeps the default: 1 for `outcome` and for `tool_step`."""
    interaction: Literal["last", "sum", "max", "mean"] = "last"
    """How the scores of an interaction's turns become one, where the interaction is what scores a task."""
