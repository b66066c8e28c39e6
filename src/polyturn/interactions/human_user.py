"""HumanUser: a person answers, in the run's terminal or on the page that `polyturn view --desk` shows.

class_name: polyturn.interactions.human_user.HumanUser
config: {at: terminal}                                       one conversation after another, in the run's own terminal
config: {at: desk, desk: ./desk, deadline_s: 3600}           many at once; run `polyturn view --desk ./desk` anywhere
"""

from __future__ import annotations

import functools
import logging
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from polyturn.core.errors import ConfigError, InteractionError
from polyturn.infra.settings import Score, Seconds, Settings, Text
from polyturn.infra.threads import DaemonThreads
from polyturn.interactions.base import ConversationView, ViewInteraction
from polyturn.interactions.person import HumanQueue, HumanReply, Terminal, TerminalClosedError
from polyturn.interactions.roles import text_of
from polyturn.partners.partner import without_thoughts

logger = logging.getLogger(__name__)

ROW_KEYS = ("goal", "persona", "about")
"""The row's keys that are shown to the person."""


class HumanSettings(Settings):
    """Where the person answers, and the deadline."""

    name: str = ""
    at: Literal["terminal", "desk"] = "terminal"
    desk: Text | None = None
    """The folder of the desk, relative to the configuration file."""
    deadline_s: Seconds = 600.0
    """Seconds within which an answer must come."""
    on_deadline: Text = "end"
    """At the deadline, "end" ends the conversation and "fail" fails it; any other text is used as the answer."""
    score: Score = 0.0
    """The score of a turn without a score from the person."""
    show_thoughts: bool = False
    """Whether the model's reasoning is shown."""

    @model_validator(mode="after")
    def _has_a_desk(self) -> Self:
        if (self.at == "desk") != (self.desk is not None):
            raise ValueError(f"at is {self.at!r} and desk is {self.desk!r}; for a desk, set `at: desk` and `desk: FOLDER`")
        return self


class HumanUser(ViewInteraction):
    """An interaction in which a person plays the user."""

    stateless = True
    asks_person = True

    def __init__(self, config: dict[str, Any], *, base: Path | None = None, terminal: Terminal | None = None) -> None:
        """Read the config; `terminal` replaces the process's terminal.

        Raises:
            ConfigError: a setting is unknown or invalid.
        """
        super().__init__(config)
        self._who = f"the human user {self.name!r}"
        settings = self._settings = HumanSettings.read(config, who=self._who)
        self._desk = None if settings.desk is None else HumanQueue((base or Path()) / settings.desk)
        self._is_announced = False
        self._terminal = terminal
        self._threads = DaemonThreads(name="terminal", max_threads=1)  # one thread: conversations take turns
        self.reply_timeout_s = math.inf if self._desk is None else settings.deadline_s + 30.0

    def check_setup(self) -> None:
        """Refuse `at: terminal` if the process has no terminal."""
        if self._desk is None and self._terminal is None and not sys.stdin.isatty():
            raise ConfigError(
                f"{self._who} answers in the terminal, but this process has none; run it in a terminal, or use a desk: "
                "{at: desk, desk: ./desk}"
            )

    def check_row(self, kwargs: Mapping[str, Any]) -> None:
        """Accept every row."""

    async def respond(
        self, view: ConversationView | None, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return the person's answer.

        Raises:
            InteractionError: there was no answer in time and `on_deadline` is "fail", or the terminal was closed.
        """
        settings = self._settings
        texts = [
            {"role": m["role"], "content": self._visible_text(m)} for m in messages if m.get("role") in ("user", "assistant")
        ]
        about = {"conversation": instance_id if view is None else view.id}
        about |= {name: str(kwargs[name]) for name in ROW_KEYS if kwargs.get(name)}
        reply = await self._ask([m for m in texts if m["content"]], about)
        if reply is not None:
            score = settings.score if reply.score is None else reply.score
            info = {"user_scored": reply.score is not None, **({"user_stop": "person"} if reply.is_end else {})}
            return reply.is_end, reply.text, score, info
        if settings.on_deadline == "fail":
            raise InteractionError(f"{self._who}: no answer came within {settings.deadline_s:g} s; raise deadline_s")
        is_end = settings.on_deadline == "end"
        return is_end, "" if is_end else settings.on_deadline, settings.score, {"user_stop": "deadline"}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of a turn without an answer."""
        return self._settings.score

    async def _ask(self, texts: list[dict[str, Any]], about: Mapping[str, Any]) -> HumanReply | None:
        deadline_s = self._settings.deadline_s
        if self._desk is not None:
            if not self._is_announced:  # once, because a run that waits for a person looks like one that hangs
                self._is_announced = True
                command = f"polyturn view --desk {shlex.quote(str(self._desk.folder))}"
                logger.warning("conversations are waiting for a person; answer them with: %s", command)
            return await self._desk.ask(texts, about=about, deadline_s=deadline_s)
        terminal = self._terminal or Terminal(sys.stdin, sys.stderr)
        try:
            ask = functools.partial(terminal.ask, texts, about=about, deadline_s=deadline_s)
            return await self._threads.run(ask)  # type: ignore[no-any-return]
        except TerminalClosedError as problem:
            raise InteractionError(f"{self._who}: the terminal was closed ({problem}), so there is no answer") from problem

    def _visible_text(self, message: Mapping[str, Any]) -> str:
        text = text_of(message)
        return without_thoughts(text) if message["role"] == "assistant" and not self._settings.show_thoughts else text
