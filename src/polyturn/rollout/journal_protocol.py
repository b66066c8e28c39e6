"""Journal: the interface through which episodes store their turns; JournaledEpisode: the stored lines of one episode.

These are not in the module of `EpisodeJournal`, which writes and reads the lines, because that module imports
`RolloutContext`, and `RolloutContext` refers to `Journal`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True, kw_only=True)
class JournaledEpisode:
    """The journal's record of one episode that was in flight when its process ended."""

    digest: str
    """Digest of the task, its tools and the sampling."""
    lines: list[Mapping[str, Any]] = field(default_factory=list)
    """One line for each complete turn, then one for the end, as they were written."""
    why_not: str | None = None
    """Why the episode restarts from its task; None if it can be resumed."""


class Journal(Protocol):
    """The storage of live episodes."""

    why_not: str | None
    """Why the journal stores only that an episode is in flight, and not its turns; None if it stores turns."""

    def takes(self, episode: str) -> bool:
        """Return whether the journal records this episode's turns."""
        ...

    def recall(self, episode: str) -> JournaledEpisode | None:
        """Return the record of an episode and forget it; None if the episode was not in flight."""
        ...

    async def write(self, episode: str, line: Callable[[], Mapping[str, Any]]) -> None:
        """Append a line, built outside the event loop, and return once the operating system has it.

        Raises:
            SnapshotError: the line cannot be built.
        """
        ...

    def count(self, name: str, *, reason: str = "") -> None:
        """Count an episode that was "resumed" or "restarted", or whose snapshot "failed"."""
        ...
