"""ReplayedUser: says what a user said before, turn by turn, whatever the model answers: to model real feedback.

    row         "interaction": {"name": "user", "turns": ["And for four?", {"content": "Thanks.", "score": 1, "done": true}]}
    or a file   config: {file: talks.jsonl}, row: {"name": "user", "recording": "talk-7"}
                {"id": "talk-7", "turns": […]}        the replies
                {"id": "talk-7", "messages": […]}     a conversation; the user's messages but the first are the replies

What happens when the recording is over is a setting: `at_end` end (the default), repeat (its last reply), fail, or a text
that is said from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from polyturn.core.errors import ConfigError, DataError, InteractionError, one_line
from polyturn.core.reward import as_score
from polyturn.engines.chat_partner import refuse_unknown
from polyturn.interactions.base import ViewInteraction
from polyturn.interactions.context import ConversationView
from polyturn.interactions.roles import UserTurns, text_of

ENDS = ("end", "repeat", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One reply."""

    content: str
    score: float | None = None
    """Of the model's turn that it answers."""
    is_done: bool = False


class ReplayedUser(ViewInteraction):
    """A user that is replayed."""

    def __init__(self, config: dict[str, Any], *, base: Path | None = None) -> None:
        """Read the config and the file.

        Raises:
            ConfigError: a setting is unknown, or the file cannot be read.
        """
        super().__init__(config)
        self._who = f"the replayed user {self.name!r}"
        refuse_unknown(config, ["name", "file", "at_end", "score"], who=self._who)
        self._at_end = config.get("at_end", "end")
        try:
            self._score = _score(config.get("score", 0.0), where=self._who)
        except DataError as problem:
            raise ConfigError(str(problem)) from problem
        if not isinstance(self._at_end, str) or not self._at_end.strip():
            raise ConfigError(f"{self._who}: at_end is {self._at_end!r}; give {', '.join(ENDS)}, or a text to say")
        file = config.get("file")
        if file is not None and not isinstance(file, str):
            raise ConfigError(f"{self._who}: file is {file!r:.100}; give the path of a jsonl file")
        self._recordings = {} if file is None else _read_file((base or Path()) / str(file), who=self._who)
        self._live: dict[str, _ReplayedEpisode] = {}

    def check_row(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse a row that leads to no recording."""
        self._turns(kwargs)

    def check_setup(self) -> None:
        """Nothing outside is needed."""

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode; the row gives `turns`, or the id of a `recording` in the file."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self._live[instance_id] = _ReplayedEpisode(turns=self._turns(kwargs))
        return instance_id

    async def respond(
        self, view: ConversationView | None, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Say what was said.

        Raises:
            InteractionError: the recording is over, and that is an error here.
        """
        live = self._live[instance_id]
        number = live.turn_of(messages) if view is None else view.num_user_turns
        info: dict[str, Any] = {"user_turn": number}
        if number < len(live.turns):
            turn = live.turns[number]
            return turn.is_done, turn.content, self._score if turn.score is None else turn.score, info
        info["user_stop"] = "recording_over"
        if self._at_end == "fail":
            raise InteractionError(
                f"{self._who}: the recording has {len(live.turns)} replies and one more was asked for; record more, lower "
                "rollout.limits.max_turns, or set at_end"
            )
        if self._at_end == "end":
            return True, "", self._score, info
        text = live.turns[-1].content if self._at_end == "repeat" else self._at_end
        return False, text, self._score, info

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of a turn without an answer."""
        return self._score  # type: ignore[return-value]

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Forget the episode; an id that was never started is a KeyError."""
        del self._live[instance_id]  # type: ignore[arg-type]

    async def snapshot(self, instance_id: str) -> int | None:
        """Return the position at which the recording began."""
        return self._live[instance_id].first

    async def restore(self, instance_id: str, state: int | None) -> None:
        """Take up where it was."""
        self._live[instance_id].first = state

    def _turns(self, kwargs: Mapping[str, Any]) -> tuple[Recorded, ...]:
        turns, name = kwargs.get("turns"), kwargs.get("recording")
        if turns is not None:
            return _read_turns(turns, where=f"{self._who}: `turns` of the row")
        if name is None:
            raise DataError(
                f"{self._who} has nothing to say: the row's interaction kwargs have {sorted(kwargs)}; give them `turns`, or "
                "the id of a `recording` in its file"
            )
        if str(name) not in self._recordings:
            raise DataError(f"{self._who}: there is no recording {name!r} in its file, which has {len(self._recordings)}")
        return self._recordings[str(name)]


@dataclass(slots=True, kw_only=True)
class _ReplayedEpisode(UserTurns):
    """One episode."""

    turns: tuple[Recorded, ...]


def _read_file(path: Path, *, who: str) -> dict[str, tuple[Recorded, ...]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{who}: the file {str(path)!r} cannot be read: {one_line(problem)}") from problem
    recordings: dict[str, tuple[Recorded, ...]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{who}: {path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise ConfigError(f"{where} is no JSON: {one_line(problem)}") from problem
        if not isinstance(row, Mapping) or "id" not in row or not ({"turns", "messages"} & set(row)):
            raise ConfigError(f"{where} is {line!r:.100}; give an `id` and its `turns`, or its `messages`")
        if str(row["id"]) in recordings:
            raise ConfigError(f"{where}: the id {row['id']!r} stands there twice; an id is unique in the file")
        try:
            recordings[str(row["id"])] = _read_turns(
                row["turns"] if "turns" in row else _replies(row["messages"]), where=where
            )
        except DataError as problem:
            raise ConfigError(str(problem)) from problem
    return recordings


def _replies(messages: Any) -> list[str]:
    """Return the user's messages after the first one."""
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise DataError(f"messages are {messages!r:.100}; give a list of messages with role and content")
    return [text_of(m) for m in messages if m.get("role") == "user"][1:]


def _read_turns(turns: Any, *, where: str) -> tuple[Recorded, ...]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise DataError(f"{where}: {turns!r:.100} is no list of replies; give at least one")
    return tuple(_read_turn(turn, where=f"{where}, reply {i}") for i, turn in enumerate(turns))


def _read_turn(turn: Any, *, where: str) -> Recorded:
    if isinstance(turn, str):
        return Recorded(content=turn)
    if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), str):
        raise DataError(f"{where}: {turn!r:.100} is neither a text nor a mapping with `content`")
    for name in turn:
        if name not in ("content", "score", "done", "role"):
            raise DataError(f"{where}: a reply has no {name!r}; it has content, score and done")
    return Recorded(
        content=turn["content"], score=_score(turn.get("score"), where=where), is_done=bool(turn.get("done", False))
    )


def _score(value: Any, *, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or as_score(value) is None:
        raise DataError(f"{where}: the score is {value!r}; give a finite number, or null for none")
    return float(value)
