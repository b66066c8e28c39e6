"""Options of the tools of a run: their files, and the deadlines, sizes and numbers of their calls.

tools: {functions: [tools.py], timeout_s: 10, max_concurrency: {search: 32}}      ToolsOptions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from polyturn.core.errors import ConfigError
from polyturn.infra.live import NameOrObject
from polyturn.tools.breaker import BreakerSettings
from polyturn.tools.truncate import TruncateSide


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The limits of each call. A tool's own config may be stricter."""

    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds of a call; beyond, the model reads that it took too long."""
    max_parallel_calls: Annotated[int, Field(ge=1)] = 16
    """Calls of one turn beyond this many are answered as skipped."""
    max_result_chars: Annotated[int, Field(ge=16)] | None = 8192
    """Characters of a result that the model reads; null is all."""
    max_result_tokens: Annotated[int, Field(ge=4)] | None = None
    """The same in tokens of the run's tokenizer; the smaller of both holds."""
    truncate_side: TruncateSide = "middle"
    """The side on which a longer result is cut: left keeps its end, right its beginning, middle both."""
    max_concurrency: Mapping[str, Annotated[int, Field(ge=1)]] = field(default_factory=dict)
    """Tool -> its calls at once; others wait, which is not part of their `timeout_s`. Goes before `max_concurrency` in a
    tool's own config."""
    max_per_host: Annotated[int, Field(ge=1)] | None = None
    """Calls at once to one host, of all tools that ask it; null means no limit."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    unreachable: Literal["observation", "failure"] = "observation"
    """The outcome of a call whose tool is gone (`connection`, `circuit_open`): an observation, which the model reads and is
    scored with; or a failure of the trajectory, which then is in no loss, for services that no call can bring down."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.max_parallel_calls < 1:
            raise ConfigError(
                f"timeout_s is {self.timeout_s} and max_parallel_calls is {self.max_parallel_calls}; the first must be "
                "positive, the second at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsOptions(ToolOptions):
    """Tools, and the limits of each call."""

    file: str | list[dict[str, Any]] | None = None
    """YAML or JSON file with a `tools` list, or that list."""
    functions: list[NameOrObject] = field(default_factory=list)
    """`file.py:function` of functions decorated with @polyturn.tool; `file.py` alone means every tool in it."""
