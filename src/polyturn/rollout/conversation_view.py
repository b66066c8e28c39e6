"""EpisodeView: the conversation of an episode, or of a fork of one, as its interaction may know it; it lends a voice.

    segments    assistant  [ PROMPT | SAMPLED | OBSERVATION | SAMPLED ]          the model's own
                user       [ PROMPT | SAMPLED | OBSERVATION | SAMPLED ]          what it said for the user, weighs 0

Words of the voice are an aside: the run's engine samples them and their tokens are in the record, in segments of another
agent, but they are no turns of the conversation, so that no reward function takes them for what the model said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from polyturn.core.errors import InteractionError
from polyturn.core.generation import SamplingParams
from polyturn.core.messages import Message
from polyturn.core.seeds import derive_seed
from polyturn.interactions.context import VoiceOptions

if TYPE_CHECKING:
    from polyturn.rollout.episode import Episode


class Aside(NamedTuple):
    """Options of a fork outside the conversation: another speaker's turn, or a look-ahead."""

    label: str
    """Whose tokens they are in the record, in segments of their own."""
    seed: int
    is_trained: bool = False
    """Whether its tokens are trained; they weigh 0 otherwise."""


class EpisodeView:
    """What an interaction is told beyond the messages."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    @property
    def id(self) -> str:
        """Unique among conversations that are live."""
        return self._episode.id

    @property
    def seed(self) -> int:
        """What every random choice in this conversation follows from."""
        return self._episode.seed

    @property
    def num_user_turns(self) -> int:
        """How many replies the conversation has had from its interaction."""
        return self._episode.num_user_turns

    async def speak(self, messages: Sequence[Mapping[str, Any]], options: VoiceOptions) -> Message:
        """Let the run's own model go on with `messages`, under another agent's name.

        Raises:
            InteractionError: a limit of the run leaves no room.
            EngineError: the engine is lost or refuses the request.
        """
        voices = self._episode.voices
        voice = voices.get(options.agent) or voices.setdefault(options.agent, self._voice(messages, options))
        voice.aside_of = self._episode.turns[-1].index
        voice.rewrite(messages)
        if (limit := await voice.prepare()) is not None:
            raise InteractionError(
                f"the run's own model cannot speak for {options.agent!r} ({limit.value}): its prompt has "
                f"{voice.count_tokens(messages)} tokens; raise rollout.limits.max_context, or shorten the persona"
            )
        return (await voice.generate()).message

    def _voice(self, messages: Sequence[Mapping[str, Any]], options: VoiceOptions) -> Episode:
        episode = self._episode
        seed = derive_seed(episode.seed, "voice", options.agent)
        aside = Aside(label=options.agent, seed=seed, is_trained=options.is_trained)
        voice = episode.fork(agent=options.agent, messages=messages, aside=aside)
        voice.limits = dataclasses.replace(
            voice.limits, max_turns=None, max_user_turns=None, max_tokens=None, max_tokens_per_turn=options.max_tokens
        )
        voice.sample_as(sampled_for(options, episode.sampling))
        voice.list_tools(())
        return voice


def sampled_for(options: VoiceOptions, sampling: SamplingParams) -> SamplingParams:
    """Return how a voice is sampled in a run that samples like `sampling`."""
    return dataclasses.replace(
        sampling,
        max_tokens=options.max_tokens,
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
    )
