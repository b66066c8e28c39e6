"""Terminal: one conversation at a time is shown on it and answered there; the others wait.

    > And for four?          an answer
    > /end                   ends the conversation
    > /end 0.5 Thank you.    ends it, scores the model's last turn, says something
    > /score 0.2 No.         scores the model's last turn, and answers

Reading waits in a thread and stops at the deadline, so that no line is taken for a question that has expired.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from polyturn.core.errors import DataError
from polyturn.core.printable import printable
from polyturn.interactions.human_queue import HumanReply
from polyturn.interactions.roles import text_of

HELP = "Answer, /end [SCORE] [TEXT] to end the conversation, /score SCORE TEXT to answer and score."


class TerminalClosedError(Exception):
    """The terminal is closed, so no answer can come."""


class Terminal:
    """A person at a keyboard."""

    def __init__(self, keyboard: TextIO, screen: TextIO) -> None:
        self._keyboard = keyboard
        self._screen = screen
        self._typed = b""
        """Typed text that is not read yet: ours and not the stream's own, which a wait for input does not know of."""

    def ask(
        self, messages: Sequence[Mapping[str, Any]], *, about: Mapping[str, Any], deadline_s: float
    ) -> HumanReply | None:
        """Show a conversation and return the answer; None if none came in time. It blocks: call it in a thread.

        Raises:
            TerminalClosedError: the end of the input was reached.
        """
        self._show("\n" + "-" * 72)
        for name, value in about.items():
            self._show(f"{name}: {value}")
        for message in messages:
            if message.get("role") in ("user", "assistant") and (text := text_of(message)):
                self._show(f"[{message['role']}] {text}")
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
        self._screen.write("> ")
        self._screen.flush()
        while (left := end - time.monotonic()) > 0:
            line, newline, rest = self._typed.partition(b"\n")
            if newline:
                self._typed = rest
                return line.decode("utf-8", "replace")
            if not select.select([self._keyboard], [], [], min(left, 1.0))[0]:
                continue
            typed = os.read(self._keyboard.fileno(), 1 << 16)
            if not typed:
                raise TerminalClosedError("the input has ended")
            self._typed += typed
        return None

    def _show(self, text: str) -> None:
        self._screen.write(printable(text) + "\n")
        self._screen.flush()


def read_answer(line: str) -> HumanReply:
    """Return the answer that a line means.

    Raises:
        DataError: it means none.
    """
    text = line.strip()
    if not text.startswith(("/end", "/score")):
        if text.startswith("/"):
            raise DataError(f"there is no {text.split()[0]!r}. {HELP}")
        return HumanReply.read({"text": text})
    command, _, rest = text.partition(" ")
    first, _, more = rest.strip().partition(" ")
    score = _number(first)
    if command == "/end":
        return HumanReply.read({"text": rest if score is None else more, "is_end": True, "score": score})
    if command != "/score" or score is None:
        raise DataError(f"{text!r:.60} is no answer. {HELP}")
    return HumanReply.read({"text": more, "score": score})


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
