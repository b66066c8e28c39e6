"""JournalCodec: the records of one episode as JSON, each written once however many lines of a journal name it.

    {"k": "message", "role": "user", …}  {"k": "span", "ids": "AQAAAA…", …}      what is new, in order: numbers 0, 1, …
    {"messages": [{"#record": 0}], "spans": [{"#record": 1}], …}                  a state that names them

A state is taken behind every turn and a turn adds few records, so a line costs what the turn added. Records are frozen and
told apart by identity; a state that is read back has one object where it had one, which rewriting a history relies on.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from polyturn.core.errors import SnapshotError
from polyturn.core.media import Media
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.serde import from_json, read_array, to_json
from polyturn.core.task import Task
from polyturn.core.trajectory import Span, ToolResult, Trajectory

_RECORDS: Mapping[str, type[Any]] = {"span": Span, "message": Message, "result": ToolResult, "media": Media}
"""Kind, as lines name it -> what is written once; any other dataclass is written where it stands."""
_KINDS = {of: kind for kind, of in _RECORDS.items()}
_REF = "#record"
_LEFT = "#json"
"""A plug-in's snapshot, as JSON in a text: its keys mean nothing here."""
_AS_IS = frozenset({int, float, bool, type(None)})
_ARRAYS: dict[str, type[Any]] = {"#int32": np.int32, "#float32": np.float32}
_ROUTES = "#routes"
_LONG = 128
"""Texts of this many characters, such as an image, are records of their own."""


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
        """Return what is held of an episode, once; None where it was not in flight."""
        ...

    async def write(self, episode: str, line: Callable[[], Mapping[str, Any]]) -> None:
        """Append a line, made where it holds nobody up, and return once the operating system has it.

        Raises:
            SnapshotError: the line cannot be made.
        """
        ...

    def count(self, name: str, *, reason: str = "") -> None:
        """Count an episode that was "resumed" or "restarted", or whose snapshot "failed"."""
        ...


