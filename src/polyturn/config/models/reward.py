"""The section `reward`: which functions score a trajectory, what they read, and how scores become one number.

    reward: {routes: {"own/*": rewards.py:score}, weights: {outcome: 1.0, tool_step: 0.5}}

Built-in functions score well-known data sources without a route.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from polyturn.config.models.base import Section
from polyturn.rewards.overlong import Overlong


class RewardFunctionConfig(Section):
    """A reward function with arguments of its own."""

    name: str
    """A registered name, `file.py:function` or `package.module:function`."""
    kwargs: dict[str, Any] = {}
    """Passed to every call, by name."""


class RewardRateConfig(Section):
    """How often reward functions may be called, for those that ask a paid or a slow service; null means no limit."""

    max_concurrent: int | None = Field(None, ge=1)
    """Calls at once; null is no limit."""
    calls_per_minute: float | None = Field(None, gt=0)
    """Calls a minute; null is no limit."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Tokens a minute, at `tokens_per_call` each; null is no limit."""
    tokens_per_call: int = Field(2000, ge=1)
    """What one call is taken to cost of `tokens_per_minute`."""


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


class RewardConfig(Section):
    """How scores become a trajectory's reward."""

    function: str | RewardFunctionConfig | None = None
    """Scores every task that no route below names; the built-in routes are then unused."""
    routes: dict[str, str | RewardFunctionConfig] = {}
    """data_source, exact or as a glob, to a reward function. The built-in routes are always there."""
    text: Literal["answer", "turn", "turns"] = "answer"
    """What a function of `solution_str` reads: the last message without reasoning and calls, the last turn as it was
    written, or every turn as it was written. Never what a tool or an interaction said."""
    overlong: Overlong = Overlong()
    rate: RewardRateConfig = RewardRateConfig()
    batch_size: int | None = Field(64, ge=1)
    """Trajectories in one call of a function of `solution_strs`; null is no bound."""
    batch_wait_s: float | None = Field(0.05, ge=0)
    """How long such a call waits for more of them; null until every episode that runs has ended."""
    num_processes: int | None = Field(None, ge=1)
    """Processes that call each plain function of `solution_str` or `solution_strs` that is named by its file or module, in
    their main thread, where time-outs that are built on signals work; null calls them in threads of this process."""
    sandbox: SandboxConfig = SandboxConfig()
    weights: dict[str, float] | None = None
    """Weight of each named score; null keeps the default: 1 for `outcome` and for `tool_step`."""
    interaction: Literal["last", "sum", "max", "mean"] = "last"
    """How the scores of an interaction's turns become one, where the interaction is what scores a task."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds of what a reward function does by itself; beyond, the trajectory fails. Programs in a sandbox and comparisons
    of mathematics have limits of their own, and waiting for them does not count."""
