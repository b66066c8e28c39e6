"""EpisodeJournal: writes a live episode to a journal after each complete turn, so that another process can continue it.

    {"line": 2, "versions": [40], "texts": […], "events": [["TurnSampled", …], …], "turns": {"3": …}, "state": {…}}
    {"line": 3, "versions": [40], "texts": […], "trajectory": {…}}                          the episode is over and scored

A line has the history's events since the previous line (`rollout/events.py`, ids included), the turns whose answers or
scores changed, and the snapshots of tools, interaction and scheduler. A resume replays the events of all lines and restores
the plug-ins from the last snapshots.

A turn is in the journal before the next generation starts. So a resume never repeats a call of a recorded turn to the
engine, a tool, the interaction or the scheduler. An episode that cannot be recorded (a plug-in with state but without a
snapshot, forks, a value that JSON cannot represent) restarts from its task; the reason is counted and reported.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyturn.core.errors import NoSnapshotError, PolyturnError, SnapshotError, one_line
from polyturn.core.generation import SamplingParams
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.protocols import Scheduler
from polyturn.core.serde import from_json, to_json
from polyturn.core.snapshots import SnapshotHooks
from polyturn.core.task import Task
from polyturn.core.trajectory import ToolResult, Trajectory
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.episode import Episode
from polyturn.rollout.events import TurnSampled, read_events, replay, write_events
from polyturn.rollout.journal_protocol import Journal, JournaledEpisode
from polyturn.rollout.open_turn import OpenTurn

__all__ = ["EpisodeJournal", "Journal", "JournaledEpisode"]

FORMAT = 6
"""Version of the journal's format; an episode recorded in another version restarts from its task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The parts of a turn that are added after its completion."""

    observation: tuple[Message, ...]
    tool_results: tuple[ToolResult, ...]
    scores: str
    """JSON, like `info`, because plug-ins choose the values."""
    info: str
    timings: Mapping[str, float]


_LONG = 128
"""Texts of at least this many characters, such as images, are written only once."""
_TEXT = "#text"


