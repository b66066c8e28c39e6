"""InteractionSession: an episode's use of its interaction, started once, finalized once, with a deadline for every call.

This is the only module that calls an author's interaction. It converts the failures of that code (it raises, hangs, or
returns an invalid answer) into an `InteractionError`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import (
    DataError,
    InteractionError,
    LifecycleError,
    PolyturnError,
    one_line,
    plugin_errors_as,
    raised_at,
)
from polyturn.core.messages import Message
from polyturn.core.protocols import Interaction
from polyturn.core.reward import MAX_REWARD, as_flag, as_score, brief
from polyturn.core.snapshots import SnapshotHooks
from polyturn.core.task import InteractionRef
from polyturn.infra.deadline import CallWithDeadline, DeadlineError
from polyturn.interactions.adapters import in_usual_form
from polyturn.interactions.base import ConversationView, ViewInteraction
from polyturn.interactions.checks import AsksPerson
from polyturn.tools.results import content_of
from polyturn.tools.schema import ToolResponse

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InteractionReply:
    """The answer of an interaction to one turn."""

    is_done: bool
    content: str | tuple[Mapping[str, Any], ...]
    """Text, or parts in OpenAI's format, which may be images."""
    score: float | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class LoadedInteraction:
    """An interaction of a run: its capabilities, inspected once, and the state that its episodes share."""

    __slots__ = ("asks_person", "bounded", "hooks", "interaction", "live_ids", "name", "takes_view", "timeout_s")

    def __init__(self, interaction: Interaction, name: str, *, timeout_s: float) -> None:
        """Inspect the interaction's capabilities.

        Args:
            interaction: The interaction, in any supported form.
            name: The name that rows use for it.
            timeout_s: Deadline of each call, in seconds.
        """
        self.interaction = in_usual_form(interaction)
        self.name, self.timeout_s = name, timeout_s
        self.hooks = SnapshotHooks.of(interaction, label=f"interaction {name!r}")
        """The hooks that save and restore its state across a restart."""
        self.bounded = CallWithDeadline(name=f"interaction-{name}", timeout_s=timeout_s)
        self.live_ids: set[str] = set()
        self.takes_view = interaction if isinstance(interaction, ViewInteraction) else None
        """The interaction itself, if its `respond` takes a view of the conversation; else None."""
        self.asks_person = isinstance(interaction, AsksPerson) and bool(interaction.asks_person)
        """Whether a person answers."""


