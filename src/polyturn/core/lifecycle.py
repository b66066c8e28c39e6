"""Request states and stop reasons: one transition table, and an object that refuses every move outside it.

    PENDING -> GENERATING -> TOOL_CALLING or INTERACTING -> GENERATING ... -> SCORING -> COMPLETED

FAILED and ABORTED can be reached from every live state, SUSPENDED only from GENERATING (a rollout that waits for new
weights). Separate so that no other file decides what may follow what.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

from polyturn.core.errors import LifecycleError


class RequestState(Enum):
    """The states of an episode."""

    PENDING = "pending"
    GENERATING = "generating"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    SUSPENDED = "suspended"
    SCORING = "scoring"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


class StopReason(Enum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The model finished and nothing answered."""
    ENV_DONE = "env_done"
    """The interaction, tool or environment said that the episode is over."""
    LENGTH = "length"
    """A completion was cut at its per-turn limit."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TIMEOUT = "timeout"
    ERROR = "error"
    ABORTED = "aborted"

    @property
    def is_truncation(self) -> bool:
        """Whether a limit ended the trajectory. A truncation is data, never a failure."""
        return self in _TRUNCATIONS

    @property
    def is_cut(self) -> bool:
        """Whether a limit on tokens, context or time ended it; an episode that used up its turns was answered to the end."""
        return self in _TRUNCATIONS and self is not StopReason.MAX_TURNS

    @property
    def is_failure(self) -> bool:
        """Whether the trajectory is left out of the loss and of its group's statistics."""
        return self in (StopReason.ERROR, StopReason.ABORTED)


_TRUNCATIONS = frozenset(
    {StopReason.LENGTH, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL, StopReason.TIMEOUT}
)

_S = RequestState
_ENDS = frozenset({_S.FAILED, _S.ABORTED})
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    _S.PENDING: frozenset({_S.GENERATING, _S.SCORING}) | _ENDS,
    _S.GENERATING: frozenset({_S.TOOL_CALLING, _S.INTERACTING, _S.GENERATING, _S.SUSPENDED, _S.SCORING}) | _ENDS,
    _S.TOOL_CALLING: frozenset({_S.GENERATING, _S.INTERACTING, _S.SCORING}) | _ENDS,
    _S.INTERACTING: frozenset({_S.GENERATING, _S.TOOL_CALLING, _S.SCORING}) | _ENDS,
    _S.SUSPENDED: frozenset({_S.GENERATING}) | _ENDS,
    _S.SCORING: frozenset({_S.COMPLETED}) | _ENDS,
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.ABORTED: frozenset(),
}
"""Which states may follow each state. PENDING -> SCORING is a task whose prompt leaves no room for a single turn."""


class Lifecycle:
    """The state of one episode; every move goes through `move`."""

    __slots__ = ("_state", "history")

    def __init__(self) -> None:
        self._state = RequestState.PENDING
        self.history: list[RequestState] = [self._state]

    @property
    def state(self) -> RequestState:
        """The state now."""
        return self._state

    @property
    def is_live(self) -> bool:
        """Whether anything may still follow."""
        return bool(TRANSITIONS[self._state])

    def move(self, to: RequestState) -> None:
        """Go to the state `to`.

        Raises:
            LifecycleError: the table does not allow it.
        """
        if to not in TRANSITIONS[self._state]:
            allowed = ", ".join(sorted(s.value for s in TRANSITIONS[self._state])) or "nothing: it has ended"
            raise LifecycleError(f"an episode cannot go from {self._state.value} to {to.value}; allowed: {allowed}")
        self._state = to
        self.history.append(to)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Make this the episode that the running task generates for, so that `suspended` finds it where an engine waits."""
        token = _generating.set(self)
        try:
            yield
        finally:
            _generating.reset(token)


_generating: ContextVar[Lifecycle | None] = ContextVar("generating", default=None)


@contextmanager
def suspended() -> Iterator[None]:
    """Hold the episode that this task generates for in SUSPENDED, and let it go on GENERATING; nothing without one."""
    lifecycle = _generating.get()
    if lifecycle is not None:
        lifecycle.move(RequestState.SUSPENDED)
    yield  # no `finally`: what fails or is cancelled while it waits ends from SUSPENDED
    if lifecycle is not None:
        lifecycle.move(RequestState.GENERATING)
