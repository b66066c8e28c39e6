"""Resources: the connections and instances of an episode and its forks, started once and closed once on every exit.

    tools, interaction    foreign code that may raise, hang or score; each start has exactly one end
    engine requests       at most one running completion for each history; `close` ends the engine's sessions
    clock                 the seconds that count for the time limit; it pauses while a person answers
    record                the turns of all histories, in the order of completion

Separate from `Episode`, because each fork is an `Episode` with its own history, and all forks share these resources.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from polyturn.core.errors import EngineError, InteractionError, SnapshotError, one_line
from polyturn.core.generation import GenerateRequest
from polyturn.core.lifecycle import Lifecycle
from polyturn.core.messages import Message, Origin
from polyturn.core.task import Task
from polyturn.core.trajectory import ToolResult
from polyturn.infra.aio import loop_clock
from polyturn.rollout.calls import LoopBridge
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.history import History
from polyturn.rollout.open_turn import OpenTurn
from polyturn.tools.episode_tools import EpisodeTools

logger = logging.getLogger(__name__)

END_SESSION_S = 30.0
"""Seconds that an engine may take to drop its state of a conversation."""
ABORT_S = 30.0
"""Seconds that an engine may take to accept the abort of a completion."""


class Fork(NamedTuple):
    """A fork, as `Resources` registers it."""

    id: str
    history: History
    lifecycle: Lifecycle


class Resources:
    """The resources that an episode shares with its forks."""

    def __init__(self, context: RolloutContext, task: Task, *, id: str) -> None:
        """Prepare without starting anything."""
        self.id = id
        """The id of the episode itself; forks have other ids."""
        self.task = task
        self.bridge = LoopBridge()
        """Runs coroutines on the event loop for the episode's threads."""
        self.forks: list[Fork] = []
        """All forks, without the episode itself."""
        self.turns: list[OpenTurn] = []
        """The turns of the episode and its forks, in the order of completion."""
        self.num_asides, self.aside_tokens = 0, 0
        """Number of completions of asides, which are not turns, and of their tokens."""
        self.is_started = False
        """Whether tools and interaction have been started."""
        self.on_turn: Callable[[], Awaitable[None]] | None = None
        """The journal's hook, or None; `prepare` calls it after the first prompt and before each later one."""
        self._now = loop_clock()
        self.began = self._now()
        """Start time on the loop's clock, in seconds; a resume moves it back by the time spent in an earlier process."""
        self._context = context
        self.tools = EpisodeTools(context.tools, id)
        self.interaction = context.partner_for(task)
        """The interaction that the row names; None if the row does not name one."""
        self._has_partners = True
        self._answered: dict[str, asyncio.Event] = {}
        """Id of each running engine request -> an event that is set when the request ends."""
        self._before_s, self._since = 0.0, self.began
        self._num_pauses = 0
        self._timeout: asyncio.Timeout | None = None
        self._limit_s: float | None = None

    # Start, snapshot and end.

    def without_partners(self) -> None:
        """Disable tools and interaction, for a scheduler that brings its own; call it before the first `prepare`."""
        self._has_partners, self.interaction = False, None

    async def start(self) -> tuple[Message, ...]:
        """Create the tools and start the interaction; return the tools' opening messages for the prompt.

        Raises:
            ToolStartError, InteractionError: one could not be started.
        """
        self.is_started = True
        if not self._has_partners:
            return ()
        opening = await self.tools.start(self.task)
        if self.interaction is not None:
            await self.interaction.start(self.id)
        return as_messages(opening)

    @property
    def why_not(self) -> str | None:
        """Why a conversation with these tools and this interaction cannot be resumed; None if it can."""
        hooks = [self._context.tools.hooks[name] for name in self.tools.names]
        hooks += [] if self.interaction is None else [self.interaction.loaded.hooks]
        return next((one.why_not for one in hooks if one.why_not is not None), None)

    async def snapshot(self) -> dict[str, Any]:
        """Return the state of the tools and the interaction for this episode.

        Raises:
            SnapshotError: a tool or the interaction raised or was late.
        """
        tools = await self.tools.snapshot()
        try:
            return {"tools": tools, "partner": None if self.interaction is None else await self.interaction.snapshot()}
        except InteractionError as problem:
            raise SnapshotError(str(problem)) from problem

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Start tools and interaction again, and restore the result of `snapshot`.

        Raises:
            PolyturnError: a tool or the interaction raised or was late.
        """
        await self.start()
        await self.tools.restore(state["tools"])
        if self.interaction is not None:
            await self.interaction.restore(state["partner"])

    async def close(self) -> list[str]:
        """Release the tools, finalize the interaction and end the engine's sessions; return the failures."""
        # The bridge first, so that the scheduler's threads cannot start anything during the release.
        self.bridge.close()
        self.on_turn = None
        problems = [str(p) for p in await self.tools.close()]
        if self.interaction is not None and (problem := await self.interaction.close()) is not None:
            problems.append(problem)
        return problems + await self._end_sessions()

    # Tools and interaction.

    async def score_last(self, turns: Sequence[OpenTurn]) -> None:
        """Let the interaction score the final turn, unless it has already answered or scored that turn."""
        if self.interaction is not None and turns and "interaction" not in {*turns[-1].timings, *turns[-1].scores}:
            score = await self.interaction.final_score()
            if score is not None:
                turns[-1].scores["interaction"] = score

    # The engine.

    @contextmanager
    def asking(self, request: GenerateRequest) -> Iterator[None]:
        """Register `request` as running during the block, so that `abort` can end it."""
        answered = self._answered[request.request_id] = asyncio.Event()
        try:
            yield
        finally:
            answered.set()
            del self._answered[request.request_id]

    async def abort(self) -> None:
        """Abort the completions that the engine is sampling, and wait until they have ended."""
        for request_id, answered in list(self._answered.items()):
            try:
                async with asyncio.timeout(ABORT_S):
                    await self._context.engine.abort(request_id)
            except TimeoutError:
                logger.warning(
                    "%s: the engine did not accept an abort within %g s and keeps sampling; the episode waits until the "
                    "completion ends",
                    request_id,
                    ABORT_S,
                )
            await answered.wait()  # from then on, `num_sampled` counts the tokens of the completion

    @property
    def num_sampled(self) -> int:
        """Number of tokens in all completions, asides included."""
        return sum(len(turn.completion.token_ids) for turn in self.turns) + self.aside_tokens

    async def _end_sessions(self) -> list[str]:
        """End the engine's sessions of all histories; return the failures."""
        problems = []
        for session_id in (self.id, *(fork.id for fork in self.forks)):
            try:
                async with asyncio.timeout(END_SESSION_S):
                    await self._context.engine.end_session(session_id)
            except (EngineError, TimeoutError) as problem:
                problems.append(f"{session_id}: the engine did not end the session: {one_line(problem)}")
        return problems

    # The clock.

    @property
    def elapsed_s(self) -> float:
        """Seconds that count for the time limit, without pauses and the time between two processes of a resumed run."""
        return self._before_s + (0.0 if self._num_pauses else self._now() - self._since)

    @property
    def duration_s(self) -> float:
        """Seconds since the start, including pauses, without the time between two processes of a resumed run."""
        return self._now() - self.began

    def spent(self, *, elapsed_s: float, duration_s: float) -> None:
        """Start the clock at the seconds that an earlier process of this episode has used."""
        now = self._now()
        self._before_s, self._since, self.began = elapsed_s, now, now - duration_s
        self._reschedule()

    @asynccontextmanager
    async def within(self, limit_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the block once `elapsed_s` reaches `limit_s`; None means no limit.

        Raises:
            TimeoutError: the limit was reached; `expired()` of the yielded time-out is then true.
        """
        self._limit_s = limit_s
        async with asyncio.timeout(self._rest_s()) as self._timeout:
            try:
                yield self._timeout
            finally:
                self._timeout = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock during the block; blocks may overlap.

        The episode cannot hang here: a person's answer has a separate deadline.
        """
        if not self._num_pauses:
            self._before_s = self.elapsed_s
        self._num_pauses += 1
        self._reschedule()
        try:
            yield
        finally:
            self._num_pauses -= 1
            if not self._num_pauses:
                self._since = self._now()
                self._reschedule()

    def _rest_s(self) -> float | None:
        return None if self._limit_s is None else max(0.0, self._limit_s - self.elapsed_s)

    def _reschedule(self) -> None:
        if self._timeout is None or self._timeout.expired():
            return
        rest_s = None if self._num_pauses else self._rest_s()
        self._timeout.reschedule(None if rest_s is None else asyncio.get_running_loop().time() + rest_s)


def as_messages(results: Sequence[ToolResult]) -> tuple[Message, ...]:
    """Convert tool results to the messages that the model sees."""
    return tuple(
        Message(role="tool", content=r.content, tool_call_id=r.call_id, name=r.name, origin=Origin.ENVIRONMENT)
        for r in results
    )
