"""Limits of an episode, checked in one documented order before every generation.

    1. time            timeout_s          -> TIMEOUT       (also cuts a call that is under way)
    2. turns           max_turns          -> MAX_TURNS
    3. user turns      max_user_turns     -> MAX_TURNS     (only if an interaction wrote the waiting reply)
    4. response        max_tokens         -> MAX_TOKENS    (all tokens after the first prompt: sampled and observed)
    5. context         max_context        -> CONTEXT_FULL  (unless the context policy makes room)

A completion may have as many tokens as the tightest limit leaves. `budget` returns this number, and the stop reason of the
episode if the completion is cut there; for `max_tokens_per_turn` it is LENGTH. All of these are truncations, not failures.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple

from pydantic import Field

from polyturn.core.errors import ConfigError
from polyturn.core.lifecycle import StopReason

logger = logging.getLogger(__name__)


class ContextPolicy(Enum):
    """The response to a turn that does not fit into the context.

    COMPACT and DROP_OLDEST edit the history as soon as fewer than `Limits.reserve` tokens are left. Without this margin, the
    context would cut the next completion although older messages could have been left out.
    """

    STOP = "stop"
    """The episode ends, truncated."""
    COMPACT = "compact"
    """Observations of earlier turns are replaced by a short note; a new segment starts."""
    DROP_OLDEST = "drop_oldest"
    """The oldest turns leave the history until the rest fits; a new segment starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of an episode; null means no limit. Checked in the order of `rollout/limits.py`."""

    max_turns: Annotated[int, Field(ge=1)] | None = 8
    """Completions of an episode; null means no limit."""
    max_user_turns: Annotated[int, Field(ge=0)] | None = None
    """Replies of an interaction that the model sees; null means no limit. The turn after the last one is still scored."""
    max_tokens_per_turn: Annotated[int, Field(ge=1)] | None = 512
    """Sampled tokens of one completion; null means no limit. If it is not set, 128 in training on a machine without a CUDA
    GPU."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens after the first prompt, observations included."""
    max_context: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and response together; in a run, the default is the model's own limit."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """A task with a longer prompt is an error at the start of a run, or is dropped (data.drop_long_prompts)."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which an episode is truncated; null means no limit."""
    counts_people: bool = False
    """Whether the time spent waiting for a person's answer counts for `timeout_s`."""
    context_policy: ContextPolicy = ContextPolicy.STOP
    """When the context is full: end, replace old observations by a note, or leave out the oldest messages."""

    def __post_init__(self) -> None:
        # The annotations only validate configurations; a scheduler may create limits directly.
        for name in ("max_turns", "max_user_turns", "max_tokens_per_turn", "max_tokens", "max_context", "timeout_s"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "max_user_turns" else 1e-9):
                raise ConfigError(f"{name} is {value}; use a positive number, or null for no limit")

    def warn_of_no_room(self) -> None:
        """Warn if `max_tokens_per_turn` is set but has no effect, because it is not below `max_context`."""
        per_turn, context = self.max_tokens_per_turn, self.max_context
        if per_turn is not None and context is not None and per_turn >= context and per_turn != Limits().max_tokens_per_turn:
            logger.warning(
                "rollout.limits.max_tokens_per_turn is %d, which has no effect while max_context is %d: the prompt and all "
                "turns share the context",
                per_turn,
                context,
            )

    @property
    def reserve(self) -> int:
        """Tokens that a context policy keeps free for the next turn: a whole turn, at most a quarter of the context."""
        if self.max_context is None or self.context_policy is ContextPolicy.STOP:
            return 1
        quarter = max(1, self.max_context // 4)
        return quarter if self.max_tokens_per_turn is None else min(self.max_tokens_per_turn, quarter)


class EpisodeProgress(NamedTuple):
    """The progress of an episode, in the units of the limits."""

    elapsed_s: float
    turns: int
    user_turns: int
    has_user_reply: bool
    """Whether the waiting observation came from the interaction."""
    response_tokens: int
    context_tokens: int
    """Number of tokens in the prompt of the next generation."""


class Budget(NamedTuple):
    """The maximum number of tokens of the next completion, and the stop reason if it is cut there."""

    tokens: int
    cut_by: StopReason


def reached(limits: Limits, at: EpisodeProgress) -> StopReason | None:
    """Return the stop reason of the first limit, in this module's order, that forbids another turn; None if none does."""
    if limits.timeout_s is not None and at.elapsed_s >= limits.timeout_s:
        return StopReason.TIMEOUT
    if limits.max_turns is not None and at.turns >= limits.max_turns:
        return StopReason.MAX_TURNS
    # `>`, because the waiting reply is already counted, and the last allowed reply is still shown.
    if limits.max_user_turns is not None and at.has_user_reply and at.user_turns > limits.max_user_turns:
        return StopReason.MAX_TURNS
    if limits.max_tokens is not None and at.response_tokens >= limits.max_tokens:
        return StopReason.MAX_TOKENS
    if limits.max_context is not None and at.context_tokens >= limits.max_context:
        return StopReason.CONTEXT_FULL
    return None


def exceeds_context(limits: Limits, *, num_chars: int, longest_token: int) -> bool:
    """Return whether a text of `num_chars` characters exceeds the context under any tokenization.

    The check does not encode the text, so it is cheap even for an answer of megabytes.
    """
    return limits.max_context is not None and num_chars > limits.max_context * longest_token


def is_short_of_room(limits: Limits, at: EpisodeProgress) -> bool:
    """Return whether the free context is smaller than `limits.reserve`."""
    return limits.max_context is not None and limits.max_context - at.context_tokens < limits.reserve


def budget(limits: Limits, at: EpisodeProgress, *, ceiling: int) -> Budget:
    """Return the maximum number of tokens of the next completion; at least 1 if `reached` returns None.

    Args:
        limits: The limits.
        at: The progress of the episode.
        ceiling: `max_tokens` of the sampling parameters.
    """
    tokens, cut_by = ceiling, StopReason.LENGTH
    for left, reason in (
        (limits.max_tokens_per_turn, StopReason.LENGTH),
        (None if limits.max_tokens is None else limits.max_tokens - at.response_tokens, StopReason.MAX_TOKENS),
        (None if limits.max_context is None else limits.max_context - at.context_tokens, StopReason.CONTEXT_FULL),
    ):
        # The first of equal budgets counts: a cut at the turn's own limit is LENGTH, even if another limit ends there too.
        if left is not None and left < tokens:
            tokens, cut_by = left, reason
    return Budget(tokens, cut_by)
