"""The events of a history, as values: a journal stores them, and `replay` brings a new history to the same state.

    ["Shown", {"is_whole": false, "segment": 0, "ids": [9, 4], "num_new": 2, "length": 41}]
    ["TurnSampled", {"message": {…}, "text": "Four.", "completion": {"token_ids": [7, 2], …}, …}]
    ["Answered", {"messages": [{"role": "tool", …}], "is_user": false}]

Each change of a `History` is one event that contains the resulting ids and messages. So a replay encodes and parses nothing,
and calls no plug-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyturn.core.generation import Completion
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.serde import from_json, to_json
from polyturn.rollout.next_prompt import Continue, Given, Prompt, all_media
from polyturn.rollout.stop_strings import Stopped

History = Any
"""A `rollout.history.History`, whose module imports this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompted:
    """The prompt and its agent were set, before the prompt was encoded."""

    agent: str
    messages: tuple[Message, ...]

    def apply(self, history: History) -> None:
        history.set_prompt(self.messages, agent=self.agent)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shown:
    """The next prompt became the context (`History.append_prompt`)."""

    is_whole: bool
    segment: int
    """Index of the segment that the prompt extended or opened."""
    ids: NDArray[np.int32]
    """[N] the ids that the segment did not contain yet."""
    num_new: int
    length: int

    def apply(self, history: History) -> None:
        ids, segments = self.ids, history.builder.build()
        if self.is_whole and self.segment < len(segments):
            ids = np.concatenate([segments[self.segment].token_ids, ids])
        messages = (*history.messages, *history.waiting) if self.is_whole else history.waiting
        media = () if isinstance(history.next, Given) else all_media(messages)
        history.append_prompt(Prompt(ids, self.is_whole, self.num_new, self.length, media))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnSampled:
    """The model sampled a completion."""

    message: Message
    text: str
    completion: Completion
    stop: str | None
    num_dropped: int
    index: int
    cut_by: StopReason

    def apply(self, history: History) -> None:
        ended = Stopped(self.completion, self.stop, self.num_dropped)
        history.add_turn(self.message, self.text, ended, index=self.index, cut_by=self.cut_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Messages answered the last turn."""

    messages: tuple[Message, ...]
    is_user: bool

    def apply(self, history: History) -> None:
        history.answer(self.messages, self.is_user)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edited:
    """The history was replaced."""

    num_kept: int
    """Number of leading messages that stayed."""
    messages: tuple[Message, ...]
    """The messages that follow them."""
    waiting: tuple[Message, ...]
    said: str | None
    """The text of the last message, if it goes on."""
    own: str | None
    """The model's part of `said`."""
    addition: NDArray[np.int32]

    def apply(self, history: History) -> None:
        messages = (*history.messages[: self.num_kept], *self.messages)
        last = None if self.said is None else Continue(self.said, self.own or "", self.addition)
        history.edit(messages, self.waiting, last)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IdsGiven:
    """An agent supplied the ids of the whole next prompt."""

    ids: NDArray[np.int32]

    def apply(self, history: History) -> None:
        history.show_ids(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Continued:
    """The last message goes on; the fields are the arguments of `History.continue_turn`."""

    num_kept: int
    kept: str
    text: str
    addition: NDArray[np.int32]
    own: Message
    whole: Message
    rest: str

    def apply(self, history: History) -> None:
        history.continue_turn(self.num_kept, self.kept, self.text, self.addition, self.own, self.whole, self.rest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighed:
    """Loss weights were set on the sampled tokens of a turn."""

    index: int
    weights: NDArray[np.float32]

    def apply(self, history: History) -> None:
        history.weigh(next(turn for turn in history.turns if turn.index == self.index), self.weights)


Event = Prompted | Shown | TurnSampled | Answered | Edited | IdsGiven | Continued | Weighed
_EVENTS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Prompted, Shown, TurnSampled, Answered, Edited, IdsGiven, Continued, Weighed)
}


def write_events(events: Sequence[Event]) -> list[list[Any]]:
    """Return events as plain JSON data."""
    return [[type(event).__name__, to_json(event)] for event in events]


def read_events(data: Sequence[Sequence[Any]]) -> list[Event]:
    """Parse the output of `write_events`."""
    return [from_json(_EVENTS[name], fields) for name, fields in data]


def replay(history: History, events: Sequence[Event]) -> None:
    """Apply the events of another history that began with the same prompt, without encoding or parsing."""
    kept, history.events = history.events, None
    for event in events:
        event.apply(history)
    history.events = kept
