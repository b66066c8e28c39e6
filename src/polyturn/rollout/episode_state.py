"""EpisodeState: the parts of an episode, all of them for schedulers, an `EpisodeView` of them for interactions.

    segments    assistant  [ PROMPT | SAMPLED | OBSERVATION | SAMPLED ]          the model's own
                user       [ PROMPT | SAMPLED | OBSERVATION | SAMPLED ]          an aside, which weighs 0

What the run's model says for somebody else is an aside: its tokens are in the record, in segments of another agent, but it
is no turn of the conversation, so that no reward function takes it for what the model said. Separate from `Episode`, which
acts: nothing here changes anything or waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyturn.core.arrays import Ids
from polyturn.core.errors import SchedulerError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.lifecycle import Lifecycle, StopReason
from polyturn.core.messages import Message
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.interactions.context import SpeakOptions
from polyturn.rollout import limits as limit_rules
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.history import History
from polyturn.rollout.open_turn import GivenReward, OpenTurn
from polyturn.rollout.resources import ForkTools, Resources
from polyturn.tokens.codec import Codec


class Aside(NamedTuple):
    """Options of a fork outside the conversation: another speaker's turn, or a look-ahead."""

    label: str
    """Whose tokens they are in the record, in segments of their own."""
    seed: int
    is_trained: bool = False
    """Whether its tokens are trained; they weigh 0 otherwise."""


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """The facts that an interaction is told beyond the messages; a `ConversationView`."""

    id: str
    seed: int
    num_user_turns: int
    speak: Callable[[Sequence[Mapping[str, Any]], SpeakOptions], Coroutine[Any, Any, Message]]


def sampled_for(options: SpeakOptions, sampling: SamplingParams) -> SamplingParams:
    """Return how a voice is sampled in a run that samples like `sampling`."""
    return dataclasses.replace(
        sampling,
        max_tokens=options.max_tokens,
        temperature=sampling.temperature if options.temperature is None else options.temperature,
        top_p=sampling.top_p if options.top_p is None else options.top_p,
    )


class EpisodeState:
    """A live run of one task, as a scheduler reads it. Its own is the history; resources it shares with its forks."""

    def __init__(
        self, context: RolloutContext, task: Task, *, id: str, seed: int = 0, sampling: SamplingParams | None = None
    ) -> None:
        """Begin a run of `task`, in which nothing has been started yet; `run_episode` says what the arguments mean."""
        self.id = id
        self.task = task
        self.given_reward: GivenReward | None = None
        """The reward that the scheduler gives, in place of the run's reward functions; None leaves it to them."""
        self.lifecycle = Lifecycle()
        """Which state it is in."""
        self.limits = context.limits
        """Its limits; a scheduler that drives a fork may give it limits of its own."""
        self.listed_tools: tuple[Mapping[str, Any], ...] | None = None
        """The tools that prompts list in place of the task's; None for the task's."""
        self.aside_of = -1
        """The turn that an aside belongs to, by its index."""
        self.seed = seed
        """The seed of every random choice in this conversation."""
        self.sampling = sampling or context.sampling
        """The sampling of its turns, within the limits; `sample_as` changes it."""
        self.stops: tuple[str, ...] = ()
        """Texts with which a turn ends."""
        self._context = context
        self._speakers: dict[str, Any] = {}
        """The episodes that speak with the run's own model in this conversation, by the agent's name."""
        self._aside: Aside | None = None
        self._tools: ForkTools | None = None
        """Of a fork: its own tools; None where it has all in common with the episode."""
        self.history = History(
            context.encoder_for(task), context.parser, task.prompt, renders_history=context.renders_history
        )
        """Its messages and tokens, for who runs it and watches it."""
        self.resources = Resources(context, task, id=id)
        """Resources shared with its forks, for the code that runs and watches it; a scheduler needs none of it."""

    @property
    def turns(self) -> list[OpenTurn]:
        """The turns of this episode, and those that it had when it was forked."""
        return self.history.turns

    @property
    def num_user_turns(self) -> int:
        """Number of replies of the interaction in this conversation."""
        return self.history.num_user_turns

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began that count for its time limit; the time between two processes does not."""
        return self.resources.elapsed_s

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as the model is shown it."""
        return self.history.messages

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages of the first prompt: the task's, unless a plug-in changed them."""
        return self.history.prompt or self.task.prompt

    @property
    def agent(self) -> str:
        """Whose history this is."""
        return self.history.builder.agent

    @property
    def has_partner(self) -> bool:
        """Whether the task's row names an interaction."""
        return self.resources.interaction is not None

    @property
    def shows_media(self) -> bool:
        """Whether messages may show images and other media."""
        return self._context.media is not None

    @property
    def codec(self) -> Codec:
        """The tokenizer and the chat template of the run."""
        return self._context.codec

    @property
    def context_ids(self) -> Ids:
        """[T] the ids that the model has been shown and has written so far, read-only."""
        return self.history.context

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the task may call, in OpenAI's function form."""
        return self._context.tools.schemas_of(self.task)

    def count_tokens(
        self, messages: Sequence[Message | Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Return how many tokens the prompt of a history has, for policies with a budget; `tools` replace its own."""
        typed = self.history.typed(messages)
        if tools is None:
            return self.history.length_of(typed)
        return len(self._context.encoder_listing(tools).start(typed))

    def next_request(self) -> tuple[GenerateRequest, StopReason]:
        """Return what the engine is asked next, and the limit that gives it its budget.

        Raises:
            SchedulerError: a limit forbids another turn, as `prepare` would have said.
        """
        history, sampling, number = self.history, self.sampling, len(self.turns)
        at = history.progress(elapsed_s=self.elapsed_s)
        budget = limit_rules.budget(self.limits, at, ceiling=sampling.max_tokens)
        if budget.tokens < 1 or (self.limits.max_turns is not None and number >= self.limits.max_turns):
            raise SchedulerError(
                f"episode {self.id!r}: another turn was asked for at {number} turns and {at.context_tokens} tokens, where a "
                "limit ends the episode; await `prepare` before each `generate` and end where it returns a reason"
            )
        asked = dataclasses.replace(
            sampling,
            max_tokens=budget.tokens,
            seed=derive_seed(self.seed, number) if sampling.seed is None else sampling.seed,
            stop_token_ids=sampling.stop_token_ids or self.codec.stop_token_ids,
            banned_token_ids=sampling.banned_token_ids or self._context.media_token_ids,
        )
        request = GenerateRequest(
            request_id=f"{self.id}/{number}",
            session_id=self.id,
            prompt_ids=history.context,
            sampling=asked,
            media=history.builder.media,
            routed_from=history.builder.num_routed,
        )
        return request, budget.cut_by
