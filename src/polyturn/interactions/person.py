"""A person who answers conversations: at a desk, which is a folder that a page or a terminal reads, or at a keyboard.

    desk/waiting/3f….json    {"ticket", "about", "since", "until", "messages"}      written by the run
    desk/answers/3f….json    {"text", "is_end", "score"}                            written by the page or the terminal

A desk is files and no connection, because the run (maybe on another machine) and the page start and end independently. A
ticket is random, is answered once, and leaves nothing behind. A ticket that the page sends is looked up among those that
wait; it never becomes a path by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TextIO

from pydantic import StringConstraints, ValidationError, model_validator

from polyturn.core.errors import ConfigError, DataError, one_line
from polyturn.core.printable import printable
from polyturn.infra.settings import Score, Settings
from polyturn.infra.threads import DaemonThreads
from polyturn.interactions.roles import text_of

logger = logging.getLogger(__name__)

POLL_S = 0.25
HELP = "Answer, /end [SCORE] [TEXT] to end the conversation, /score SCORE TEXT to answer and score."
ANSWERED = "this conversation no longer waits: it was answered already, or its time is over"


class TerminalClosedError(Exception):
    """The terminal is closed, so no answer can come."""


class HumanReply(Settings):
    """The answer of a person."""

    text: Annotated[str, StringConstraints(strip_whitespace=True, max_length=100_000)] = ""
    is_end: bool = False
    """Whether the conversation is over."""
    score: Score | None = None
    """Of the model's turn; null if the person gave none."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.text and not self.is_end:
            raise ValueError("it is empty; write something, or end the conversation")
        return self

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> HumanReply:
        """Return the reply in an answer, whose further keys are ignored.

        Raises:
            DataError: there is none.
        """
        try:
            return cls.read({name: answer[name] for name in cls.model_fields if name in answer}, who="the answer")
        except ConfigError as problem:
            raise DataError(str(problem)) from None


class Paper(Settings):
    """A conversation that waits at a desk."""

    ticket: str
    about: dict[str, str]
    since: float
    until: float
    messages: list[dict[str, str]]


class HumanQueue:
    """A desk: the folder in which conversations wait."""

    def __init__(self, folder: Path) -> None:
        """Make the folder.

        Raises:
            ConfigError: it cannot be made.
        """
        self.folder = folder
        self._waiting, self._answers = folder / "waiting", folder / "answers"
        self._threads = DaemonThreads(name="desk", max_threads=4)
        try:
            for part in (self._waiting, self._answers):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(f"the desk {str(folder)!r} cannot be made: {one_line(problem)}") from problem

    async def ask(
        self, messages: Sequence[Mapping[str, str]], *, about: Mapping[str, str], deadline_s: float
    ) -> HumanReply | None:
        """Let a conversation wait for an answer; return None if none came within `deadline_s`.

        Args:
            messages: The conversation as the page shows it.
            about: Facts that the page shows beside it.
            deadline_s: Seconds that it waits.
        """
        ticket, now, end = secrets.token_hex(16), time.time(), time.monotonic() + deadline_s
        paper = Paper(
            ticket=ticket,
            about=_well_formed(about),
            since=now,
            until=now + deadline_s,
            messages=[_well_formed(message) for message in messages],
        )
        try:
            await self._threads.run(self._write, paper, on_late=lambda _: self._forget(ticket))
            while True:
                if (reply := await self._threads.run(self._answer_to, ticket)) is not None:
                    return reply  # type: ignore[no-any-return]
                if (left := end - time.monotonic()) <= 0:
                    return None
                await asyncio.sleep(min(POLL_S, left))
        finally:
            self._forget(ticket)

    def waiting(self) -> list[dict[str, Any]]:
        """Return the waiting conversations, the longest wait first; those whose runs are gone are cleared away."""
        waiting = []
        for path in self._waiting.glob("*.json"):
            try:
                paper = Paper.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                continue
            if paper.until + 60.0 < time.time():
                self._forget(path.stem)
            elif paper.ticket == path.stem and paper.until > time.time() and not (self._answers / path.name).exists():
                waiting.append(paper)
        return [paper.model_dump() for paper in sorted(waiting, key=lambda paper: paper.since)]

    def answer(self, ticket: str, reply: HumanReply) -> None:
        """Leave an answer.

        Raises:
            DataError: no such conversation waits.
        """
        if not any(paper["ticket"] == ticket for paper in self.waiting()):
            raise DataError(ANSWERED)
        draft = self._answers / f"{ticket}.{secrets.token_hex(8)}"
        draft.write_text(reply.model_dump_json(), encoding="utf-8")
        try:
            os.link(draft, self._answers / f"{ticket}.json")  # fails if the name is taken, so that the first answer counts
        except FileExistsError:
            raise DataError(ANSWERED) from None
        finally:
            draft.unlink(missing_ok=True)

    def _write(self, paper: Paper) -> None:
        draft = self._waiting / f"{paper.ticket}.draft"
        draft.write_text(paper.model_dump_json(), encoding="utf-8")
        draft.replace(draft.with_suffix(".json"))  # atomic, so that no reader sees half a conversation

    def _answer_to(self, ticket: str) -> HumanReply | None:
        path = self._answers / f"{ticket}.json"
        with contextlib.suppress(OSError):  # no answer yet, or a share that is away for a moment
            try:
                return HumanReply.model_validate_json(path.read_bytes())
            except ValidationError as problem:
                logger.warning("the file %s holds no answer and is removed: %s", path, one_line(problem))
                path.unlink(missing_ok=True)
        return None

    def _forget(self, ticket: str) -> None:
        for part in (self._waiting, self._answers):
            (part / f"{ticket}.json").unlink(missing_ok=True)