class _Texts:
    """The long texts of an episode's lines; each is written once and then referenced by its number: {"#text": 3}."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def pack(self, line: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace long texts in a line by their numbers, and add the new texts to it."""
        first = len(self._texts)
        packed = {name: self._pack(value) for name, value in line.items()}
        return {"texts": self._texts[first:], **packed}

    def unpack(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Undo `pack`; lines must be unpacked in their order."""
        for text in line["texts"]:
            self._number(text)
        return {name: self._unpack(value) for name, value in line.items() if name != "texts"}

    def _number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]

    def _pack(self, value: Any) -> Any:
        if isinstance(value, str):
            return value if len(value) < _LONG else {_TEXT: self._number(value)}
        if isinstance(value, dict):
            packed = {name: self._pack(one) for name, one in value.items()}
            return {_TEXT: list(packed.items())} if _TEXT in value else packed
        if isinstance(value, list):
            return value if value and isinstance(value[0], int | float) else [self._pack(one) for one in value]
        return value

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, dict):
            text = value.get(_TEXT)
            if isinstance(text, int):
                return self._texts[text]
            return {name: self._unpack(one) for name, one in (value.items() if text is None else text)}
        return [self._unpack(one) for one in value] if isinstance(value, list) else value


class EpisodeJournal:
    """Reads and writes one episode's part of a journal."""

    def __init__(self, journal: Journal, context: RolloutContext, task: Task, *, id: str, sampling: SamplingParams) -> None:
        self.stop: StopReason | None = None
        """Why the conversation ended, if a resume only has to score it; else None."""
        self._journal, self._task, self._id = journal, task, id
        self._scheduler: Scheduler | None = None
        self._hooks = SnapshotHooks(label="")
        """The scheduler's hooks."""
        self._num_kept = 0
        self._num_lines = 0
        self._texts = _Texts()
        self._plugins: str | None = None
        """The snapshots of the last line, as JSON."""
        self._seen: dict[int, Any] = {}
        """The answers and scores of the turns as recorded, by turn index."""
        self._is_begun = False
        self._why_not: str | None = None
        self._is_broken = False
        """Whether a line could not be written, after which no line may follow."""
        schemas = context.tools.schemas_of(task)
        facts = (FORMAT, task.id, task.data_source, task.prompt, task.interaction, task.tools_kwargs, schemas, sampling)
        self._digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
        self._record = journal.recall(id)

    def attach(self, episode: Episode, scheduler: Scheduler) -> None:
        """Record `episode`, which `scheduler` drives, from now on."""
        self._offered_by(scheduler)
        episode.history.events = []
        episode.resources.on_turn = functools.partial(self.keep, episode)

    # Reading the record of an earlier process.

    def trajectory(self) -> Trajectory | None:
        """Return the trajectory if the episode was over and scored, else None."""
        record = self._usable()
        if record is None or "trajectory" not in record.lines[-1]:
            return None
        self._record = None
        self._journal.count("resumed")
        *_, last = map(self._texts.unpack, record.lines)
        return _read_trajectory(last["trajectory"], self._id, self._task)

    def can_resume(self) -> bool:
        """Return whether there is a complete turn to resume from; count a record that cannot be used."""
        record = self._record = self._usable()
        if record is not None and record.why_not is not None:
            self._journal.count("restarted", reason=record.why_not)
            return False
        return record is not None

    async def restore(self, episode: Episode, scheduler: Scheduler) -> None:
        """Bring a new episode to the state after the last recorded turn.

        Raises:
            PolyturnError: a plug-in raised or was late.
        """
        record, self._record = self._record, None
        assert record is not None
        history, resources, changed = episode.history, episode.resources, dict[str, Any]()
        lines = [self._texts.unpack(line) for line in record.lines]
        for line in lines:
            replay(history, read_events(line["events"]))
            changed.update(line["turns"])
            self._plugins = line["state"]["plugins"] or self._plugins
        for turn in history.turns:
            _change(turn, from_json(_Answer, changed[str(turn.index)]))
        state = lines[-1]["state"]
        if state["tools"] is not None:
            episode.list_tools(json.loads(state["tools"]))
        episode.sample_as(from_json(SamplingParams, state["sampling"]), stops=state["stops"])
        resources.turns = list(history.turns)
        resources.spent(elapsed_s=state["elapsed_s"], duration_s=state["duration_s"])
        assert self._plugins is not None
        kept = json.loads(self._plugins)
        await resources.restore(kept["environment"])
        self._offered_by(scheduler)
        if self._hooks.restore is not None:
            await episode.call(scheduler, self._hooks.restore, episode, kept["scheduler"])
        self._num_kept, self._num_lines, self._is_begun = len(history.turns), len(record.lines), True
        self.stop = None if state["stop"] is None else StopReason(state["stop"])
        self._journal.count("resumed")

    def restart(self, problem: PolyturnError) -> None:
        """Count an episode that could not be restored, and reset for a start from its task."""
        self._journal.count("restarted", reason=one_line(problem).replace(self._id, "…"))
        self._num_kept, self._num_lines, self._is_begun, self.stop = 0, 0, False, None
        self._plugins, self._texts = None, _Texts()

    def _usable(self) -> JournaledEpisode | None:
        """Return the recorded episode, or count it and return None if it cannot be used."""
        record = self._record
        if record is None:
            return None
        if record.digest != self._digest:
            why = "its task, its tools, its sampling settings or the journal's format changed"
        elif not record.lines:
            why = record.why_not or "it had no complete turn"
        else:
            return record
        self._record = None
        self._journal.count("restarted", reason=why)
        return None

    # Writing.

    async def keep(self, episode: Episode, *, stop: StopReason | None = None) -> None:
        """Record the state after the last turn, unless it is recorded already; with `stop`, also that the episode is over.

        The first call writes that the episode is in flight, and whether it can be recorded.
        """
        if not self._is_begun:
            if stop is None:
                await self._begin(episode)
            return
        history, resources = episode.history, episode.resources
        if self._why_not is not None:
            history.events = None  # no more lines are written, so they are not needed
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
            # Values that may still change are copied here; the others are converted later, in the journal's thread.
            plugins, turns = _to_text(kept), self._changed(history.turns)
            events, history.events = history.events or [], []
            state = {
                "tools": None if episode.listed_tools is None else _to_text(episode.listed_tools),
                "sampling": _settings_of(episode.sampling),
                "stops": list(episode.stops),
                "elapsed_s": resources.elapsed_s,
                "duration_s": resources.duration_s,
                "stop": None if stop is None else stop.value,
                "plugins": None if plugins == self._plugins else plugins,
            }
            self._num_kept, self._plugins = len(history.turns), plugins
            sampled = (event.completion for event in events if isinstance(event, TurnSampled))
            versions = (version for completion in sampled for _, version in completion.policy_versions)
            await self._write(versions, lambda: {"events": write_events(events), "turns": to_json(turns), "state": state})
        except NoSnapshotError as problem:
            await self._give_up(str(problem))
        except PolyturnError as problem:
            reason = one_line(problem).replace(self._id, "…")
            self._journal.count("failed", reason=reason)
            await self._give_up(reason)

    async def end(self, trajectory: Trajectory) -> None:
        """Record the trajectory of the episode, which is over and scored."""
        if not self._is_begun or self._is_broken or self._journal.why_not is not None or trajectory.is_failed:
            return
        versions = (span.policy_version for segment in trajectory.segments for span in segment.spans)
        try:
            await self._write(versions, lambda: {"trajectory": _write_trajectory(trajectory)})
        except SnapshotError as problem:
            self._journal.count("failed", reason=one_line(problem))

    async def _begin(self, episode: Episode) -> None:
        self._why_not = self._journal.why_not or episode.resources.why_not or self._hooks.why_not
        self._is_begun = True
        line = {"begun": self._digest, "why_not": self._why_not}
        await self._journal.write(self._id, lambda: line)

    async def _write(self, versions: Iterable[int | None], content: Callable[[], Mapping[str, Any]]) -> None:
        """Append a line with the policy versions of its tokens; `content` is called in the journal's thread."""
        self._num_lines += 1
        number = self._num_lines

        def line() -> Mapping[str, Any]:
            distinct = sorted({version for version in versions if version is not None})
            return self._texts.pack({"line": number, "versions": distinct, **content()})

        try:
            await self._journal.write(self._id, line)
        except BaseException:
            self._is_broken = True
            raise

    def _changed(self, turns: list[OpenTurn]) -> dict[str, _Answer]:
        """Return the answers and scores of the turns that changed since the previous line."""
        changed = {}
        for turn in turns:
            results = [(dataclasses.replace(r, metrics={}), _copy(r.metrics)) for r in turn.tool_results]
            seen = (turn.observation, results, _copy(turn.scores), _copy(turn.info), dict(turn.timings))
            if self._seen.get(turn.index) != seen:
                self._seen[turn.index] = seen
                for result in turn.tool_results:
                    _to_text(result.metrics)  # raises for a value that JSON cannot represent
                changed[str(turn.index)] = _Answer(
                    observation=turn.observation,
                    tool_results=turn.tool_results,
                    scores=_to_text(turn.scores),
                    info=_to_text(_with_keys(turn.info)),
                    timings=dict(turn.timings),
                )
        return changed

    async def _give_up(self, reason: str) -> None:
        """Write that the episode is no longer recorded."""
        self._why_not = reason
        await self._journal.write(self._id, lambda: {"why_not": reason})

    def _offered_by(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._hooks = SnapshotHooks.of(scheduler, label=f"the scheduler {type(scheduler).__name__}")


def _change(turn: OpenTurn, answer: _Answer) -> None:
    """Set the recorded answers and scores on a turn."""
    turn.observation, turn.tool_results = answer.observation, answer.tool_results
    turn.scores, turn.info = json.loads(answer.scores), json.loads(answer.info, object_hook=_read_keys)
    turn.timings = dict(answer.timings)


def _copy(values: Mapping[str, Any]) -> Any:
    """Copy a plug-in's values, so that they can be compared with later ones: values that may change inside become JSON."""
    is_flat = all(value is None or isinstance(value, str | int | float) for value in values.values())
    return dict(values) if is_flat else _to_text(values)


_ITEMS = "#items"


def _with_keys(value: Any) -> Any:
    """Write a mapping whose keys are not all texts, which JSON cannot represent, as {"#items": [[key, value], …]}."""
    if isinstance(value, list | tuple):
        return [_with_keys(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    items = [[key, _with_keys(one)] for key, one in value.items()]
    if all(isinstance(key, str) and key != _ITEMS for key in value):
        return dict(items)
    if unknown := [key for key in value if not isinstance(key, str | int | float | None)]:
        raise SnapshotError(f"{unknown[0]!r:.80} is a key, which cannot be written as JSON; use a text or a number")
    return {_ITEMS: items}


def _read_keys(value: dict[str, Any]) -> dict[Any, Any]:
    """Undo `_with_keys`."""
    return dict(value[_ITEMS]) if _ITEMS in value else value


def _write_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON, without its id and task but with the task's prompt, which a plug-in may have changed."""
    names = (f.name for f in dataclasses.fields(trajectory) if f.name not in ("id", "task"))
    return {"prompt": to_json(trajectory.task.prompt), **{name: to_json(getattr(trajectory, name)) for name in names}}


def _read_trajectory(data: Mapping[str, Any], id: str, task: Task) -> Trajectory:
    """Parse the output of `_write_trajectory`."""
    prompt = from_json(tuple[Message, ...], data["prompt"])
    task = task if prompt == task.prompt else dataclasses.replace(task, prompt=prompt)
    fields = {name: value for name, value in data.items() if name != "prompt"}
    trajectory = from_json(Trajectory, {**fields, "id": id, "task": task})
    return dataclasses.replace(trajectory, metrics=data["metrics"])  # keeps integers as integers


def _to_text(value: Any) -> str:
    """Return a plug-in's state as JSON.

    Raises:
        SnapshotError: JSON cannot represent the state.
    """
    if value == {}:
        return "{}"  # the most frequent case
    try:
        return json.dumps(value, default=_simple)
    except (TypeError, ValueError) as problem:
        raise SnapshotError(f"{value!r:.80} cannot be written as JSON: {problem}") from problem


def _simple(value: Any) -> Any:
    """Convert NumPy numbers and arrays and mappings to plain Python; refuse other types."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")


@functools.lru_cache(maxsize=256)
def _settings_of(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters as a dict, which is cached: do not change it."""
    return dataclasses.asdict(sampling)
