"""Next: how the next prompt is built; Prompt: the resulting ids.

kind                prompt                                  used
Append(messages)    context ids + encoded new messages      by default: the model keeps all it wrote, reasoning included
Continue(said, …)   context ids + the ids of an addition    if the next turn continues the same assistant message
Render(messages)    a full render of the history            after an edit
Given(ids)          exactly these ids                       for agents that encode their prompts themselves

With `renders_history`, `Append` too is a full render.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.media import Media
from polyturn.core.messages import Message

NO_IDS = ids_array([])


class Append(NamedTuple):
    """New messages are encoded and appended to the context."""

    messages: tuple[Message, ...] = ()


class Continue(NamedTuple):
    """The next turn continues the same assistant message."""

    said: str
    """The text of the message so far."""
    own: str
    """The model's part of it."""
    addition: Ids = NO_IDS
    """[N] ids to append to the context."""


class Render(NamedTuple):
    """A full render of the edited history and of the messages that follow it."""

    messages: tuple[Message, ...] = ()
    last: Continue | None = None
    """The last message of the history, if it goes on; else None."""


class Given(NamedTuple):
    """Ids that an agent supplied as the whole prompt, regardless of the messages."""

    ids: Ids
    messages: tuple[Message, ...] = ()
    """Kept in the history, not encoded."""


Next = Append | Continue | Render | Given


class Prompt(NamedTuple):
    """The next prompt of the model."""

    ids: Ids
    """[N] the ids to append; the whole prompt if `is_whole`."""
    is_whole: bool
    num_new: int
    """Number of tokens that the environment adds, each counted once however often the history is rendered."""
    length: int
    """Number of tokens in the whole prompt."""
    media: tuple[Media, ...] = ()
    """The images and other media that `ids` show."""


def all_media(messages: Iterable[Message]) -> tuple[Media, ...]:
    """Return the images and other media of messages, in order."""
    return tuple(medium for message in messages for medium in message.media)
