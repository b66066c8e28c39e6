"""Conversations for supervised training: messages, offered tools, and the weights of turns.

    {"messages": [{"role": "user", "content": "6 * 7?"}, {"role": "assistant", "content": "#### 42"}], "tools": ["calc"]}

An assistant message may have `loss`, false or a number; the default is weight 1. `tools` are names of the run's tools;
without the key every configured tool is offered, and an empty list offers none.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.core.messages import Message
from polyturn.core.reward import as_score, brief
from polyturn.core.task import as_rows
from polyturn.data.dataset import JsonlRows
from polyturn.data.media import with_media
from polyturn.infra.live import NameOrObject
from polyturn.infra.plugins import import_attr


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation for supervised training."""

    messages: tuple[Message, ...]
    tools: tuple[str, ...] | None = None
    """Names of the offered tools; None offers every configured tool."""
    weights: tuple[float, ...] | None = None
    """One weight per assistant message, in order; None means 1 for each."""

    def __post_init__(self) -> None:
        turns = sum(m.role == "assistant" for m in self.messages)
        if not turns or self.messages[0].role == "assistant":
            raise DataError(
                f"a conversation needs a prompt followed by an assistant message; this one has the roles "
                f"{[m.role for m in self.messages]}"
            )
        if self.weights is not None and len(self.weights) != turns:
            raise DataError(f"a conversation with {turns} assistant messages has {len(self.weights)} weights")

    @classmethod
    def from_row(cls, row: Mapping[str, Any], *, where: str, base: Path | None = None) -> Conversation:
        """Return the conversation of a dataset row; paths of media are resolved against `base`.

        Raises:
            DataError: the row has no messages, or they are invalid; the message starts with `where`.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: a conversation is an object with `messages`, not {brief(row)}")
        messages = row.get("messages")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise DataError(f"{where}: a conversation needs a non-empty list `messages`; the row has the keys {sorted(row)}")
        tools = row.get("tools")
        try:
            return cls(
                messages=as_rows(Message.from_openai(m) for m in with_media(messages, row, base=base or Path())),
                tools=None if tools is None else tuple(str(t) for t in tools),
                weights=tuple(_weight(m) for m in messages if m.get("role") == "assistant"),
            )
        except (DataError, TypeError, AttributeError) as problem:
            raise DataError(f"{where}: {problem}") from problem


def _weight(message: Mapping[str, Any]) -> float:
    weight = as_score(message.get("loss", 1.0))
    if weight is None:
        raise DataError(f"the `loss` of a message is {brief(message['loss'])}; give false or a number")
    return weight


def read_conversations(path: Path) -> list[Conversation]:
    """Read a jsonl file with one conversation per line.

    Raises:
        DataError: the file is missing, a line is not JSON, or a row is not a conversation.
    """
    if not os.path.isfile(path):  # is_file raises for a name that is too long
        raise DataError(f"there is no file {str(path)!r}; set warm_start.conversations to a jsonl file of conversations")
    rows = JsonlRows(path)
    if not len(rows):
        raise DataError(f"{path} contains no conversation")
    return [Conversation.from_row(rows.row(i), where=rows.where(i), base=path.parent) for i in range(len(rows))]


def generate_conversations(path: NameOrObject, *, base: Path | None = None, **kwargs: Any) -> list[Conversation]:
    """Call the function that `path` names and return its conversations.

    Raises:
        ConfigError: the name does not exist, or the function does not take these arguments.
        DataError: the function returned no conversations.
    """
    make = import_attr(path, base=base, key="warm_start.conversations")
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as problem:
        raise ConfigError(f"{path!r} does not accept {kwargs!r}: {one_line(problem)}") from problem
    generated = make(**kwargs)
    if not isinstance(generated, Iterable) or isinstance(generated, str | Mapping):
        raise DataError(f"{path!r} returned {brief(generated)}; return a list of conversations{defined_at(make)}")
    rows = [
        c if isinstance(c, Conversation) else Conversation.from_row(c, where=f"{path}[{i}]") for i, c in enumerate(generated)
    ]
    if not rows:
        raise DataError(f"{path!r} returned no conversation for {kwargs!r}")
    return rows
