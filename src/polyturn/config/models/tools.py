"""The section `rollout.tools`: which tools there are, and the limits of each call.

    tools: {functions: [tools.py], timeout_s: 10, max_concurrency: {search: 32}}

These limits hold for every tool; a tool's own config may be stricter.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from polyturn.config.models.base import Section
from polyturn.tools.breaker import BreakerSettings


class ToolsConfig(Section):
    """Tools, and the limits of each call."""

    file: str | list[dict[str, Any]] | None = None
    """YAML or JSON file with a `tools` list, or that list."""
    functions: list[str] = []
    """`file.py:function` of functions decorated with @polyturn.tool; `file.py` alone means every tool in it."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds of a call; beyond, the model reads that it took too long."""
    max_parallel_calls: int = Field(16, ge=1)
    """Calls of one turn beyond this many are answered as skipped."""
    max_result_chars: int = Field(8192, ge=16)
    """Characters of a result that the model reads."""
    max_result_tokens: int | None = Field(None, ge=4)
    """The same in tokens of the run's tokenizer; the smaller of both holds."""
    truncate_side: Literal["left", "right", "middle"] = "middle"
    """Where a longer result is cut: left keeps its end, right its beginning, middle both."""
    max_concurrency: dict[str, int] = {}
    """Tool -> its calls at once; others wait, which is no part of their `timeout_s`. Goes before `max_concurrency` in a
    tool's own config."""
    max_per_host: int | None = Field(None, ge=1)
    """Calls at once to one host, of all tools that ask it; null is no limit."""
    breaker: BreakerSettings = BreakerSettings()
    unreachable: Literal["observation", "failure"] = "observation"
    """What a call is that finds its tool gone (`connection`, `circuit_open`): an observation, which the model reads and is
    scored with; or a failure of the trajectory, which then is in no loss, for services that no call can bring down."""
