"""Asides: completions of the run's model in another role, and the view of an interaction that may ask for them.

    segments    assistant  [ PROMPT | SAMPLED | OBSERVATION | SAMPLED ]          the model's own
                user       [ PROMPT | SAMPLED | OBSERVATION | SAMPLED ]          an aside, which weighs 0

The tokens of an aside are in the record, in segments of another agent, but it is not a turn of the conversation, so that no
reward function takes it for what the model said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyturn.core.generation import SamplingParams
from polyturn.core.messages import Message
from polyturn.interactions.context import SpeakOptions


class Aside(NamedTuple):
    """Options of a fork outside the conversation: another speaker's turn, or a look-ahead."""

    label: str
    """Whose tokens they are in the record, in segments of their own."""
    seed: int
    is_trained: bool = False
    """Whether its tokens are trained; they weigh 0 otherwise."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """The facts that an interaction gets beside the messages; a `ConversationView`."""

    id: str
    seed: int
    num_user_turns: int
    speak: Callable[[Sequence[Mapping[str, Any]], SpeakOptions], Coroutine[Any, Any, Message]]


def sampled_for(options: SpeakOptions, sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of an aside in a run that samples like `sampling`."""
    return dataclasses.replace(
        sampling,
        max_tokens=options.max_tokens,
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
    )
