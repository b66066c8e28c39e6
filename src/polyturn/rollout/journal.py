"""EpisodeJournal: a live episode in a journal, behind each complete turn, so that another process goes on with it.

    run_episode        take up what is held: the whole trajectory, or the last complete turn; else start from the task
    Episode.prepare    the turn before is complete: keep it, with what tools, interaction and scheduler keep
    run_and_score      the conversation is over: keep that, then, once it is scored, the trajectory

A turn is in the journal before the model is asked for the next one. So no call of a turn that is held is ever made again:
neither the engine's nor a tool's, an interaction's or a scheduler's. What cannot be kept (a plug-in with state that offers
no snapshot, forks, a value that JSON cannot write) restarts from its task, for a reason that is counted and said.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from polyturn.core.errors import NoSnapshotError, PolyturnError, SnapshotError, one_line
from polyturn.core.generation import SamplingParams
from polyturn.core.lifecycle import StopReason
from polyturn.core.serde import from_json
from polyturn.core.snapshots import SnapshotHooks
from polyturn.core.task import Task
from polyturn.core.trajectory import SpanRef, Trajectory
from polyturn.rollout.backstage import close_episode
from polyturn.rollout.journal_codec import JournalCodec, to_text
from polyturn.rollout.journal_records import read_trajectory, read_turn, write_trajectory, write_turn
from polyturn.rollout.open_turn import OpenTurn

if TYPE_CHECKING:
    from polyturn.rollout.context import RolloutContext
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.scheduler import MultiTurnScheduler

FORMAT = 2
"""Of what is kept; a conversation that was kept in another one starts from its task."""


@dataclass(slots=True, kw_only=True)
class JournaledEpisode:
    """What a journal holds of one episode that was in flight when its process ended."""

    digest: str
    """Of what it was a run of."""
    lines: list[Mapping[str, Any]] = field(default_factory=list)
    """One for each complete turn, then one for the end, as they were written."""
    why_not: str | None = None
    """Why it starts from its task."""


class Journal(Protocol):
    """Where flights are kept."""

    why_not: str | None
    """Why no turn is kept at all, but that an episode was in flight; None where turns are kept."""

    def takes(self, episode: str) -> bool:
        """Return whether the episode is one whose turns are worth keeping."""
        ...

    def recall(self, episode: str) -> JournaledEpisode | None:
        """Return what is held of an episode, once; None where it was not in flight."""
        ...

    async def write(self, episode: str, line: Callable[[], Mapping[str, Any]]) -> None:
        """Append a line, made where it holds nobody up, and return once the operating system has it.

        Raises:
            SnapshotError: the line cannot be made.
        """
        ...

    def count(self, name: str, *, reason: str = "") -> None:
        """Count a flight that was "resumed" or "restarted", or whose snapshot "failed"."""
        ...


class EpisodeJournal:
    """One episode's part of a journal."""

    def __init__(self, journal: Journal, context: RolloutContext, task: Task, *, id: str, sampling: SamplingParams) -> None:
        self.scheduler: MultiTurnScheduler | None = None
        """What runs the episode."""
        self.stop: StopReason | None = None
        """Why the conversation had ended, where it goes on with being scored."""
        self._journal = journal
        self._context = context
        self._task = task
        self._id = id
        self._book = JournalCodec(task.prompt)
        self._num_kept = 0
        self._seen: dict[int, Any] = {}
        self._turns: dict[int, Any] = {}
        """The turns as they stand in the journal, by index."""
        self._is_begun = False
        self._why_not: str | None = None
        self._known: tuple[MultiTurnScheduler, SnapshotHooks] | None = None
        """The scheduler that was looked at, and what it offers."""
        self._is_broken = False
        """A line could not be made, so none may follow."""
        schemas = context.tools.schemas_of(task)
        asked = (FORMAT, task.id, task.data_source, task.prompt, task.interaction, task.tools_kwargs, schemas, sampling)
        self._digest = hashlib.blake2b(repr(asked).encode(), digest_size=8).hexdigest()
        self._held = journal.recall(id)

    # What an earlier process left.

    def trajectory(self) -> Trajectory | None:
        """Return the episode's record where it was over and scored; None where there is something left to do."""
        held = self._usable()
        if held is None or "trajectory" not in held.lines[-1]:
            return None
        last, self._held = self._read(held), None
        self._journal.count("resumed")
        return read_trajectory(self._book, last["trajectory"], self._id, self._task)

    async def resume(self, make: Callable[[], Episode]) -> Episode | None:
        """Return an episode that stands behind its last complete turn; None where it starts from its task."""
        if self._held is None:
            return None
        held, self._held = self._usable(), None
        if held is None:
            return None
        if held.why_not is not None:
            self._journal.count("restarted", reason=held.why_not)
            return None
        episode, self.scheduler = make(), self._context.scheduler_for_episode()
        try:
            await self._restore(episode, held)
        except BaseException as problem:
            scheduler, self.scheduler = self.scheduler, None
            await close_episode(episode, scheduler)
            if not isinstance(problem, PolyturnError):
                raise
            self._journal.count("restarted", reason=one_line(problem).replace(self._id, "…"))
            self._book = JournalCodec(self._task.prompt)
            return None
        self._journal.count("resumed")
        episode.backstage.flight = self
        return episode

    def _usable(self) -> JournaledEpisode | None:
        """Return what is held; None, counted, where nothing of it can be used."""
        held = self._held
        if held is None:
            return None
        why = None
        if held.digest != self._digest:
            why = "its task, its tools, its sampling or the library's way to keep it are others now"
        elif not held.lines:
            why = held.why_not or "no turn of it was complete"
        if why is None:
            return held
        self._held = None
        self._journal.count("restarted", reason=why)
        return None

    def _read(self, held: JournaledEpisode) -> Mapping[str, Any]:
        """Take up the records of all lines, and return the last one."""
        for line in held.lines:
            self._book.read(line["new"])
        return held.lines[-1]

    async def _restore(self, episode: Episode, held: JournaledEpisode) -> None:
        last = self._read(held)
        state = self._book.decode(last["state"])
        if state["tools"] is not None:
            episode.list_tools(json.loads(state["tools"]))
        episode.sample_as(from_json(SamplingParams, state["sampling"]))
        held_turns = list(zip(map(json.loads, state["turns"]), state["spans"], strict=True))
        episode.restore(
            state["episode"], lambda span: [read_turn(self._book, turn, spans, span) for turn, spans in held_turns]
        )
        kept = json.loads(state["plugins"])
        await episode.backstage.environment.restore(kept["environment"])
        assert self.scheduler is not None
        if (restore := self._seam().restore) is not None:
            await episode.call(self.scheduler, restore, episode, kept["scheduler"])
        self._num_kept, self._is_begun = len(held_turns), True
        self.stop = None if last["stop"] is None else StopReason(last["stop"])

    # What this one leaves.

    async def begin(self, episode: Episode) -> None:
        """Write that the episode is in flight, and whether it can be kept."""
        self._why_not = self._journal.why_not or episode.backstage.environment.why_not or self._seam().why_not
        self._is_begun = True
        line = {"begun": self._digest, "why_not": self._why_not}
        await self._journal.write(self._id, lambda: line)

    async def keep(self, episode: Episode, *, stop: StopReason | None = None) -> None:
        """Keep the episode behind its last turn, unless it is kept already; with `stop`, that it is over."""
        if self._why_not is not None or not self._is_begun or (stop is None and self._num_kept == len(episode.turns)):
            return
        if episode.backstage.forks:
            await self._give_up("its scheduler forks it")
            return
        assert self.scheduler is not None
        try:
            snapshot = self._seam().snapshot
            kept = {
                "environment": await episode.backstage.environment.snapshot(),
                "scheduler": None if snapshot is None else await episode.call(self.scheduler, snapshot, episode),
            }
            plugins = to_text(kept)  # now: its owner goes on changing it
            turns = self._changed(episode.turns)
            spans = [list(turn.spans) for turn in episode.turns]
            state = episode.state()
            listed = None if episode.listed_tools is None else to_text(episode.listed_tools)
            sampling = _settings_of(episode.sampling)
            self._num_kept = len(episode.turns)
            await self._journal.write(self._id, lambda: self._line(state, turns, spans, plugins, listed, sampling, stop))
        except NoSnapshotError as problem:
            await self._give_up(str(problem))
        except PolyturnError as problem:
            reason = one_line(problem).replace(self._id, "…")
            self._journal.count("failed", reason=reason)
            await self._give_up(reason)

    async def end(self, trajectory: Trajectory) -> None:
        """Keep the record of the episode, which is over and scored."""
        if not self._is_begun or self._is_broken or self._journal.why_not is not None or trajectory.is_failed:
            return

        def line() -> Mapping[str, Any]:
            return self._with_new({"trajectory": write_trajectory(self._book, trajectory)})

        try:
            await self._journal.write(self._id, line)
        except SnapshotError as problem:
            self._is_broken = True
            self._journal.count("failed", reason=one_line(problem))

    def _line(
        self,
        state: dict[str, Any],
        turns: Mapping[int, dict[str, Any]],
        spans: Sequence[Sequence[SpanRef]],
        plugins: str,
        listed: str | None,
        sampling: dict[str, Any],
        stop: StopReason | None,
    ) -> Mapping[str, Any]:
        try:
            book = self._book
            self._turns.update((i, book.encode_text(to_text(book.encode(turn)))) for i, turn in turns.items())
            encoded = {
                "episode": book.encode(state),
                "turns": [self._turns[i] for i in range(len(spans))],
                "spans": spans,
                "plugins": book.encode_text(plugins),
                "tools": None if listed is None else book.encode_text(listed),
                "sampling": sampling,
            }
            return self._with_new({"state": encoded, "stop": None if stop is None else stop.value})
        except BaseException:
            self._is_broken = True
            raise

    def _with_new(self, line: dict[str, Any]) -> Mapping[str, Any]:
        new = self._book.take_new()
        return {"from": len(self._book) - len(new), "new": new, **line}

    def _changed(self, turns: Sequence[OpenTurn]) -> dict[int, dict[str, Any]]:
        """Return the turns that are not as the line before has them: the last one, and those that were scored anew."""
        changed = {}
        for index, turn in enumerate(turns):
            now = (turn.message, turn.text, turn.num_tokens, turn.is_continued, turn.observation, turn.tool_results)
            seen = (now, dict(turn.scores), dict(turn.info), dict(turn.timings))
            if self._seen.get(index) != seen:
                self._seen[index], changed[index] = seen, write_turn(turn)
        return changed

    async def _give_up(self, reason: str) -> None:
        """Write that the episode cannot be kept from here on."""
        self._why_not = reason
        await self._journal.write(self._id, lambda: {"why_not": reason})

    def _seam(self) -> SnapshotHooks:
        if self._known is None or self._known[0] is not self.scheduler:
            assert self.scheduler is not None
            self._known = (
                self.scheduler,
                SnapshotHooks.of(self.scheduler, label=f"the scheduler {type(self.scheduler).__name__}"),
            )
        return self._known[1]


@functools.lru_cache(maxsize=256)
def _settings_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return them as JSON writes them; nobody changes what is returned."""
    return dataclasses.asdict(sampling)
