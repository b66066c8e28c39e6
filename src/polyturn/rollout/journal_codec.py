"""JournalCodec: the records of one episode as JSON, each written once however many lines of a journal name it.

    {"k": "message", "role": "user", …}  {"k": "span", "ids": "AQAAAA…", …}      what is new, in order: numbers 0, 1, …
    {"messages": [{"#record": 0}], "spans": [{"#record": 1}], …}                  a state that names them

A state is taken behind every turn and a turn adds few records, so a line costs what the turn added. Records are frozen and
told apart by identity; a state that is read back has one object where it had one, which rewriting a history relies on.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from polyturn.core.errors import SnapshotError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.media import Media
from polyturn.core.messages import Message, Origin, ToolCall
from polyturn.core.reward import Reward
from polyturn.core.serde import read_array, to_json
from polyturn.core.task import Task
from polyturn.core.trajectory import Branch, Segment, Span, SpanRef, SpanSource, ToolResult, Trajectory, Turn

_REF = "#record"
_AS_IS = frozenset({int, float, bool, type(None)})
_ARRAYS: dict[str, type[Any]] = {"#int32": np.int32, "#float32": np.float32}
_ROUTES = "#routes"
_LONG = 128
"""Texts of this many characters, such as an image, are records of their own."""


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
    """Where live episodes are kept."""

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
        if kind in _WRITERS or kind is str:
            return {_REF: self._number(value)}
        if kind is dict:
            return {k: v if type(v) in _AS_IS else self.encode(v) for k, v in value.items()}
        if kind is list or kind is tuple or isinstance(value, list | tuple):
            return [v if type(v) in _AS_IS else self.encode(v) for v in value]
        if isinstance(value, Enum):
            return value.value
        if kind is np.ndarray and value.dtype in _ARRAYS.values():
            return {f"#{value.dtype.name}": pack(value)}
        if kind is np.ndarray and value.ndim == 3 and value.dtype.kind == "u":
            return {_ROUTES: to_json(value)}
        if isinstance(value, np.generic):
            return value.item()
        raise SnapshotError(f"a conversation holds {value!r:.80} ({kind.__name__}), which JSON cannot write")

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
            fields = {k: v for k, v in data.items() if k != "k"}
            record = _READERS[data["k"]](self, fields)
            self._add(record)
            if isinstance(record, str):
                self._texts.setdefault(record, len(self._records) - 1)

    def decode(self, value: Any) -> Any:
        """Return what `encode` was given; tuples are lists."""
        if isinstance(value, dict):
            if _REF in value:
                return self._records[value[_REF]]
            if _ROUTES in value:
                return read_array(value[_ROUTES], None)
            for name, dtype in _ARRAYS.items():
                if name in value:
                    return unpack(value[name], dtype)
            return {k: self.decode(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.decode(v) for v in value]
        return value

    def _number(self, record: Any) -> int:
        number = self._numbers.get(id(record))
        if number is None:
            written = _WRITERS[type(record)](self, record)  # first what it names itself
            number = self._add(record)
            self._new.append(written)
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


def pack(array: NDArray[Any] | None) -> str | None:
    """Return the bytes of an array as text."""
    return None if array is None else base64.b64encode(array.tobytes()).decode()


def unpack(text: str | None, dtype: type[Any]) -> Any:
    """Return the array that `pack` was given."""
    return None if text is None else np.frombuffer(base64.b64decode(text), dtype)


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


def _write_span(book: JournalCodec, span: Span) -> dict[str, Any]:
    return {
        "k": "span",
        "ids": pack(span.ids),
        "source": span.source.value,
        "turn": span.turn,
        "logprobs": pack(span.logprobs),
        "version": span.policy_version,
        "weights": pack(span.weights),
        "routed": book.encode(span.routed_experts),
    }


def _read_span(book: JournalCodec, data: dict[str, Any]) -> Span:
    return Span(
        ids=unpack(data["ids"], np.int32),
        source=SpanSource(data["source"]),
        turn=data["turn"],
        logprobs=unpack(data["logprobs"], np.float32),
        policy_version=data["version"],
        weights=unpack(data["weights"], np.float32),
        routed_experts=book.decode(data.get("routed")),
    )


def _write_content(book: JournalCodec, content: Any) -> Any:
    return book.encode(content) if isinstance(content, str) else [book.encode(dict(part)) for part in content]


def _read_content(book: JournalCodec, content: Any) -> Any:
    found = book.decode(content)
    return tuple(found) if isinstance(found, list) else found


def _write_message(book: JournalCodec, message: Message) -> dict[str, Any]:
    calls = [{**_fields(call), "arguments": to_text(call.arguments)} for call in message.tool_calls]
    content = _write_content(book, message.content)
    origin = None if message.origin is None else message.origin.value
    return {"k": "message", **_fields(message), "content": content, "tool_calls": calls, "origin": origin}


def _read_message(book: JournalCodec, data: dict[str, Any]) -> Message:
    calls = tuple(ToolCall(**{**call, "arguments": json.loads(call["arguments"])}) for call in data["tool_calls"])
    origin = None if data.get("origin") is None else Origin(data["origin"])
    return Message(**{**data, "content": _read_content(book, data["content"]), "tool_calls": calls, "origin": origin})


def _write_result(book: JournalCodec, result: ToolResult) -> dict[str, Any]:
    content = _write_content(book, result.content)
    return {"k": "result", **_fields(result), "content": content, "metrics": to_text(result.metrics)}


def _read_result(book: JournalCodec, data: dict[str, Any]) -> ToolResult:
    content = _read_content(book, data["content"])
    return ToolResult(**{**data, "content": content, "metrics": json.loads(data["metrics"])})


def _write_media(book: JournalCodec, media: Media) -> dict[str, Any]:
    return {"k": "media", "kind": media.kind, "source": book.encode(media.source)}


def _read_media(book: JournalCodec, data: dict[str, Any]) -> Media:
    source = book.decode(data["source"])
    return Media(kind=data["kind"], source=tuple(source) if isinstance(source, list) else source)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _NAMES[type(record)]}


_NAMES = {
    kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in (Message, ToolCall, ToolResult, Segment, Turn)
}


_WRITERS: dict[type[Any], Any] = {
    Span: _write_span,
    Message: _write_message,
    ToolResult: _write_result,
    Media: _write_media,
    str: lambda book, text: {"k": "text", "text": text},
}
_READERS: dict[str, Any] = {
    "span": _read_span,
    "message": _read_message,
    "result": _read_result,
    "media": _read_media,
    "text": lambda book, data: data["text"],
}


def write_trajectory(book: JournalCodec, trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory that is scored."""
    turns = [{**_fields(t), "scores": to_text(t.scores), "info": to_text(t.info)} for t in trajectory.turns]
    segments = [_fields(segment) for segment in trajectory.segments]
    reward = trajectory.reward
    return {
        "shown": book.encode(trajectory.task.prompt),
        "segments": book.encode(segments),
        "turns": book.encode(turns),
        "stop": trajectory.stop_reason.value,
        "reward": None if reward is None else to_text([reward.total, reward.components, reward.info]),
        "metrics": to_text(trajectory.metrics),
    }


