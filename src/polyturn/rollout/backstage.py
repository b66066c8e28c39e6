"""Backstage: what an episode and its forks have in common, out of sight of the scheduler that acts through them.

    environment   tools and interaction            bridge   threads that wait for the event loop
    asking        what the engine is asked         flight   the journal that keeps the episode
    record        what the trajectory is made of   forks    who else plays

Separate from the episode, of which each fork is one with a conversation of its own: what is here is started once and let go
of once, whoever used it and whatever happens. Who runs an
episode (`run_episode`, a journal, a group that is cut off) does it from here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from polyturn.core.aio import finish
from polyturn.core.errors import PolyturnError, one_line
from polyturn.core.task import Task
from polyturn.rollout.asking import Asking
from polyturn.rollout.bridge import LoopBridge
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.environment import Environment
from polyturn.rollout.record import EpisodeRecord

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.journal import EpisodeJournal
    from polyturn.rollout.scheduler import MultiTurnScheduler

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0
"""How long a scheduler may take to let go of a trajectory that has ended."""
CANCELLED_S = 3.0
"""How long an episode that is cancelled waits for all of its releases; those that take longer go on by themselves."""


class Backstage:
    """The shared part of one episode."""

    __slots__ = ("asking", "bridge", "environment", "flight", "forks", "id", "is_started", "record")

    def __init__(self, context: RolloutContext, task: Task, *, id: str) -> None:
        """Begin with nothing started."""
        self.id = id
        """The id of the episode itself; forks have others."""
        self.environment = Environment(context, task, id=id)
        """Its tools and its interaction."""
        self.asking = Asking(context)
        """Its requests to the engine."""
        self.bridge = LoopBridge()
        """Its way from threads to the event loop."""
        self.record = EpisodeRecord()
        """What it leaves."""
        self.forks: list[Episode] = []
        """Not the episode itself: it would hold itself, and stay in memory until the garbage collector looks for cycles."""
        self.is_started = False
        """Whether tools and interaction are."""
        self.flight: EpisodeJournal | None = None
        """Keeps it turn by turn; None where nothing is kept."""

    async def close(self) -> list[str]:
        """Release the tools, finalize the interaction, free the engine's sessions; return what went wrong."""
        self.bridge.close()
        problems = await self.environment.close()
        return problems + await self.asking.end_sessions([self.id, *(fork.id for fork in self.forks)])


async def close_episode(episode: Episode, scheduler: MultiTurnScheduler) -> list[str]:
    """Close the episode even while it is being cancelled; the cancellation goes on once everything is released.

    A release that takes longer than `CANCELLED_S` holds a cancellation up no longer, and goes on by itself.
    """
    closing = asyncio.create_task(_let_go(episode, scheduler))
    problems, cancelled = await finish(closing, grace_s=CANCELLED_S)
    if cancelled is not None:
        raise cancelled
    return problems


async def _let_go(episode: Episode, scheduler: MultiTurnScheduler) -> list[str]:
    """Tell the scheduler that its trajectory ended, and release everything; return what went wrong."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await episode.call(scheduler, scheduler.on_trajectory_end, episode)
        said = []
    except (PolyturnError, TimeoutError) as problem:
        said = [one_line(problem)]
        logger.warning("%s: on_trajectory_end failed: %s", episode.id, said[0])
    return said + await episode.backstage.close()
