"""EpisodeJournal: a live episode in a journal, behind each complete turn, so that another process goes on with it.

    {"new": [records], "events": [["sampled", …], ["answered", …], …], "turns": {"3": …}, "state": {…}}      a line

A line has what happened to the history since the line before (`history`, ids included), the turns whose answers or
scores changed, and what tools, interaction and scheduler keep. To resume is to replay the events of all lines and to let the
plug-ins take up what the last line has of them.

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
from typing import Any

import numpy as np

from polyturn.core.arrays import Floats
from polyturn.core.errors import NoSnapshotError, PolyturnError, SnapshotError, one_line
from polyturn.core.generation import Completion, FinishReason, SamplingParams
from polyturn.core.lifecycle import StopReason
from polyturn.core.media import Media
from polyturn.core.messages import Message
from polyturn.core.protocols import Scheduler
from polyturn.core.serde import from_json
from polyturn.core.snapshots import SnapshotHooks
from polyturn.core.task import Task
from polyturn.core.trajectory import Span, Trajectory
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.history import Event, History
from polyturn.rollout.journal_codec import (
    Journal,
    JournalCodec,
    JournaledEpisode,
    read_trajectory,
    to_text,
    write_trajectory,
)
from polyturn.rollout.next_prompt import NO_IDS, Prompt
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.stop_strings import Stopped

__all__ = ["EpisodeJournal", "Journal", "JournaledEpisode", "replay"]

FORMAT = 4
"""Of what is kept; a conversation that was kept in another one starts from its task."""


class EpisodeJournal:
    """One episode's part of a journal."""

    def __init__(self, journal: Journal, context: RolloutContext, task: Task, *, id: str, sampling: SamplingParams) -> None:
        self.stop: StopReason | None = None
        """Why the conversation had ended, where it goes on with being scored."""
        self._journal, self._task, self._id = journal, task, id
        self._codec = JournalCodec(task.prompt)
        self._scheduler: Scheduler | None = None
        self._hooks = SnapshotHooks(label="")
        """The scheduler's hooks."""
        self._num_kept = 0
        self._seen: dict[int, Any] = {}
        """The answers and scores of the turns as they stand in the journal, by index."""
        self._is_begun = False
        self._why_not: str | None = None
        self._is_broken = False
        """A line could not be made, so none may follow."""
        schemas = context.tools.schemas_of(task)
        asked = (FORMAT, task.id, task.data_source, task.prompt, task.interaction, task.tools_kwargs, schemas, sampling)
        self._digest = hashlib.blake2b(repr(asked).encode(), digest_size=8).hexdigest()
        self._held = journal.recall(id)

    def attach(self, episode: Episode, scheduler: Scheduler) -> None:
        """Keep `episode`, which `scheduler` runs, from now on."""
        self._offered_by(scheduler)
        episode.history.events = []
        episode.resources.on_turn = functools.partial(self.keep, episode)

    # What an earlier process left.

    def trajectory(self) -> Trajectory | None:
        """Return the episode's record where it was over and scored; None where there is something left to do."""
        held = self._usable()
        if held is None or "trajectory" not in held.lines[-1]:
            return None
        for line in held.lines:
            self._codec.read(line["new"])
        self._held = None
        self._journal.count("resumed")
        return read_trajectory(self._codec, held.lines[-1]["trajectory"], self._id, self._task)

    def can_resume(self) -> bool:
        """Return whether a complete turn is held; counted, where something is held that cannot be used."""
        held = self._held = self._usable()
        if held is not None and held.why_not is not None:
            self._journal.count("restarted", reason=held.why_not)
            return False
        return held is not None

    async def restore(self, episode: Episode, scheduler: Scheduler) -> None:
        """Let a new episode stand behind its last complete turn.

        Raises:
            PolyturnError: a plug-in raised or was late.
        """
        held, self._held = self._held, None
        assert held is not None
        history, resources, changed = episode.history, episode.resources, dict[str, Any]()
        for line in held.lines:
            self._codec.read(line["new"])
            replay(history, self._codec.decode(line["events"]))
            changed.update(self._codec.decode(line["turns"]))
        for turn in history.turns:
            _change(turn, changed[str(turn.index)])
        state = self._codec.decode(held.lines[-1]["state"])
        if state["tools"] is not None:
            episode.list_tools(json.loads(state["tools"]))
        episode.sample_as(from_json(SamplingParams, state["sampling"]), stops=state["stops"])
        resources.turns = list(history.turns)
        resources.spent(elapsed_s=state["elapsed_s"], duration_s=state["duration_s"])
        kept = json.loads(state["plugins"])
        await resources.restore(kept["environment"])
        self._offered_by(scheduler)
        if self._hooks.restore is not None:
            await episode.call(scheduler, self._hooks.restore, episode, kept["scheduler"])
        self._num_kept, self._is_begun = len(history.turns), True
        self.stop = None if state["stop"] is None else StopReason(state["stop"])
        self._journal.count("resumed")

    def restart(self, problem: PolyturnError) -> None:
        """Count an episode that could not be restored; it starts from its task."""
        self._journal.count("restarted", reason=one_line(problem).replace(self._id, "…"))
        self._codec, self._num_kept, self._is_begun, self.stop = JournalCodec(self._task.prompt), 0, False, None

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

    # What this one leaves.

    async def keep(self, episode: Episode, *, stop: StopReason | None = None) -> None:
        """Keep the episode behind its last turn, unless it is kept already; with `stop`, that it is over.

        The first time it writes that the episode is in flight, and whether it can be kept.
        """
        if not self._is_begun:
            if stop is None:
                await self._begin(episode)
            return
        history, resources = episode.history, episode.resources
        if self._why_not is not None:
            history.events = None  # nobody is going to ask for them
            return
        if stop is None and self._num_kept == len(history.turns):
            return
        if resources.forks:
            await self._give_up("its scheduler forks it")
            return
        assert self._scheduler is not None
        try:
            snapshot = self._hooks.snapshot
            kept = {
                "environment": await resources.snapshot(),
                "scheduler": None if snapshot is None else await episode.call(self._scheduler, snapshot, episode),
            }
            # Now what its owners go on changing; the rest, which nobody changes, in the thread.
            plugins, turns = to_text(kept), self._changed(history.turns)
            events, history.events = history.events, []
            state = {
                "tools": None if episode.listed_tools is None else to_text(episode.listed_tools),
                "sampling": _settings_of(episode.sampling),
                "stops": list(episode.stops),
                "elapsed_s": resources.elapsed_s,
                "duration_s": resources.duration_s,
                "stop": None if stop is None else stop.value,
            }
            self._num_kept = len(history.turns)
            await self._write({"events": events, "turns": turns, "state": state}, plugins)
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
            return self._with_new({"trajectory": write_trajectory(self._codec, trajectory)})

        try:
            await self._journal.write(self._id, line)
        except SnapshotError as problem:
            self._is_broken = True
            self._journal.count("failed", reason=one_line(problem))

    async def _begin(self, episode: Episode) -> None:
        self._why_not = self._journal.why_not or episode.resources.why_not or self._hooks.why_not
        self._is_begun = True
        line = {"begun": self._digest, "why_not": self._why_not}
        await self._journal.write(self._id, lambda: line)

    async def _write(self, values: Mapping[str, Any], plugins: str) -> None:
        def line() -> Mapping[str, Any]:
            try:
                state = {**values["state"], "plugins": self._codec.encode_text(plugins)}
                return self._with_new(self._codec.encode({**values, "state": state}))
            except BaseException:
                self._is_broken = True
                raise

        await self._journal.write(self._id, line)

    def _with_new(self, line: dict[str, Any]) -> Mapping[str, Any]:
        new = self._codec.take_new()
        return {"from": len(self._codec) - len(new), "new": new, **line}

    def _changed(self, turns: list[OpenTurn]) -> dict[str, dict[str, Any]]:
        """Return what answered and scored those turns that are not as the line before has them."""
        changed = {}
        for turn in turns:
            seen = (turn.observation, turn.tool_results, dict(turn.scores), dict(turn.info), dict(turn.timings))
            if self._seen.get(turn.index) != seen:
                self._seen[turn.index] = seen
                changed[str(turn.index)] = {
                    "observation": turn.observation,
                    "tool_results": turn.tool_results,
                    "scores": to_text(turn.scores),
                    "info": to_text(turn.info),
                    "timings": dict(turn.timings),
                }
        return changed

    async def _give_up(self, reason: str) -> None:
        """Write that the episode cannot be kept from here on."""
        self._why_not = reason
        await self._journal.write(self._id, lambda: {"why_not": reason})

    def _offered_by(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._hooks = SnapshotHooks.of(scheduler, label=f"the scheduler {type(scheduler).__name__}")


def replay(history: History, events: Sequence[Event]) -> None:
    """Apply the `events` of another history of the same prompt; nothing is encoded or parsed."""
    kept, history.events = history.events, None
    for name, *values in events:
        _REPLAYED[name](history, *values)
    history.events = kept


def _shown(
    history: History,
    is_whole: bool,
    segment: int,
    span: Span | None,
    num_new: int,
    length: int,
    media: Sequence[Media],
) -> None:
    ids, held = NO_IDS if span is None else span.ids, history.builder.build()
    if is_whole and segment < len(held):
        ids = np.concatenate([held[segment].token_ids, ids])
    history.show(Prompt(ids, is_whole, num_new, length, tuple(media)))


def _sampled(history: History, message: Message, text: str, spans: Sequence[Span], *rest: Any) -> None:
    finish, versions, info, stop, num_dropped, index, cut_by, *routes = rest
    given = [span.logprobs for span in spans if span.logprobs is not None]
    completion = Completion(
        token_ids=np.concatenate([span.ids for span in spans]),
        logprobs=np.concatenate(given) if given else None,
        finish_reason=FinishReason(finish),
        policy_versions=tuple((start, version) for start, version in versions),
        routed_experts=routes[0] if routes else None,
        info=info,
    )
    history.sample(message, text, Stopped(completion, stop, num_dropped), index=index, cut_by=StopReason(cut_by))


def _weighed(history: History, index: int, weights: Floats) -> None:
    history.weigh(next(turn for turn in history.turns if turn.index == index), weights)


_REPLAYED: dict[str, Callable[..., Any]] = {
    "named": History.play_as,
    "reasoned": History.keep_reasoning,
    "prompt": History.set_prompt,
    "shown": _shown,
    "sampled": _sampled,
    "answered": History.answer,
    "edited": History.edit,
    "given": History.show_ids,
    "continued": History.continue_turn,
    "weighed": _weighed,
}
"""Name of an event -> the function that lets it happen again."""


def _change(turn: OpenTurn, values: Mapping[str, Any]) -> None:
    """Give a turn what answered and scored it."""
    turn.observation, turn.tool_results = tuple(values["observation"]), tuple(values["tool_results"])
    turn.scores, turn.info = json.loads(values["scores"]), json.loads(values["info"])
    turn.timings = dict(values["timings"])


@functools.lru_cache(maxsize=256)
def _settings_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return them as JSON writes them; nobody changes what is returned."""
    return dataclasses.asdict(sampling)