def read_trajectory(book: JournalCodec, data: Mapping[str, Any], id: str, task: Task) -> Trajectory:
    """Return the trajectory that `write_trajectory` wrote."""
    shown, segments, turns = (book.decode(data[name]) for name in ("shown", "segments", "turns"))
    reward = None if data["reward"] is None else json.loads(data["reward"])
    is_same = len(shown) == len(task.prompt) and all(a is b for a, b in zip(shown, task.prompt, strict=True))
    return Trajectory(
        id=id,
        task=task if is_same else dataclasses.replace(task, prompt=tuple(shown)),
        segments=tuple(
            Segment(
                spans=tuple(s["spans"]),
                media=tuple(s["media"]),
                agent=s["agent"],
                parent=None if s["parent"] is None else Branch(*s["parent"]),
            )
            for s in segments
        ),
        turns=tuple(
            Turn(
                **{
                    **turn,
                    "finish_reason": FinishReason(turn["finish_reason"]),
                    "spans": tuple(SpanRef(*ref) for ref in turn["spans"]),
                    "tool_results": tuple(turn["tool_results"]),
                    "observation": tuple(turn["observation"]),
                    "scores": json.loads(turn["scores"]),
                    "info": json.loads(turn["info"]),
                }
            )
            for turn in turns
        ),
        stop_reason=StopReason(data["stop"]),
        reward=None if reward is None else Reward(total=reward[0], components=reward[1], info=reward[2]),
        metrics=json.loads(data["metrics"]),
    )
