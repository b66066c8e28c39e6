"""The journal of conversations in flight, where episodes run on workers: each line travels to the leader, who has the file.

    worker   WorkerJournal.write   line -> post -> waits                        episode goes on once the line is on disk
    leader   carry                 posts(received so far) -> JournalFile.append   one call to each worker is always under way

With a group, a worker gets the lines that the leader's journal has of its episodes, after a resume or the death of another
worker. So any worker can continue a conversation behind its last complete turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from polyturn.core.aio import OneThread
from polyturn.rollout.journal import JournaledEpisode
from polyturn.training.journal_file import JournalFile, Line, is_of_training, to_line


class JournalEntry(NamedTuple):
    """Something that a worker's episode has to say to the leader's journal."""

    number: int
    """Counted from 1, in the order in which they were said."""
    episode: str = ""
    line: Line | None = None
    counted: str = ""
    """The count's name, where it is not a line."""
    reason: str = ""


class ResumeState(NamedTuple):
    """The leader's journal of a group that a pool is to resume."""

    episodes: Mapping[str, JournaledEpisode]
    """Of its episodes, those that were in flight before."""
    why_not: str | None
    """Why no turn is kept at all."""


class WorkerJournal:
    """A worker's side; implements `rollout.journal.Journal`."""

    def __init__(self) -> None:
        self.why_not: str | None = None
        self._is_kept = False
        self._thread = OneThread("polyturn-journal")
        self._held: dict[str, JournaledEpisode] = {}
        self._posts: deque[JournalEntry] = deque()
        """Those that the leader has not said it received."""
        self._num_posts = 0
        self._news = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def hand(self, state: ResumeState | None) -> None:
        """Take what the leader holds of episodes that are about to run here; None where it keeps no journal."""
        self._is_kept = state is not None
        if state is not None:
            self._held.update(state.episodes)
            self.why_not = state.why_not

    async def posts(self, received: int) -> list[JournalEntry]:
        """Return the posts behind number `received`, once there are any; it confirms that those up to it are on disk."""
        while self._posts and self._posts[0].number <= received:
            done = self._waiting.pop(self._posts.popleft().number, None)
            if done is not None and not done.done():  # an episode that was cancelled waits no more
                done.set_result(None)
        if not self._posts:
            self._news.clear()
            await self._news.wait()
        return list(self._posts)

    def takes(self, episode: str) -> bool:
        """Return whether it is an episode of training."""
        return self._is_kept and is_of_training(episode)

    def recall(self, episode: str) -> JournaledEpisode | None:
        """Return the record of an episode that was handed over, once."""
        return self._held.pop(episode, None)

    async def write(self, episode: str, line: Callable[[], Mapping[str, Any]]) -> None:
        """Send a line to the leader, and return once it is on disk there.

        Raises:
            SnapshotError: the line cannot be made.
        """
        written_line = await self._thread.submit(lambda: to_line(episode, line))
        number = self._say(episode=episode, line=written_line)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._waiting[number]

    def count(self, name: str, *, reason: str = "") -> None:
        """Let the leader count a flight that was "resumed" or "restarted", or whose snapshot "failed"."""
        self._say(counted=name, reason=reason)

    def _say(self, **what: Any) -> int:
        self._num_posts += 1
        self._posts.append(JournalEntry(self._num_posts, **what))
        self._news.set()
        return self._num_posts


async def carry(journal: JournalFile, posts: Callable[[int], Awaitable[list[JournalEntry]]]) -> None:
    """Bring what one worker's episodes say into the leader's journal, until cancelled or the worker is gone.

    Args:
        journal: The journal.
        posts: The worker's `WorkerJournal.posts`; what it raises ends this.
    """
    received = 0
    while True:
        for post in await posts(received):
            if post.line is None:
                journal.count(post.counted, reason=post.reason)
            else:
                await journal.append(post.episode, post.line)
            received = post.number