class InteractionSession:
    """An interaction during one episode."""

    def __init__(self, loaded: LoadedInteraction, ref: InteractionRef) -> None:
        """Store the arguments; nothing is called before `start`.

        Args:
            loaded: The interaction.
            ref: The interaction's name and kwargs in the episode's row.
        """
        self.loaded, self._interaction, self._ref = loaded, loaded.interaction, ref
        self._id: str | None = None
        self._half_started: str | None = None
        """The id under which `close` finalizes a start that failed or was cancelled: the returned id, else the episode's."""

    @property
    def name(self) -> str:
        """The interaction's name."""
        return self._ref.name

    async def start(self, episode_id: str) -> None:
        """Call `start_interaction`; later calls use the id that it returns.

        Raises:
            InteractionError: the interaction raised, was late, or returned an id that another live episode uses.
        """
        if self._id is not None:
            raise LifecycleError(f"interaction {self.name!r}: started twice in one episode")
        chosen: str | None = None
        start = functools.partial(self._interaction.start_interaction, episode_id, **self._ref.kwargs)

        async def start_interaction() -> None:
            nonlocal chosen  # set inside the call: a cancellation may come before `start` resumes
            returned = await self.loaded.bounded.call(start)
            chosen = episode_id if returned is None else str(returned)

        try:
            await self._call(start_interaction)
            if chosen in self.loaded.live_ids:
                raise InteractionError(
                    f"interaction {self.name!r}: start_interaction returned the id {chosen!r}, which another live episode "
                    "uses; return the id you were given, or a new one"
                )
        except BaseException:
            is_free = chosen is not None and chosen not in self.loaded.live_ids
            self._half_started = chosen if is_free else episode_id
            raise
        assert chosen is not None
        self._id = chosen
        self.loaded.live_ids.add(chosen)

    async def reply(self, messages: list[dict[str, Any]], view: ConversationView | None = None) -> InteractionReply:
        """Call `respond`, or `generate_response` if there is no `respond`, on the conversation; return its checked answer.

        Raises:
            InteractionError: the method raised, was late, or did not return (should_terminate, content, score, metadata).
        """
        viewer, kwargs = self.loaded.takes_view, self._ref.kwargs
        method: Callable[..., Any]
        if viewer is not None:
            method, limit_s = viewer.respond, viewer.reply_timeout_s
            answer = await self._call(method, view, self._live(), messages, kwargs=kwargs, limit_s=limit_s)
        else:
            method = self._interaction.generate_response
            answer = await self._call(method, self._live(), messages, kwargs=kwargs)
        with plugin_errors_as(f"interaction {self.name!r}: reading the result of {method.__name__}", InteractionError):
            return self._read(answer, method)

    def _read(self, answer: Any, method: Callable[..., Any]) -> InteractionReply:
        """Check and convert an answer of `method`."""
        if not isinstance(answer, tuple | list) or len(answer) != 4:
            raise InteractionError(
                f"interaction {self.name!r}: {method.__name__} returned {brief(answer, 200)}; return "
                f"(should_terminate, content, score, metadata){defined_at(method)}"
            )
        done, content, score, metadata = answer
        if (is_done := as_flag(done)) is None:
            raise InteractionError(
                f"interaction {self.name!r}: {method.__name__} gave {brief(done)} for should_terminate; return True or False"
                f"{defined_at(method)}"
            )
        if content is None and not is_done:
            raise InteractionError(
                f"interaction {self.name!r}: {method.__name__} gave the content None with should_terminate=False, so the "
                f"model would read an empty message; return a text, or True to end the episode{defined_at(method)}"
            )
        return InteractionReply(
            is_done=is_done,
            content=self._content(content, method),
            score=None if score is None else self._number(method, score),
            metadata=dict(metadata or {}),
        )

    async def final_score(self) -> float | None:
        """Call `calculate_score`, for a last turn without a reply.

        Raises:
            InteractionError: the method raised, was late, or did not return a finite number.
        """
        method = self._interaction.calculate_score
        score = await self._call(method, self._live())
        return None if score is None else self._number(method, score)

    async def snapshot(self) -> Any:
        """Return the interaction's snapshot of the episode; None if it does not keep state.

        Raises:
            InteractionError: its `snapshot` raised or was late.
        """
        snapshot = self.loaded.hooks.snapshot
        return None if snapshot is None else await self._call(snapshot, self._live())

    async def restore(self, state: Any) -> None:
        """Restore `state` into the interaction, which has been started again.

        Raises:
            InteractionError: its `restore` raised or was late.
        """
        if self.loaded.hooks.restore is not None:
            await self._call(self.loaded.hooks.restore, self._live(), state)

    async def close(self) -> str | None:
        """Call `finalize_interaction` once if the interaction was started; return its failure, if any.

        A failed start is finalized too, because it may have taken resources; errors of that call are ignored.
        """
        if self._half_started is not None:
            failed_id, self._half_started = self._half_started, None
            with contextlib.suppress(InteractionError):
                await self._call(self._interaction.finalize_interaction, failed_id)
        if self._id is None:
            return None
        instance_id, self._id = self._id, None
        try:
            await self._call(self._interaction.finalize_interaction, instance_id)
        except InteractionError as problem:
            logger.warning("%s%s", problem, raised_at(problem))
            return str(problem)
        finally:
            self.loaded.live_ids.discard(instance_id)
        return None

    def _content(self, content: Any, method: Callable[..., Any]) -> str | tuple[Mapping[str, Any], ...]:
        """Convert the reply's content (a text, a `ToolResponse`, or a list of parts) to message content."""
        try:
            if isinstance(content, ToolResponse):
                return content_of(content)
            if isinstance(content, list | tuple):
                return Message.from_openai({"role": "user", "content": content}).content
        except DataError as problem:
            raise InteractionError(f"interaction {self.name!r}: {method.__name__}: {problem}") from problem
        return "" if content is None else str(content)

    def _live(self) -> str:
        if self._id is None:
            raise LifecycleError(f"interaction {self.name!r}: used before its start or after its end")
        return self._id

    async def _call(
        self, method: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None, limit_s: float | None = None
    ) -> Any:
        """Call an author's method with a deadline: `limit_s`, or `timeout_s` by default. A plain method runs in a thread."""
        key = "rollout.interaction_timeout_s" if limit_s is None else "the interaction's reply_timeout_s"
        limit_s = self.loaded.timeout_s if limit_s is None else limit_s
        is_owed = method.__name__ == "finalize_interaction"
        bounded = self.loaded.bounded
        if not is_owed:  # a started interaction is finalized, however many calls were abandoned
            bounded.check_abandoned(f"the interaction {self.name!r}")
        try:
            return await bounded.run(functools.partial(method, *args, **kwargs or {}), timeout_s=limit_s, is_owed=is_owed)
        except Exception as problem:
            if isinstance(problem, PolyturnError) and not defined_at(method):
                # The author of the run wrote no such method: the class is the library's, and its error says what is wrong.
                text = one_line(problem).removeprefix(f"{InteractionError.__name__}: ")
                raise InteractionError(f"interaction {self.name!r}: {text}") from problem
            if isinstance(problem, DeadlineError):
                why = f"took longer than {limit_s:g} s; raise {key} or make it quicker"
            else:
                why = f"raised {one_line(problem)}"
            if isinstance(problem, KeyError) and kwargs is not None and problem.args[:1] not in [(key,) for key in kwargs]:
                why += f"; the interaction kwargs of this task's row are {', '.join(kwargs) or 'empty'}"
            raise InteractionError(f"interaction {self.name!r}: {method.__name__} {why}") from problem

    def _number(self, method: Callable[..., Any], value: Any) -> float:
        number = as_score(value)
        if number is None:
            raise InteractionError(
                f"interaction {self.name!r}: {method.__name__} gave the score {brief(value)}; return a finite number of at "
                f"most {MAX_REWARD:g}, or None{defined_at(method)}"
            )
        return number
