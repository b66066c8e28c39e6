"""Journal: the storage of live episodes, as episodes see it; JournaledEpisode: what it holds of one.

Separate from `EpisodeJournal`, which writes and reads the lines, because the context of a run names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True, kw_only=True)
class JournaledEpisode:
    """The journal's record of one episode that was in flight when its process ended."""

    digest: str
    """Of what it was a run of."""
    lines: list[Mapping[str, Any]] = field(default_factory=list)
    """One for each complete turn, then one for the end, as they were written."""
    why_not: str | None = None
    """Why it starts from its task."""


class Journal(Protocol):
    """The storage of live episodes."""

    why_not: str | None
    """Why no turn is kept at all, but that an episode was in flight; None where turns are kept."""

    def takes(self, episode: str) -> bool:
        """Return whether the episode is one whose turns are worth keeping."""
        ...

    def recall(self, episode: str) -> JournaledEpisode | None:
        """Return the record of an episode, once; None if it was not in flight."""
        ...

    async def write(self, episode: str, line: Callable[[], Mapping[str, Any]]) -> None:
        """Append a line, made outside the event loop, and return once the operating system has it.

        Raises:
            SnapshotError: the line cannot be made.
        """
        ...

    def count(self, name: str, *, reason: str = "") -> None:
        """Count an episode that was "resumed" or "restarted", or whose snapshot "failed"."""
        ...
