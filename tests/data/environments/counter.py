"""A class as TRL's `environment_factory` takes it: count to a goal with two tools."""

from __future__ import annotations

import datetime


class Counter:
    """Counts; worth 1 where it ends at the goal."""

    def __init__(self, goal: int = 3) -> None:
        self.goal = goal
        self.count = 0

    def reset(self, to: int | None = None, **row: object) -> str:
        """Begin at 0."""
        self.count = 0
        self.goal = self.goal if to is None else to
        return f"Count to {self.goal}."

    def increment(self, by: int) -> int:
        """Add to the counter.

        Args:
            by: How much.

        Returns:
            Where it stands.
        """
        if by < 1:
            raise ValueError("only forwards")
        self.count += by
        return self.count

    async def look(self) -> str:
        """Look at the counter."""
        return f"It shows {self.count}."

    def get_reward(self) -> float:
        """Say what the episode is worth."""
        return float(self.count == self.goal)


class NoReset:
    """Lacks what begins an episode."""

    def go(self) -> str:
        """Go."""
        return "gone"


class NoDocstring:
    """Has a method that tells the model nothing."""

    def reset(self) -> None:
        """Begin."""

    def go(self, where: str) -> str:
        return where


class NoTools:
    """Has nothing that a model could do."""

    def reset(self) -> None:
        """Begin."""


class Calendar:
    """Has a method whose argument is no JSON type."""

    def reset(self) -> None:
        """Begin."""

    def weekday(self, day: datetime.date) -> str:
        """Name the weekday.

        Args:
            day: Of this day.
        """
        return f"{day:%A}"