class JournalCodec:
    """Numbers records as they are written, and finds them by number as they are read."""

    def __init__(self, known: Sequence[Any] = ()) -> None:
        """Begin with records that both sides know: the messages of the task."""
        self._records: list[Any] = []
        self._numbers: dict[int, int] = {}
        """id -> number; the records are kept alive by the list."""
        self._texts: dict[str, int] = {}
        self._new: list[Any] = []
        for record in known:
            self._add(record)
            if not isinstance(record.content, str):
                for value in (v for part in record.content for v in part.values() if _is_long(v)):
                    self._add(value)

    def __len__(self) -> int:
        return len(self._records)

    def encode(self, value: Any) -> Any:
        """Return a value as what JSON can write, naming records by their numbers.

        Raises:
            SnapshotError: it holds something that JSON cannot write.
        """
        kind = type(value)
        if kind in _AS_IS or (kind is str and len(value) < _LONG):
            return value
        if kind in _KINDS or kind is str:
            return {_REF: self._number(value)}
        if kind is dict:
            return {k: v if type(v) in _AS_IS else self.encode(v) for k, v in value.items()}
        if kind is list or kind is tuple or isinstance(value, list | tuple):
            return [v if type(v) in _AS_IS else self.encode(v) for v in value]
        if kind is np.ndarray and (name := f"#{value.dtype.name}") in _ARRAYS:
            return {name: base64.b64encode(value.tobytes()).decode()}
        if kind is np.ndarray and value.ndim == 3 and value.dtype.kind == "u":
            return {_ROUTES: to_json(value)}
        if isinstance(value, Enum):
            return value.value
        if dataclasses.is_dataclass(kind):
            return self.fields(value)
        if isinstance(value, Mapping):
            return self.encode(dict(value))
        if isinstance(value, np.generic):
            return value.item()
        raise SnapshotError(f"a conversation holds {value!r:.80} ({kind.__name__}), which JSON cannot write")

    def fields(self, record: Any, *, but: Collection[str] = ()) -> dict[str, Any]:
        """Return the fields of a dataclass, other than those named in `but`, as what JSON can write.

        Raises:
            SnapshotError: one holds something that JSON cannot write.
        """
        kind: Any = type(record)
        found: dict[str, Any] = {}
        for name, is_left in _fields(kind):
            if name not in but:
                value = getattr(record, name)
                written = value if type(value) in _AS_IS else {_LEFT: to_text(value)} if is_left else self.encode(value)
                found[name] = written
        return found

    def encode_text(self, text: str) -> Any:
        """Return a text that is written once, whichever object has it."""
        if text not in self._texts:
            self._texts[text] = self._add(text)
            self._new.append({"k": "text", "text": text})
        return {_REF: self._texts[text]}

    def take_new(self) -> list[Any]:
        """Return the records that no line has yet, in order."""
        new, self._new = self._new, []
        return new

    def read(self, new: Sequence[Mapping[str, Any]]) -> None:
        """Take up the records of a line."""
        for data in new:
            fields = {name: self.decode(value) for name, value in data.items() if name != "k"}
            record = fields["text"] if data["k"] == "text" else from_json(_RECORDS[data["k"]], fields)
            self._add(record)
            if isinstance(record, str):
                self._texts.setdefault(record, len(self._records) - 1)

    def decode(self, value: Any) -> Any:
        """Return what `encode` was given; tuples are lists."""
        if isinstance(value, dict):
            if _REF in value:
                return self._records[value[_REF]]
            if _LEFT in value:
                return json.loads(value[_LEFT])
            if _ROUTES in value:
                return read_array(value[_ROUTES], None)
            for name, dtype in _ARRAYS.items():
                if name in value:
                    return np.frombuffer(base64.b64decode(value[name]), dtype)
            return {k: self.decode(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.decode(v) for v in value]
        return value

    def _number(self, record: Any) -> int:
        number = self._numbers.get(id(record))
        if number is None:
            fields = {"text": record} if isinstance(record, str) else self.fields(record)  # first what it names itself
            number = self._add(record)
            self._new.append({"k": _KINDS.get(type(record), "text"), **fields})
        return number

    def _add(self, record: Any) -> int:
        self._records.append(record)
        return self._numbers.setdefault(id(record), len(self._records) - 1)


def to_text(value: Any) -> str:
    """Return what a plug-in left as JSON.

    Raises:
        SnapshotError: JSON cannot write it.
    """
    if value == {}:
        return "{}"  # as most are
    try:
        return json.dumps(value, default=_simple)
    except (TypeError, ValueError) as problem:
        raise SnapshotError(f"{value!r:.80} cannot be written as JSON: {problem}") from problem


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and len(value) >= _LONG


def _simple(value: Any) -> Any:
    """Return numbers of NumPy as Python's; the rest is refused."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no type of JSON")


@functools.cache
def _fields(kind: type[Any]) -> tuple[tuple[str, bool], ...]:
    """Return the names of a dataclass's fields, each with whether it holds what a plug-in left: a mapping of any keys."""
    hints = typing.get_type_hints(kind)
    return tuple((f.name, typing.get_origin(hints[f.name]) is Mapping) for f in dataclasses.fields(kind))


def write_trajectory(codec: JournalCodec, trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory that is scored, but for its id and its task, of which the prompt alone may be another."""
    return {**codec.fields(trajectory, but=("id", "task")), "shown": codec.encode(trajectory.task.prompt)}


def read_trajectory(codec: JournalCodec, data: Mapping[str, Any], id: str, task: Task) -> Trajectory:
    """Return the trajectory that `write_trajectory` wrote."""
    fields = codec.decode(data)
    shown = fields.pop("shown")
    is_same = len(shown) == len(task.prompt) and all(a is b for a, b in zip(shown, task.prompt, strict=True))
    run_of = task if is_same else dataclasses.replace(task, prompt=tuple(shown))
    reward = None if fields["reward"] is None else Reward(**fields["reward"])
    found = from_json(Trajectory, {**fields, "id": id, "task": run_of, "reward": reward})
    return dataclasses.replace(found, metrics=fields["metrics"])  # whole numbers stay such