def _well_formed(texts: Mapping[str, str]) -> dict[str, str]:
    """Replace halves of characters, which no file in UTF-8 can hold."""
    return {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}


class Terminal:
    """A keyboard and a screen: one conversation at a time is shown and answered; the others wait.

    > And for four?          an answer
    > /end                   ends the conversation
    > /end 0.5 Thank you.    ends it, scores the model's last turn, says something
    > /score 0.2 No.         scores the model's last turn, and answers
    """

    def __init__(self, keyboard: TextIO, screen: TextIO) -> None:
        self._keyboard = keyboard
        self._screen = screen
        self._typed = b""
        """Typed text that is not read yet. The stream's own buffer is not used: `select` does not know of it."""

    def ask(
        self, messages: Sequence[Mapping[str, Any]], *, about: Mapping[str, Any], deadline_s: float
    ) -> HumanReply | None:
        """Show a conversation and return the answer; None if none came in time. It blocks: call it in a thread.

        Raises:
            TerminalClosedError: the input ended.
        """
        self._show("\n" + "-" * 72, *(f"{name}: {value}" for name, value in about.items()))
        self._show(*(f"[{m['role']}] {text}" for m in messages if (text := text_of(m)) and m.get("role") != "tool"))
        self._show(f"{HELP} ({deadline_s:.0f} s)")
        end = time.monotonic() + deadline_s
        while (line := self._line(end)) is not None:
            try:
                return read_answer(line)
            except DataError as problem:
                self._show(str(problem))
        self._show("The time is over.")
        return None

    def _line(self, end: float) -> str | None:
        """Return the next line; None at the deadline, so that no line is taken for a question that has expired."""
        self._screen.write("> ")
        self._screen.flush()
        while (left := end - time.monotonic()) > 0:
            line, newline, rest = self._typed.partition(b"\n")
            if newline:
                self._typed = rest
                return line.decode("utf-8", "replace")
            if select.select([self._keyboard], [], [], min(left, 1.0))[0]:
                if not (typed := os.read(self._keyboard.fileno(), 1 << 16)):
                    raise TerminalClosedError("the input has ended")
                self._typed += typed
        return None

    def _show(self, *lines: str) -> None:
        self._screen.writelines(printable(line) + "\n" for line in lines)
        self._screen.flush()


def read_answer(line: str) -> HumanReply:
    """Return the answer in a line.

    Raises:
        DataError: it is none.
    """
    text = line.strip()
    command, _, rest = text.partition(" ")
    if not command.startswith("/"):
        return HumanReply.of({"text": text})
    first, _, more = rest.strip().partition(" ")
    score = None
    with contextlib.suppress(ValueError):
        score = float(first)
    if command == "/end":
        return HumanReply.of({"text": rest if score is None else more, "is_end": True, "score": score})
    if command != "/score" or score is None:
        raise DataError(f"{text!r:.60} is not an answer. {HELP}")
    return HumanReply.of({"text": more, "score": score})
