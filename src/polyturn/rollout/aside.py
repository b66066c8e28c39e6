"""Asides: completions of the run's model in another role, and the view through which an interaction requests them.

    segments    assistant  [ PROMPT | SAMPLED | OBSERVATION | SAMPLED ]          the conversation
                user       [ PROMPT | SAMPLED | OBSERVATION | SAMPLED ]          an aside, with loss weight 0

The record keeps the tokens of an aside in segments of another agent. An aside is not a turn of the conversation, so a reward
function does not mistake it for the model's answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyturn.core.generation import SamplingParams
from polyturn.core.messages import Message
from polyturn.interactions.base import SpeakOptions


class Aside(NamedTuple):
    """Options of a fork outside the conversation: another speaker's turn, or a look-ahead."""

    label: str
    """The agent that the record names in the segments of these tokens."""
    seed: int
    is_trained: bool = False
    """Whether its tokens are trained; otherwise their loss weight is 0."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """The facts that an interaction receives along with the messages; implements `ConversationView`."""

    id: str
    seed: int
    num_user_turns: int
    speak: Callable[[Sequence[Mapping[str, Any]], SpeakOptions], Coroutine[Any, Any, Message]]


def sampled_for(options: SpeakOptions, sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of an aside: those in `options`, and the run's `sampling` for the rest."""
    return dataclasses.replace(
        sampling,
        max_tokens=options.max_tokens,
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
    )
