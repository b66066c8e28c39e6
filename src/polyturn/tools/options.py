"""Options of the tools of a run: their files, and the limits of their calls.

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
    """Deadline of a call, in seconds; after it the model gets the timeout as the result."""
    max_parallel_calls: Annotated[int, Field(ge=1)] = 16
    """Largest number of calls of one turn; further calls are answered as skipped."""
    max_result_chars: Annotated[int, Field(ge=16)] | None = 8192
    """Largest number of characters of a result that the model gets; null means no limit."""
    max_result_tokens: Annotated[int, Field(ge=4)] | None = None
    """The same limit in tokens of the run's tokenizer; the smaller limit applies."""
    truncate_side: TruncateSide = "middle"
    """The side on which a longer result is cut: left keeps its end, right its beginning, middle both."""
    max_concurrency: Mapping[str, Annotated[int, Field(ge=1)]] = field(default_factory=dict)
    """Tool -> largest number of concurrent calls; others wait, and waiting does not count towards `timeout_s`. Overrides
    `max_concurrency` in a tool's own config."""
    max_per_host: Annotated[int, Field(ge=1)] | None = None
    """Largest number of concurrent calls to one host, over all tools; null means no limit."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    unreachable: Literal["observation", "failure"] = "observation"
    """The outcome of a call to an unreachable tool (`connection`, `circuit_open`). observation: the model gets the error,
    and the trajectory is scored. failure: the trajectory fails and is not trained, for services that no call can bring
    down."""

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
