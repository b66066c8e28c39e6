"""ReplayedUser: replays a user's recorded turns, independently of the model's answers.

row         "interaction": {"name": "user", "turns": ["And for four?", {"content": "Thanks.", "score": 1, "done": true}]}
or a file   config: {file: talks.jsonl}, row: {"name": "user", "recording": "talk-7"}
            {"id": "talk-7", "turns": […]}        the replies
            {"id": "talk-7", "messages": […]}     a conversation; the replies are the user's messages after the first
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from polyturn.core.errors import ConfigError, DataError, InteractionError, one_line
from polyturn.infra.settings import Score, Settings, Text
from polyturn.interactions.base import ConversationView, ViewInteraction
from polyturn.interactions.roles import UserTurns, text_of


class ReplaySettings(Settings):
    """The file of recordings, and the behaviour after the last reply."""

    name: str = ""
    file: Text | None = None
    """The file of recordings, relative to the configuration file."""
    at_end: Text = "end"
    """After the last reply: "end", "repeat" (the last reply), "fail", or another text, which becomes the reply."""
    score: Score | None = 0.0
    """The score of a turn if the reply has none; null for no score."""


class Recorded(Settings):
    """One reply."""

    content: str
    score: Score | None = None
    """Score of the model's turn before this reply."""
    done: bool = False
    """Whether the reply ends the conversation."""
    role: str | None = None
    """Ignored; accepted because messages have it."""


class ReplayedUser(ViewInteraction):
    """Replays a recorded user."""

    def __init__(self, config: dict[str, Any], *, base: Path | None = None) -> None:
        """Read the config and the file.

        Raises:
            ConfigError: a setting is unknown or invalid, or the file cannot be read.
        """
        super().__init__(config)
        self._who = f"the replayed user {self.name!r}"
        self._settings = ReplaySettings.read(config, who=self._who)
        file = self._settings.file
        self._recordings = {} if file is None else _read_file((base or Path()) / file, who=self._who)
        self._live: dict[str, _ReplayedEpisode] = {}

    def check_setup(self) -> None:
        """Do nothing: a replayed user needs no external service."""

    def check_row(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a row without a valid recording."""
        self._turns(kwargs)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode; the row has `turns`, or `recording`, the id of a recording in the file."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._live[instance_id] = _ReplayedEpisode(turns=self._turns(kwargs))
        return instance_id

    async def respond(
        self, view: ConversationView | None, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Return the next reply.

        Raises:
            InteractionError: the recording is over, and `at_end` is "fail".
        """
        live, at_end, score = self._live[instance_id], self._settings.at_end, self._settings.score
        number = live.turn_of(messages) if view is None else view.num_user_turns
        info: dict[str, Any] = {"user_turn": number}
        if number < len(live.turns):
            turn = live.turns[number]
            return turn.done, turn.content, score if turn.score is None else turn.score, info
        info["user_stop"] = "recording_over"
        if at_end == "fail":
            raise InteractionError(
                f"{self._who}: the recording has {len(live.turns)} replies, but one more is needed; record more, lower "
                "rollout.limits.max_turns, or set at_end"
            )
        if at_end == "end":
            return True, "", score, info
        return False, live.turns[-1].content if at_end == "repeat" else at_end, score, info

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of a turn without an answer."""
        return self._settings.score  # type: ignore[return-value]

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Delete the episode's state; an unknown id raises KeyError."""
        del self._live[instance_id]  # type: ignore[arg-type]

    async def snapshot(self, instance_id: str) -> int | None:
        """Return the number of user messages at the first reply, from which `turn_of` counts; None before its first call."""
        return self._live[instance_id].first

    async def restore(self, instance_id: str, state: int | None) -> None:
        """Restore the number that `snapshot` returned."""
        self._live[instance_id].first = state

    def _turns(self, kwargs: Mapping[str, Any]) -> tuple[Recorded, ...]:
        turns, name = kwargs.get("turns"), kwargs.get("recording")
        if turns is not None:
            return _read_turns(turns, where=f"{self._who}: `turns` of the row")
        if name is None:
            raise DataError(
                f"{self._who} has no replies: the row's interaction kwargs have {sorted(kwargs)}; add `turns`, or "
                "`recording`, the id of a recording in the file"
            )
        if str(name) not in self._recordings:
            raise DataError(f"{self._who}: the file has {len(self._recordings)} recordings, but none with the id {name!r}")
        return self._recordings[str(name)]


@dataclass(slots=True, kw_only=True)
class _ReplayedEpisode(UserTurns):
    """One episode."""

    turns: tuple[Recorded, ...]


def _read_file(path: Path, *, who: str) -> dict[str, tuple[Recorded, ...]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not at U+2028, which JSON texts may contain
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{who}: the file {str(path)!r} cannot be read: {one_line(problem)}") from problem
    recordings: dict[str, tuple[Recorded, ...]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{who}: {path}, line {number}"
        try:
            row = json.loads(line)
            id, turns = str(row["id"]), row["turns"] if "turns" in row else _replies(row["messages"])
            if id in recordings:
                raise DataError(f"{where}: the id {id!r} occurs twice; ids must be unique in the file")
            recordings[id] = _read_turns(turns, where=where)
        except DataError as problem:
            raise ConfigError(str(problem)) from problem
        except (ValueError, RecursionError, TypeError, KeyError) as problem:
            raise ConfigError(
                f"{where} is {line!r:.100} ({one_line(problem)}); write JSON with an `id` and `turns` or `messages`"
            ) from problem
    return recordings


def _replies(messages: Any) -> list[dict[str, Any]]:
    """Return the user's messages except the first, which is the prompt."""
    return [{"content": text_of(m)} for m in messages if m["role"] == "user"][1:]


def _read_turns(turns: Any, *, where: str) -> tuple[Recorded, ...]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise DataError(f"{where} is {turns!r:.100}; use a non-empty list of replies")
    read = []
    for number, turn in enumerate(turns):
        who = f"{where}, reply {number}: {turn!r:.100}"
        fields = {"content": turn} if isinstance(turn, str) else turn
        if not isinstance(fields, Mapping) or not isinstance(fields.get("content"), str):
            raise DataError(f"{who} is neither a text nor a mapping with `content`")
        try:
            read.append(Recorded.read(fields, who=who))
        except ConfigError as problem:
            raise DataError(str(problem)) from problem
    return tuple(read)
