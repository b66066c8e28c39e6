"""Why a trajectory ended, and the state of a live episode.

    PENDING -> GENERATING -> TOOL_CALLING or INTERACTING -> GENERATING ... -> COMPLETED, FAILED or ABORTED

`TRANSITIONS` lists the states that may follow each state. If the limits of an episode
leave no room for a turn, it goes from PENDING directly to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from polyturn.core.errors import LifecycleError


class StopReason(Enum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The model finished its turn, and no tool or interaction had to answer."""
    ENV_DONE = "env_done"
    """The interaction, tool or environment ended the episode."""
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
        """Whether a limit ended the trajectory. A truncated trajectory is valid data, not a failure."""
        return self in _TRUNCATIONS

    @property
    def is_cut(self) -> bool:
        """Whether a limit on tokens, context or time cut the episode off. MAX_TURNS does not count, because the last turn
        was still answered."""
        return self in _TRUNCATIONS and self is not StopReason.MAX_TURNS

    @property
    def is_failure(self) -> bool:
        """Whether the trajectory is left out of the loss and of its group's statistics."""
        return self in (StopReason.ERROR, StopReason.ABORTED)


_TRUNCATIONS = frozenset(
    {StopReason.LENGTH, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL, StopReason.TIMEOUT}
)


class EpisodeState(Enum):
    """The states of an episode."""

    PENDING = "pending"
    GENERATING = "generating"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"


_S = EpisodeState
_ENDS = frozenset({_S.COMPLETED, _S.FAILED, _S.ABORTED})
TRANSITIONS: dict[EpisodeState, frozenset[EpisodeState]] = {
    _S.PENDING: _ENDS | {_S.GENERATING},
    _S.GENERATING: _ENDS | {_S.GENERATING, _S.TOOL_CALLING, _S.INTERACTING},
    _S.TOOL_CALLING: _ENDS | {_S.GENERATING, _S.INTERACTING},
    _S.INTERACTING: _ENDS | {_S.GENERATING, _S.TOOL_CALLING},
    **dict.fromkeys(_ENDS, frozenset()),
}
"""The states that may follow each state."""


class Lifecycle:
    """The state of one episode; every change goes through `move` or `during`."""

    def __init__(self, running: Counter[EpisodeState] | None = None) -> None:
        """Begin in PENDING. `running` counts, over all episodes of a run, the episodes inside `during` by state."""
        self.running: Counter[EpisodeState] = Counter() if running is None else running
        self.history = [EpisodeState.PENDING]

    @property
    def state(self) -> EpisodeState:
        """The current state."""
        return self.history[-1]

    def move(self, to: EpisodeState) -> None:
        """Go to the state `to`.

        Raises:
            LifecycleError: `TRANSITIONS` does not allow the change.
        """
        if to not in TRANSITIONS[self.state]:
            allowed = ", ".join(sorted(s.value for s in TRANSITIONS[self.state])) or "nothing: it has ended"
            raise LifecycleError(f"an episode cannot go from {self.state.value} to {to.value}; allowed: {allowed}")
        self.history.append(to)

    @contextmanager
    def during(self, state: EpisodeState) -> Iterator[None]:
        """Go to `state`, and count the episode as running in it until the block ends."""
        self.move(state)
        self.running[state] += 1
        try:
            yield
        finally:
            self.running[state] -= 1
