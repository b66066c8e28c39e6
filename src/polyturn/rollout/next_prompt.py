"""Next: the form of the next prompt, as one value; Prompt: the resulting ids.

Append(messages)    held ids + the encoded new messages     the default: the model keeps all it wrote, reasoning included
Continue(said, …)   held ids + a text or ids                the same assistant message goes on after the addition
Render(messages)    the template writes the whole history   after an edit; with `renders_history` before every turn
Given(ids)          the caller's own ids                    for agents that write their prompts themselves
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.media import Media
from polyturn.core.messages import Message

NO_IDS = ids_array([])


class Append(NamedTuple):
    """New messages after the held ids."""

    messages: tuple[Message, ...] = ()


class Continue(NamedTuple):
    """The same assistant message goes on."""

    said: str
    """The text so far."""
    own: str
    """The model's part of it."""
    addition: Ids = NO_IDS
    """[N] ids to append to the held ids."""


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
