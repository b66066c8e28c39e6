"""Options of reward functions: their deadlines, their text, the rate of their calls, and the sandbox of programs.

reward: {timeout_s: 120, rate: {calls_per_minute: 300}, batch: {size: 32}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from polyturn.core.trajectory import TextOf

DEFAULT_WEIGHTS = {"outcome": 1.0, "tool_step": 1.0}
"""Weights of a reward's components where a config names none; `overlong` always weighs 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRate:
    """The rate at which reward functions may be called, for those that ask a paid or a slow service; null means no limit."""

    PART: ClassVar[str] = "the rate"

    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Calls at once; null means no limit."""
    calls_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Calls a minute; null means no limit."""
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Tokens a minute, at `tokens_per_call` each; null means no limit."""
    tokens_per_call: Annotated[int, Field(ge=1)] = 2000
    """The tokens that one call is taken to cost of `tokens_per_minute`."""

    @property
    def per_minute(self) -> float | None:
        """Calls a minute that both limits allow; None means no limit."""
        of_tokens = None if self.tokens_per_minute is None else self.tokens_per_minute / self.tokens_per_call
        return min((rate for rate in (self.calls_per_minute, of_tokens) if rate is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """The sandbox that runs the model's programs for the reward of code."""

    PART: ClassVar[str] = "the sandbox"

    url: str | None = None
    """Address of a SandboxFusion `run_code` endpoint; null runs programs on this machine, isolated by bubblewrap."""
    python: str | None = None
    """The interpreter for programs that run on this machine, whose packages they may import; null is this one's, with the
    standard library alone."""
    token_env: str | None = None
    """The environment variable that holds the token which the sandbox demands."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Programs that run at once."""
    memory_limit_mb: Annotated[int, Field(ge=16)] = 1024
    """Megabytes that one program may use."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds that one test may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The number of trajectories in one call of a function of `solution_strs`."""

    PART: ClassVar[str] = "a function of solution_strs"

    size: Annotated[int, Field(ge=1)] | None = 64
    """Trajectories in one call; null means no bound."""
    wait_s: Annotated[float, Field(ge=0)] = 0.05
    """Seconds that a call waits for more of them, from the first on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The calls of a run's reward functions."""

    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds of what a reward function does by itself; beyond, the trajectory fails. Programs in a sandbox and comparisons
    of mathematics have limits of their own, and waiting for them, for a turn or for a thread does not count."""
    text: TextOf = "answer"
    """The text of `solution_str`: the last message without reasoning and calls, the last turn to the
    letter as the model wrote it, or every turn so. Never what a tool or an interaction said."""
    rate: CallRate = CallRate()
    batch: BatchOptions = BatchOptions()
    num_processes: Annotated[int, Field(ge=1)] | None = None
    """Processes that call each plain function of `solution_str` or `solution_strs` that is named by its file or module, in
    their main thread, where time-outs that are built on signals work; null calls them in threads of this process."""
