"""HumanQueue: a folder in which conversations wait for a person's answer, written and read by any process.

    desk/waiting/3f….json    {"ticket", "about", "since", "until", "messages"}      written by who asks
    desk/answers/3f….json    {"text", "is_end", "score"}                            written by who answers

Files, and no connection, because who asks (a run, maybe on another machine) and who answers (a page, a terminal) start and
end by themselves. A ticket is random, is answered once, and leaves nothing behind. No name that a person sends becomes a
path: it is looked up among the tickets that wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.core.nesting import is_deep
from polyturn.core.reward import as_score
from polyturn.infra.threads import DaemonThreads

logger = logging.getLogger(__name__)

POLL_S = 0.25
MAX_ANSWER_CHARS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HumanReply:
    """The answer of a person."""

    text: str
    is_end: bool = False
    """Whether the conversation is over."""
    score: float | None = None
    """Of the model's turn; None where the person gave none."""

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> HumanReply:
        """Return an answer as it was sent.

        Raises:
            DataError: it is none.
        """
        text, score = options.get("text", ""), options.get("score")
        if not isinstance(text, str) or len(text) > MAX_ANSWER_CHARS:
            raise DataError(f"the answer is no text of at most {MAX_ANSWER_CHARS} characters")
        if score is not None and not _is_finite(score):
            raise DataError(f"the score is {str(score)[:40]!r}; it is a finite number, or null for none")
        is_end = bool(options.get("is_end", False))
        if not text.strip() and not is_end:
            raise DataError("the answer is empty; write something, or end the conversation")
        return cls(text=text.strip(), is_end=is_end, score=None if score is None else float(score))


class HumanQueue:
    """A folder where conversations wait."""

    def __init__(self, folder: Path) -> None:
        """Make the folder.

        Raises:
            ConfigError: it cannot be made.
        """
        self.folder = folder
        self._threads = DaemonThreads(name="desk", max_threads=4)
        try:
            for part in (self._waiting, self._answers):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(f"the desk {str(folder)!r} cannot be made: {one_line(problem)}") from problem

    # Who asks.

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, about: Mapping[str, Any], deadline_s: float
    ) -> HumanReply | None:
        """Let a conversation wait for an answer; None if none came in time.

        Args:
            messages: What is shown.
            about: What is shown beside it.
            deadline_s: How long it waits.
        """
        ticket, now = secrets.token_hex(16), time.time()
        paper = {"ticket": ticket, "about": dict(about), "since": now, "until": now + deadline_s, "messages": list(messages)}
        try:
            path = self._waiting / f"{ticket}.json"
            await self._threads.run(_write, path, paper, on_late=lambda _: self._forget(ticket))
            end = time.monotonic() + deadline_s
            while True:
                answer_path = self._answers / f"{ticket}.json"
                if (answer := await self._threads.run(_answer_in, answer_path)) is not None:
                    reply: HumanReply = answer
                    return reply
                if time.monotonic() >= end:
                    return None
                await asyncio.sleep(min(POLL_S, max(0.0, end - time.monotonic())))
        finally:
            self._forget(ticket)

    def _forget(self, ticket: str) -> None:
        for part in (self._waiting, self._answers):
            (part / f"{ticket}.json").unlink(missing_ok=True)

    # Who answers.

    def waiting(self) -> list[dict[str, Any]]:
        """Return the conversations that wait, the longest first; those whose askers are gone are cleared away."""
        tickets = []
        for path in self._waiting.glob("*.json"):
            paper = _paper_in(path)
            if paper is None:
                continue
            if paper["until"] + 60.0 < time.time():
                self._forget(path.stem)
            elif paper["until"] > time.time() and not (self._answers / path.name).exists():
                tickets.append(paper)
        return sorted(tickets, key=lambda paper: float(paper["since"]))

    def answer(self, ticket: str, answer: HumanReply) -> None:
        """Leave an answer.

        Raises:
            DataError: no such conversation waits: it was answered already, or its time is over.
        """
        if not any(paper["ticket"] == ticket for paper in self.waiting()):
            raise DataError("this conversation no longer waits: it was answered already, or its time is over")
        path = self._answers / f"{ticket}.json"
        draft = path.with_suffix(f".{secrets.token_hex(8)}")
        draft.write_text(json.dumps(asdict(answer)), encoding="utf-8")
        try:
            os.link(draft, path)  # fails where the name is taken, so that of two people's answers the first one counts
        except FileExistsError:
            raise DataError("this conversation no longer waits: it was answered already, or its time is over") from None
        finally:
            draft.unlink(missing_ok=True)

    @property
    def _waiting(self) -> Path:
        return self.folder / "waiting"

    @property
    def _answers(self) -> Path:
        return self.folder / "answers"


def _write(path: Path, data: Mapping[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(data, ensure_ascii=False, default=str), encoding="utf-8", errors="replace")
    draft.replace(path)  # atomic, so that no reader sees half a conversation


def _text_in(path: Path) -> bytes | None:
    """Return the content of a file; None if it does not exist, or cannot be read at the moment."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Parse a text that we wrote; None if it is damaged."""
    try:
        answer = json.loads(text.decode("utf-8"))
        answer = json.loads(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"))  # no half of a character
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) and not is_deep(answer) else None


def _paper_in(path: Path) -> dict[str, Any] | None:
    """Return the conversation in a file; None if the file holds none."""
    paper = None if (text := _text_in(path)) is None else _parsed(text)
    if paper is None or paper.get("ticket") != path.stem or not isinstance(paper.get("about"), dict):
        return None
    messages = paper.get("messages")
    is_told = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    return paper if is_told and _is_finite(paper.get("since")) and _is_finite(paper.get("until")) else None


def _answer_in(path: Path) -> HumanReply | None:
    """Return an answer; what is none is thrown away, and the conversation goes on waiting."""
    if (text := _text_in(path)) is None:
        return None
    try:
        return HumanReply.read(_parsed(text) or {})
    except DataError as problem:
        logger.warning("the desk has an answer that is none, and goes on waiting: %s", problem)
        path.unlink(missing_ok=True)
        return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and as_score(value) is not None
