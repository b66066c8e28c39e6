"""HumanUser: a person answers, in the terminal of the run or at a desk that `polyturn view --desk` shows as a page.

    class_name: polyturn.interactions.human_user.HumanUser
    config: {at: terminal}                                       one conversation after another, in the run's own terminal
    config: {at: desk, desk: ./desk, deadline_s: 3600}           many at once; `polyturn view --desk ./desk` elsewhere

A person may be late: `on_deadline` says what happens then: end (the default) ends the conversation, fail fails it, and any
other text is what the person is taken to have said.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from polyturn.core.aio import PerLoop
from polyturn.core.errors import ConfigError, InteractionError
from polyturn.core.reward import as_score
from polyturn.engines.chat_partner import check_positive, refuse_unknown, without_thoughts
from polyturn.infra.threads import DaemonThreads
from polyturn.interactions.base import ViewInteraction
from polyturn.interactions.context import ConversationView
from polyturn.interactions.human_queue import HumanQueue, HumanReply
from polyturn.interactions.roles import text_of
from polyturn.interactions.terminal import Terminal, TerminalClosedError

logger = logging.getLogger(__name__)

PLACES = ("terminal", "desk")
ROW_KEYS = ("goal", "persona", "about")
"""The keys of the row that a person is shown."""


class HumanUser(ViewInteraction):
    """A user that is a person."""

    stateless = True

    def __init__(self, config: dict[str, Any], *, base: Path | None = None, terminal: Terminal | None = None) -> None:
        """Read the config.

        Args:
            config: `at`, `desk`, `deadline_s`, `on_deadline`, `score`, `show_thoughts`.
            base: The folder that relative paths start from.
            terminal: Where to ask; the process's own otherwise.

        Raises:
            ConfigError: a setting is unknown or cannot work.
        """
        super().__init__(config)
        who = self._who = f"the human user {self.name!r}"
        refuse_unknown(config, ["name", "at", "desk", "deadline_s", "on_deadline", "score", "show_thoughts"], who=who)
        at = config.get("at", "terminal")
        if at not in PLACES:
            raise ConfigError(f"{who}: at is {at!r}; give {' or '.join(PLACES)}")
        if (at == "desk") != (config.get("desk") is not None):
            raise ConfigError(
                f"{who}: at is {at!r} and desk is {config.get('desk')!r}; a desk is a folder, and needs at: desk"
            )
        if not isinstance(config.get("desk", ""), str):
            raise ConfigError(f"{who}: desk is {config['desk']!r:.100}; give the path of a folder")
        self._deadline_s = config.get("deadline_s", 600)
        check_positive(self._deadline_s, name="deadline_s", who=who, is_whole=False)
        self._on_deadline = config.get("on_deadline", "end")
        if not isinstance(self._on_deadline, str) or not self._on_deadline.strip():
            raise ConfigError(f"{who}: on_deadline is {self._on_deadline!r}; give end, fail, or a text to say")
        self._score = config.get("score", 0.0)
        if isinstance(self._score, bool) or not isinstance(self._score, int | float) or as_score(self._score) is None:
            raise ConfigError(f"{who}: score is {self._score!r}; give the number that a turn without a score has")
        self._shows_thoughts = bool(config.get("show_thoughts", False))
        self._desk = HumanQueue((base or Path()) / str(config["desk"])) if at == "desk" else None
        self._is_announced = False
        self._is_own_terminal = terminal is None
        self._terminal = terminal
        self._threads = DaemonThreads(name="terminal", max_threads=1)
        self._one_at_a_time = PerLoop(asyncio.Lock)
        self.asks_person = True
        # At a terminal, conversations wait for one another, and a person's time runs when it is asked.
        self.reply_timeout_s = math.inf if self._desk is None else self._deadline_s + 30.0

    def check_setup(self) -> None:
        """Refuse to ask in a terminal that is none."""
        if self._desk is None and self._is_own_terminal and not sys.stdin.isatty():
            raise ConfigError(
                f"{self._who} is asked in the terminal, and this process has none; run it in one, or use a desk: "
                "{at: desk, desk: ./desk}"
            )

    def check_row(self, kwargs: Mapping[str, Any]) -> None:
        """Every row will do."""

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin one episode."""
        return str(uuid4()) if instance_id is None else instance_id

    async def respond(
        self, view: ConversationView | None, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Ask the person.

        Raises:
            InteractionError: no answer came in time and `on_deadline` is "fail", or the terminal was closed.
        """
        texts = [self._shown(m) for m in messages]
        about = {"conversation": instance_id if view is None else view.id}
        about |= {name: str(kwargs[name]) for name in ROW_KEYS if kwargs.get(name)}
        answer = await self._ask([m for m in texts if m["content"]], about)
        if answer is not None:
            score = self._score if answer.score is None else answer.score
            info = {"user_scored": answer.score is not None, **({"user_stop": "person"} if answer.is_end else {})}
            return answer.is_end, answer.text, float(score), info
        if self._on_deadline == "fail":
            raise InteractionError(f"{self._who}: no answer came within {self._deadline_s:g} s; raise deadline_s")
        is_end = self._on_deadline == "end"
        return is_end, "" if is_end else self._on_deadline, float(self._score), {"user_stop": "deadline"}

    async def calculate_score(self, instance_id: str | None = None, **kwargs: Any) -> float:
        """Return the score of a turn without an answer."""
        return float(self._score)

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        """Nothing is kept of an episode."""

    async def _ask(self, texts: list[dict[str, Any]], about: Mapping[str, Any]) -> HumanReply | None:
        if self._desk is not None:
            if not self._is_announced:  # once: else a run that waits for a person looks like one that hangs
                self._is_announced = True
                logger.warning(
                    "conversations wait for a person; answer them with: polyturn view --desk %s",
                    shlex.quote(str(self._desk.folder)),
                )
            return await self._desk.ask(texts, about=about, deadline_s=self._deadline_s)
        terminal = self._terminal or Terminal(sys.stdin, sys.stderr)
        ask = functools.partial(terminal.ask, texts, about=about, deadline_s=self._deadline_s)
        async with self._one_at_a_time():
            try:
                answer: HumanReply | None = await self._threads.run(ask)
            except TerminalClosedError as problem:
                raise InteractionError(f"{self._who}: the terminal was closed ({problem}); no answer can come") from problem
        return answer

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        text = text_of(message) if message.get("role") in ("user", "assistant") else ""
        is_models = message.get("role") == "assistant"
        return {
            "role": message.get("role"),
            "content": text if self._shows_thoughts or not is_models else without_thoughts(text),
        }
