"""What can be chosen about the calls of all tools together: deadlines, sizes, how many at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polyturn.core.errors import ConfigError
from polyturn.tools.breaker import BreakerSettings
from polyturn.tools.truncate import TruncateSide


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The limits of each call. A tool's own config may be stricter."""

    timeout_s: float = 60.0
    """Deadline of every single call into a tool."""
    max_parallel_calls: int = 16
    """Calls of one turn beyond this many are answered as skipped."""
    max_result_chars: int | None = 8192
    """How much of a result's text the model reads; None is all."""
    max_result_tokens: int | None = None
    """The same in tokens, which needs the codec; the smaller of both holds."""
    truncate_side: TruncateSide = "middle"
    """Which part of a longer text goes; see `truncate.py`."""
    max_abandoned: int = 64
    """How many calls past their deadline may be running before the run ends."""
    max_concurrency: Mapping[str, int] = field(default_factory=dict)
    """Tool -> its calls at once, over what the tool's own config says."""
    max_per_host: int | None = None
    """Calls at once to one host, of all tools that ask it; None is no limit."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    """When a tool that fails is left alone."""
    fails_unreachable: bool = False
    """Whether a lost connection fails the trajectory; else the model reads of it."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.max_parallel_calls < 1:
            raise ConfigError(
                f"timeout_s is {self.timeout_s} and max_parallel_calls is {self.max_parallel_calls}; the first must be "
                "positive, the second at least 1"
            )
