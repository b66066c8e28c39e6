"""MultiTurnScheduler: the one multi-turn loop, and the three places where an author may decide.

    run             the loop itself: limits, generation, `check_finished`, `step`, recording
    step            what the environment answers to a turn: None (nothing), a text, messages, or a `Reply`
    check_finished  whether the episode ends right after a turn, before anything answers it

The default answers tool calls first, else lets the row's interaction answer, else ends. A scheduler of one's own is short:

    class Hint(MultiTurnScheduler):
        async def step(self, episode, turn):
            return None if "####" in turn.message.text else "Think step by step, then write #### and the answer."
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import PolyturnError, SchedulerError, one_line
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode
    from polyturn.rollout.live_turn import LiveTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the environment answers to a turn."""

    messages: tuple[Message, ...] = ()
    is_done: bool = False
    """The episode is over; the messages are recorded and, as nothing follows them, not encoded."""
    info: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Any) -> Reply:
        """Return what a `step` returned as a reply.

        Raises:
            SchedulerError: it is nothing that can be understood.
        """
        if isinstance(value, Reply):
            return value
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(messages=(Message(role="user", content=value),))
        if isinstance(value, Message | Mapping):
            return cls(messages=(Message.from_openai(value),))
        if isinstance(value, Sequence):
            return cls(messages=tuple(Message.from_openai(m) for m in value))
        raise SchedulerError(f"step returned {value!r:.200}; return None, a text, a message, a list of messages, or a Reply")


class MultiTurnScheduler:
    """The default turn logic; subclass it and override `step`, `check_finished` or `run`."""

    shared: bool = False
    """Whether one object serves all trajectories; False gives each trajectory a shallow copy."""

    async def run(self, episode: Episode) -> StopReason:
        """Drive `episode` to its end and return why it ended.

        Raises:
            PolyturnError: the engine, a plug-in or an invariant failed; the caller decides what that means.
        """
        while True:
            if (limit := await episode.prepare()) is not None:
                return limit
            turn = await episode.generate()
            if (reason := await self._finished(episode, turn)) is not None:
                return reason
            reply = Reply.of(await _call(self.step, episode, turn))
            episode.record(turn, reply)
            if reply.is_done:
                return StopReason.ENV_DONE
            if not reply.messages:
                return StopReason.STOP

    async def step(self, episode: Episode, turn: LiveTurn) -> Any:
        """Answer one turn: its tool calls first, else the row's interaction, else nothing."""
        if turn.message.tool_calls:
            return await episode.call_tools(turn)
        if episode.has_partner:
            return await episode.ask_partner(turn)
        return None

    def check_finished(self, episode: Episode, turn: LiveTurn) -> Any:
        """Return whether the episode ends with this turn: a StopReason, True (which is STOP), or None or False.

        The default ends it where a limit cut the completion, and says which limit.
        """
        return turn.cut_by if turn.finish_reason is FinishReason.LENGTH else None

    async def _finished(self, episode: Episode, turn: LiveTurn) -> StopReason | None:
        if turn.finish_reason is FinishReason.ABORT:
            return StopReason.ABORTED
        answer = await _call(self.check_finished, episode, turn)
        if isinstance(answer, StopReason):
            return answer
        return StopReason.STOP if answer else None


async def _call(method: Callable[..., Any], episode: Episode, turn: LiveTurn) -> Any:
    """Call an author's method, plain or async, and name it if it raises."""
    try:
        answer = method(episode, turn)
        return await answer if inspect.isawaitable(answer) else answer
    except PolyturnError:
        raise
    except Exception as problem:
        raise SchedulerError(f"the scheduler's {method.__name__} raised {one_line(problem)}") from problem
