"""The journal for episodes on workers: each line is sent to the controller, which writes the file.

    worker       WorkerJournal.write   line -> post -> waits                  the episode continues once the line is on disk
    controller   carry                 posts(received) -> JournalFile.append  one call to each worker is always pending

After a resume or the death of another worker, the controller sends a group together with the journal's lines of its
episodes. So any worker can continue an episode after its last complete turn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from polyturn.infra.aio import OneThread
from polyturn.rollout.journal import JournaledEpisode
from polyturn.training.journal_file import JournalFile, Line, is_of_training, to_line


class JournalEntry(NamedTuple):
    """A line or a count from a worker's episode for the controller's journal."""

    number: int
    """Position in the worker's sequence of entries, from 1."""
    episode: str = ""
    line: Line | None = None
    counted: str = ""
    """The name of the count, if the entry is not a line."""
    reason: str = ""


class ResumeState(NamedTuple):
    """The controller's journal of a group, from which a worker resumes its episodes."""

    episodes: Mapping[str, JournaledEpisode]
    """Episode id -> record, for the episodes that were in flight."""
    why_not: str | None
    """Why turns are not recorded at all; None if they are."""


class WorkerJournal:
    """The journal in a worker; implements `rollout.journal.Journal`."""

    def __init__(self) -> None:
        self.why_not: str | None = None
        self._is_kept = False
        self._thread = OneThread("polyturn-journal")
        self._held: dict[str, JournaledEpisode] = {}
        self._posts: deque[JournalEntry] = deque()
        """Entries that the controller has not confirmed yet."""
        self._num_posts = 0
        self._news = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def hand(self, state: ResumeState | None) -> None:
        """Take over the records of episodes that are about to run here; None if the controller keeps no journal."""
        self._is_kept = state is not None
        if state is not None:
            self._held.update(state.episodes)
            self.why_not = state.why_not

    async def posts(self, received: int) -> list[JournalEntry]:
        """Wait for entries after number `received` and return them; the call confirms that all up to it are on disk."""
        while self._posts and self._posts[0].number <= received:
            done = self._waiting.pop(self._posts.popleft().number, None)
            if done is not None and not done.done():  # a cancelled episode no longer waits
                done.set_result(None)
        if not self._posts:
            self._news.clear()
            await self._news.wait()
        return list(self._posts)

    def takes(self, episode: str) -> bool:
        """Return whether the controller keeps a journal and the episode belongs to training."""
        return self._is_kept and is_of_training(episode)

    def recall(self, episode: str) -> JournaledEpisode | None:
        """Return the record that `hand` received for an episode, and forget it."""
        return self._held.pop(episode, None)

    async def write(self, episode: str, line: Callable[[], Mapping[str, Any]]) -> None:
        """Send a line to the controller, and return once it is on disk there.

        Raises:
            SnapshotError: the line cannot be built.
        """
        written_line = await self._thread.submit(lambda: to_line(episode, line))
        number = self._say(episode=episode, line=written_line)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._waiting[number]

    def count(self, name: str, *, reason: str = "") -> None:
        """Let the controller count an episode that was "resumed" or "restarted", or whose snapshot "failed"."""
        self._say(counted=name, reason=reason)

    def _say(self, **what: Any) -> int:
        self._num_posts += 1
        self._posts.append(JournalEntry(self._num_posts, **what))
        self._news.set()
        return self._num_posts


async def carry(journal: JournalFile, posts: Callable[[int], Awaitable[list[JournalEntry]]]) -> None:
    """Copy the entries of one worker into the controller's journal, until cancelled or the worker is gone.

    Args:
        journal: The controller's journal.
        posts: Calls the worker's `WorkerJournal.posts`; its exceptions end this function.
    """
    received = 0
    while True:
        for post in await posts(received):
            if post.line is None:
                journal.count(post.counted, reason=post.reason)
            else:
                await journal.append(post.episode, post.line)
            received = post.number
