"""Options of reward functions: their deadlines, their text, the rate of their calls, and the sandbox of programs.

reward: {timeout_s: 120, rate: {calls_per_minute: 300}, batch: {size: 32}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from polyturn.core.trajectory import TextOf

DEFAULT_WEIGHTS = {"outcome": 1.0, "tool_step": 1.0}
"""Default weights of a reward's components; `overlong` always has weight 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRate:
    """Limits on calls of reward functions, for those that use a paid or slow service."""

    PART: ClassVar[str] = "the rate"

    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Largest number of concurrent calls; null means no limit."""
    calls_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Largest number of calls per minute; null means no limit."""
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Largest number of tokens per minute, with `tokens_per_call` for each call; null means no limit."""
    tokens_per_call: Annotated[int, Field(ge=1)] = 2000
    """Estimated number of tokens of a call."""

    @property
    def per_minute(self) -> float | None:
        """Calls a minute that both limits allow; None means no limit."""
        of_tokens = None if self.tokens_per_minute is None else self.tokens_per_minute / self.tokens_per_call
        return min((rate for rate in (self.calls_per_minute, of_tokens) if rate is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """The sandbox in which code rewards run the model's programs."""

    PART: ClassVar[str] = "the sandbox"

    url: str | None = None
    """Address of a SandboxFusion `run_code` endpoint; null runs programs on this machine, isolated by bubblewrap."""
    python: str | None = None
    """Python interpreter of programs on this machine, with its packages; null takes the interpreter that runs polyturn, with
    only the standard library."""
    token_env: str | None = None
    """Environment variable with the token that the sandbox requires."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Largest number of programs that run at once."""
    memory_limit_mb: Annotated[int, Field(ge=16)] = 1024
    """Largest memory of a program, in megabytes."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Deadline of a test, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The number of trajectories per call of a reward function of `solution_strs`."""

    PART: ClassVar[str] = "a function of solution_strs"

    size: Annotated[int, Field(ge=1)] | None = 64
    """Largest number of trajectories per call; null means no limit."""
    wait_s: Annotated[float, Field(ge=0)] = 0.05
    """Seconds that a call waits for further trajectories after the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The calls of a run's reward functions."""

    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Deadline of a call, in seconds; after it the trajectory fails. Programs in a sandbox and mathematical comparisons have
    their own limits. Waiting for them, for `rate`, for a slot or for a thread does not count."""
    text: TextOf = "answer"
    """The text of `solution_str`, always without observations. answer: the last message without reasoning and calls. turn:
    the last turn exactly as the model wrote it, with tags and calls, but without a <think> that the chat template added.
    turns: all turns exactly as the model wrote them."""
    rate: CallRate = CallRate()
    batch: BatchOptions = BatchOptions()
    num_processes: Annotated[int, Field(ge=1)] | None = None
    """Number of processes that call a plain function of `solution_str` or `solution_strs` in their main threads, where
    timeouts based on signals work. The function must be named by its file or module. Null calls it in threads of this
    process."""
