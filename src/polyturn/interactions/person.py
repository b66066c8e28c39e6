"""Lets a person answer the model: at the keyboard of the run's terminal, or at a desk.

A desk is a folder in which the run leaves conversations and reads the answers:

    desk/waiting/3f….json    {"ticket", "about", "since", "until", "messages"}      written by the run
    desk/answers/3f….json    {"text", "is_end", "score"}                            written by the page or the terminal

A desk uses files instead of a connection, because the run and the page start and end independently, maybe on different
machines. A ticket is random and can be answered once; its files are then removed. A ticket from the page is looked up among
the waiting ones and never used as a path directly.
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
ANSWERED = "this conversation is no longer waiting: it has been answered, or its deadline has passed"


class TerminalClosedError(Exception):
    """The terminal is closed, so there will be no answer."""


class HumanReply(Settings):
    """A person's answer."""

    text: Annotated[str, StringConstraints(strip_whitespace=True, max_length=100_000)] = ""
    is_end: bool = False
    """Whether the answer ends the conversation."""
    score: Score | None = None
    """Score of the model's turn, or null."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.text and not self.is_end:
            raise ValueError("the answer is empty; write a text, or end the conversation")
        return self

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> HumanReply:
        """Return the reply in an answer; unknown keys are ignored.

        Raises:
            DataError: the answer is invalid.
        """
        try:
            return cls.read(answer, who="the answer", ignores_others=True)
        except ConfigError as problem:
            raise DataError(str(problem)) from None


class Paper(Settings):
    """A conversation that is waiting at a desk."""

    ticket: str
    about: dict[str, str]
    since: float
    until: float
    messages: list[dict[str, str]]


class HumanQueue:
    """A desk: a folder with waiting conversations and their answers."""

    def __init__(self, folder: Path) -> None:
        """Create the folder.

        Raises:
            ConfigError: the folder cannot be created.
        """
        self.folder = folder
        self._waiting, self._answers = folder / "waiting", folder / "answers"
        self._threads = DaemonThreads(name="desk", max_threads=4)
        try:
            for part in (self._waiting, self._answers):
                part.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(f"the desk {str(folder)!r} cannot be created: {one_line(problem)}") from problem

    async def ask(
        self, messages: Sequence[Mapping[str, str]], *, about: Mapping[str, str], deadline_s: float
    ) -> HumanReply | None:
        """Put a conversation on the desk and return its answer; None if there is none in time.

        Args:
            messages: The conversation as the page shows it.
            about: Further information for the page.
            deadline_s: Seconds to wait for the answer.
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
        """Return the waiting conversations, oldest first; remove those whose deadline passed a minute ago (dead runs)."""
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
        """Store an answer.

        Raises:
            DataError: no conversation with this ticket is waiting.
        """
        if not any(paper["ticket"] == ticket for paper in self.waiting()):
            raise DataError(ANSWERED)
        draft = self._answers / f"{ticket}.{secrets.token_hex(8)}"
        draft.write_text(reply.model_dump_json(), encoding="utf-8")
        try:
            os.link(draft, self._answers / f"{ticket}.json")  # fails if the file exists, so the first answer counts
        except FileExistsError:
            raise DataError(ANSWERED) from None
        finally:
            draft.unlink(missing_ok=True)

    def _write(self, paper: Paper) -> None:
        draft = self._waiting / f"{paper.ticket}.draft"
        draft.write_text(paper.model_dump_json(), encoding="utf-8")
        draft.replace(draft.with_suffix(".json"))  # atomic, so a reader never sees half a conversation

    def _answer_to(self, ticket: str) -> HumanReply | None:
        path = self._answers / f"{ticket}.json"
        with contextlib.suppress(OSError):  # no answer yet, or a network share that is briefly unavailable
            try:
                return HumanReply.model_validate_json(path.read_bytes())
            except ValidationError as problem:
                logger.warning("the file %s is not a valid answer and is removed: %s", path, one_line(problem))
                path.unlink(missing_ok=True)
        return None

    def _forget(self, ticket: str) -> None:
        for part in (self._waiting, self._answers):
            (part / f"{ticket}.json").unlink(missing_ok=True)


def _well_formed(texts: Mapping[str, str]) -> dict[str, str]:
    """Replace unpaired surrogates, which cannot be written as UTF-8."""
    return {name: text.encode("utf-8", "replace").decode() for name, text in texts.items()}


class Terminal:
    """A keyboard and a screen, which show one conversation at a time; the others wait.

    > And for four?          an answer
    > /end                   ends the conversation
    > /end 0.5 Thank you.    ends it with a score for the model's last turn, and a last message
    > /score 0.2 No.         scores the model's last turn and answers
    """

    def __init__(self, keyboard: TextIO, screen: TextIO) -> None:
        self._keyboard = keyboard
        self._screen = screen
        self._typed = b""
        """Typed text that has not been read yet. The stream's own buffer is not used, because `select` ignores it."""

    def ask(
        self, messages: Sequence[Mapping[str, Any]], *, about: Mapping[str, Any], deadline_s: float
    ) -> HumanReply | None:
        """Show a conversation and return the answer, or None at the deadline. It blocks, so call it in a thread.

        Raises:
            TerminalClosedError: the input has ended.
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
        """Return the next line, or None at the deadline."""
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
    """Parse a line as an answer.

    Raises:
        DataError: the line is not a valid answer.
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
