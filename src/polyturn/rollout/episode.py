"""Episode: a live run of one task. Schedulers read its state and drive it through its methods.

The scheduler decides what happens next; the episode calls the engine, the tools and the interaction, and keeps the record.
New messages are encoded only when the next generation needs them, so a reply at the end of an episode is never encoded.

    prepare -> generate -> (call_tools | ask_partner) -> record -> prepare -> generate -> …
    rewrite          edits the history          go_on    continues the same assistant message
    fork             a second run from here, of the same agent or of another; its turns belong to the same trajectory

An episode consists of a `History` and of `Resources`. Each fork has a separate history; all forks share the resources.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from polyturn.core.arrays import Ids
from polyturn.core.errors import DataError, InteractionError, LifecycleError, SchedulerError
from polyturn.core.generation import GenerateRequest, SamplingParams
from polyturn.core.lifecycle import EpisodeState, Lifecycle, StopReason
from polyturn.core.messages import Message, Origin, count_chars
from polyturn.core.protocols import Scheduler
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.infra.deadline import pauses_stretch
from polyturn.interactions.base import SpeakOptions
from polyturn.rollout import history_edits
from polyturn.rollout import limits as limit_rules
from polyturn.rollout.aside import Aside, EpisodeView, sampled_for
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.history import History, Mark
from polyturn.rollout.open_turn import GivenReward, OpenTurn, Reply
from polyturn.rollout.resources import Fork, Resources, as_messages
from polyturn.rollout.stop_strings import Stopped, generate_until
from polyturn.tokens.codec import LONG_CHARS, Codec

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)

_LIMIT = "%s limit: %s forbids turn %d"


class Episode:
    """A live run of one task, or a fork of such a run: the interface for schedulers."""

    def __init__(
        self,
        context: RolloutContext,
        task: Task,
        *,
        id: str,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        limits: limit_rules.Limits | None = None,
        history: History | None = None,
        resources: Resources | None = None,
    ) -> None:
        """Prepare a run of `task` without starting anything; `run_episode` documents the arguments.

        Only forks pass `history` and the shared `resources`.
        """
        self.id = id
        self.task = task
        self.given_reward: GivenReward | None = None
        """The reward from the scheduler, which replaces the run's reward functions; None uses the reward functions."""
        self.lifecycle = Lifecycle(context.running)
        """The state of this episode or fork."""
        self.limits = limits or context.limits
        """Its limits; a scheduler may set different limits on a fork."""
        self.listed_tools: tuple[Mapping[str, Any], ...] | None = None
        """Schemas that prompts list instead of the task's tools (`list_tools`); None lists the task's tools."""
        self.aside_of = -1
        """The index of the turn that an aside belongs to."""
        self.seed = seed
        """The seed of every random choice in this conversation."""
        self.sampling = sampling or context.sampling
        """The sampling of its turns, within the limits; `sample_as` changes it."""
        self.stops: tuple[str, ...] = ()
        """Stop strings: a turn ends when the model has written one of them."""
        self._context = context
        self._speakers: dict[str, Any] = {}
        """Forks in which the run's own model speaks for an interaction, by the agent's name."""
        self._aside: Aside | None = None
        self.history = history or History(
            context.encoder_for(task), context.parser, task.prompt, renders_history=context.renders_history
        )
        """Its messages and tokens, for the code that runs and observes the episode."""
        self.resources = resources or Resources(context, task, id=id)
        """Resources shared with its forks, for the code that runs and observes the episode; not for schedulers."""

    @property
    def turns(self) -> list[OpenTurn]:
        """The turns of this episode; for a fork, these include the turns before the fork."""
        return self.history.turns

    @property
    def num_user_turns(self) -> int:
        """Number of the interaction's replies in this conversation."""
        return self.history.num_user_turns

    @property
    def elapsed_s(self) -> float:
        """Seconds that count for the time limit. The time between an interruption and the resume does not count."""
        return self.resources.elapsed_s

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as the model sees it."""
        return self.history.messages

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages of the first prompt: the task's prompt, unless a plug-in changed it."""
        return self.history.prompt or self.task.prompt

    @property
    def agent(self) -> str:
        """The name of the agent whose history this is."""
        return self.history.builder.agent

    @property
    def has_partner(self) -> bool:
        """Whether the task's row names an interaction."""
        return self.resources.interaction is not None

    @property
    def shows_media(self) -> bool:
        """Whether messages may contain images and other media."""
        return self._context.media is not None

    @property
    def codec(self) -> Codec:
        """The tokenizer and the chat template of the run."""
        return self._context.codec

    @property
    def context_ids(self) -> Ids:
        """[T] the ids of the current context, read-only: the prompt, and the completions and observations so far."""
        return self.history.context

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the task may call, in OpenAI's function form."""
        return self._context.tools.schemas_of(self.task)

    def count_tokens(
        self, messages: Sequence[Message | Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Return the length in tokens of a prompt with `messages`, and with `tools` in place of the listed tools."""
        typed = self.history.typed(messages)
        if tools is None:
            return self.history.length_of(typed)
        return len(self._context.encoder_listing(tools).start(typed))

    # The steps of a turn.

    @pauses_stretch
    async def prepare(self) -> StopReason | None:
        """Encode the waiting messages and append them to the context. The first call also starts tools and interaction.

        Returns:
            The limit that forbids another generation, or None. The first prompt is recorded even if a limit forbids a turn.

        Raises:
            ToolStartError: a tool could not be created.
            InteractionError: the interaction could not be started.
            TemplateError: the template cannot render the waiting messages.
            SchedulerError: the template cannot render the history that the scheduler wrote.
            DataError: the first prompt has more characters than the context can hold.
        """
        shared, history = self.resources, self.history
        is_first = not shared.is_started
        if is_first:
            if opening := await shared.start():
                history.set_prompt([*history.messages, *opening])
        elif shared.on_turn is not None:
            await shared.on_turn()
        await self.process_media(history.to_encode)
        num_chars = count_chars(history.to_encode)
        if limit_rules.exceeds_context(self.limits, num_chars=num_chars, longest_token=self.codec.longest_token):
            if is_first:  # a task whose prompt does not fit is an error; an observation that does not fit is a truncation
                raise DataError(
                    f"the prompt has {num_chars} characters, more than a context of {self.limits.max_context} tokens holds"
                )
            logger.debug(_LIMIT, self.id, StopReason.CONTEXT_FULL.value, len(history.turns))
            return StopReason.CONTEXT_FULL
        # A long text takes seconds to encode; in a thread, it does not block the other episodes.
        prompt = await asyncio.to_thread(history.next_prompt) if num_chars > LONG_CHARS else history.next_prompt()
        if is_first:
            history.append_prompt(prompt)  # before the limits, so that the record has its prompt even if no turn fits
            if shared.on_turn is not None:
                await shared.on_turn()
            tools = shared.tools.names
            logger.debug("%s starts: task %s, %d prompt tokens, tools %s", self.id, self.task.id, prompt.length, tools)
        at = history.progress(elapsed_s=self.elapsed_s, prompt=prompt)
        reason = limit_rules.reached(self.limits, at)
        # Leaving out messages frees context, but does not help against any other limit.
        may_shorten = reason in (None, StopReason.CONTEXT_FULL) and limit_rules.is_short_of_room(self.limits, at)
        if may_shorten and history_edits.shorten_to_fit(history, self.limits):
            return None
        if reason is not None:
            logger.debug(_LIMIT, self.id, reason.value, len(history.turns))
        elif not is_first:  # if a limit ends the episode, the model never sees the waiting messages
            history.append_prompt(prompt)
        return reason

    async def process_media(self, messages: Sequence[Message]) -> None:
        """Process the media of messages in a thread, so that encoding them does not block the event loop.

        Raises:
            DataError: a medium cannot be processed.
        """
        if self._context.media is not None:
            await self._context.media.prepare(messages)

    @pauses_stretch
    async def generate(self) -> OpenTurn:
        """Sample one completion, record its ids, and parse it as a message.

        Raises:
            LifecycleError: the episode has ended.
            SchedulerError: a limit on turns or tokens forbids another turn; `prepare`, to be called first, returns it.
            EngineError: the engine is lost, refuses the request, or sampled a banned token.
        """
        shared, history, engine = self.resources, self.history, self._context.engine
        if shared.bridge.is_closed:
            raise LifecycleError(f"episode {self.id!r} has ended; nothing can be generated for it any more")
        request, cut_by = self._next_request()
        began, start = time.monotonic(), time.time()
        with self.lifecycle.during(EpisodeState.GENERATING), shared.asking(request):
            if self.stops:
                ended = await generate_until(engine, request, stops=self.stops, codec=self.codec)
            else:
                ended = Stopped(await engine.generate(request), None, 0)
        request.check_heeded(ended.completion)
        # Turns are numbered across all forks, in the order of completion; scores and spans refer to this number.
        index = len(shared.turns) if self._aside is None else self.aside_of
        message, text = history.read_completion(ended.completion.token_ids, turn=index)
        turn = history.add_turn(message, text, ended, index=index, cut_by=cut_by)
        turn.timings["start"], turn.timings["generate"] = start, time.monotonic() - began
        if self._aside is None:
            shared.turns.append(turn)
        else:
            shared.num_asides += 1
            shared.aside_tokens += turn.num_tokens
            if not self._aside.is_trained:
                self.weigh(turn, 0.0)
        logger.debug(
            "%s turn %d: %d tokens, %s: %.80r", self.id, index, turn.num_tokens, turn.finish_reason.value, turn.text
        )
        return turn

    def _next_request(self) -> tuple[GenerateRequest, StopReason]:
        """Return the next request to the engine, and the limit that sets its token budget.

        Raises:
            SchedulerError: `max_turns` is reached, or no tokens are left for another completion.
        """
        history, sampling, number = self.history, self.sampling, len(self.turns)
        at = history.progress(elapsed_s=self.elapsed_s)
        budget = limit_rules.budget(self.limits, at, ceiling=sampling.max_tokens)
        if budget.tokens < 1 or (self.limits.max_turns is not None and number >= self.limits.max_turns):
            raise SchedulerError(
                f"episode {self.id!r}: another turn was asked for at {number} turns and {at.context_tokens} tokens, where a "
                "limit ends the episode; await `prepare` before each `generate`, and end when it returns a reason"
            )
        turn_sampling = dataclasses.replace(
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
            sampling=turn_sampling,
            media=history.builder.media,
            routed_from=history.builder.num_routed,
        )
        return request, budget.cut_by

    # Further actions of a scheduler.

    def play_as(self, agent: str) -> None:
        """Set the agent's name, which its segments and rewards carry; call it before the first prompt is encoded.

        Raises:
            LifecycleError: the first prompt is already encoded.
        """
        if self.history.builder.is_open:
            raise LifecycleError(f"episode {self.id!r} has shown its prompt; name its agent in `on_trajectory_start`")
        self.history.play_as(agent)

    def sample_as(self, sampling: SamplingParams, *, stops: Sequence[str] = ()) -> None:
        """Set the sampling of the next turns, within the limits.

        Args:
            sampling: The parameters. If the temperature differs from the run's, the trainer's logprobs are not those of the
                distribution that was sampled from.
            stops: Stop strings. The token that completes one is the last of the turn; it is kept and trained.
        """
        self.sampling, self.stops = sampling, tuple(stops)

    def list_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """List `tools` (schemas in OpenAI's function form) instead of the task's in prompts rendered from now on."""
        self.history.encoder = self._context.encoder_listing(tools)
        self.listed_tools = tuple(tools)

    def mark(self) -> Mark:
        """Return a mark of the current position, to which `fork(at=…)` can return later; call it right after a turn."""
        return self.history.mark()

    @pauses_stretch
    async def call_tools(self, turn: OpenTurn) -> Reply:
        """Run the turn's tool calls; a failed call produces an observation like any other."""
        began = time.monotonic()
        with self.lifecycle.during(EpisodeState.TOOL_CALLING):
            turn.tool_results = await self.resources.tools.call(
                turn.message.tool_calls, messages=lambda: self.history.openai
            )
        turn.timings["tools"] = time.monotonic() - began
        for result in turn.tool_results:
            outcome = result.error or "answered"
            logger.debug("%s turn %d: %.80r %s: %.80r", self.id, turn.index, result.name, outcome, result.content)
            if result.reward is not None:
                key = f"tool/{result.name}"
                turn.scores[key] = turn.scores.get(key, 0.0) + result.reward
        return Reply(messages=as_messages(turn.tool_results))

    @pauses_stretch
    async def ask_partner(self, turn: OpenTurn) -> Reply:
        """Let the interaction answer the turn and score it.

        Raises:
            InteractionError: the interaction raised, was late, or returned an invalid answer.
        """
        interaction = self.resources.interaction
        if interaction is None:
            raise LifecycleError(f"task {self.task.id!r} has no interaction; check `has_partner` first")
        view = EpisodeView(self.id, self.seed, self.num_user_turns, self._speak)
        # Waiting for a person does not count for the time limit, unless the run sets `counts_people`.
        leaves_time = interaction.loaded.asks_person and not self.limits.counts_people
        began = time.monotonic()
        pause = self.resources.paused() if leaves_time else contextlib.nullcontext()
        with self.lifecycle.during(EpisodeState.INTERACTING), pause:
            answer = await interaction.reply(self.history.openai, view)
        turn.timings["interaction"] = time.monotonic() - began
        if answer.score is not None:
            turn.scores["interaction"] = answer.score
        message = Message(role="user", content=answer.content, origin=Origin.ENVIRONMENT)
        logger.debug("%s turn %d: interaction (score %s): %.80r", self.id, turn.index, answer.score, answer.content)
        return Reply(messages=(message,), is_done=answer.is_done, info=dict(answer.metadata))

    async def _speak(self, messages: Sequence[Mapping[str, Any]], options: SpeakOptions) -> Message:
        """Sample the next message after `messages` from the run's own model, as another agent (`ConversationView.speak`)."""
        label = options.agent
        speaker: Episode | None = self._speakers.get(label)
        if speaker is None:
            aside = Aside(label=label, seed=derive_seed(self.seed, "voice", label), is_trained=options.is_trained)
            speaker = self._speakers[label] = self.fork(agent=label, messages=messages, aside=aside)
            speaker.list_tools(())
        # The conversation's limits do not apply to an aside, except the context, which the model sets.
        speaker.limits = dataclasses.replace(
            speaker.limits, max_turns=None, max_user_turns=None, max_tokens=None, max_tokens_per_turn=options.max_tokens
        )
        speaker.sample_as(sampled_for(options, self.sampling))
        speaker.aside_of = self.turns[-1].index
        # A full rewrite, because the other side of the conversation reads it with the roles exchanged.
        speaker.rewrite(messages)
        if (limit := await speaker.prepare()) is not None:
            raise InteractionError(
                f"the run's own model cannot speak for {label!r} ({limit.value}): its prompt has "
                f"{speaker.count_tokens(messages)} tokens; raise rollout.limits.max_context, or shorten the persona"
            )
        return (await speaker.generate()).message

    def record(self, turn: OpenTurn, reply: Reply) -> StopReason | None:
        """Record the reply to the turn; unless it ends the episode, the next prompt contains its messages.

        Returns:
            Why the episode ends with this reply, or None: ENV_DONE if the reply says so, STOP if nothing follows the turn.

        Raises:
            SchedulerError: the reply has messages, but after `go_on` the next turn continues the turn's own message.
        """
        return self.history.record(turn, reply)

    def read(self, text: str, *, turn: OpenTurn) -> Message:
        """Parse `text` as the message of a turn, without encoding anything. It may begin with the turn's `said_before`."""
        before, own = turn.said_before, turn.own_before
        return self.history.read(text, turn=turn.index, own=own + text[len(before) :] if text.startswith(before) else None)

    def warn(self, text: str, *, reason: str) -> None:
        """Log a warning about this episode the first, tenth, hundredth … time that a reason occurs in the run."""
        level, again = self._context.counted(reason)
        logger.log(level, "%s: %s%s", self.id, text, again)

    def weigh(self, turn: OpenTurn, weights: ArrayLike) -> None:
        """Set the loss weights of a turn's sampled tokens: one for all, or one per token. Tokens with 0 are not trained."""
        self.history.weigh(turn, weights)

    def rewrite(self, messages: Sequence[Message | Mapping[str, Any]], *, goes_on: bool = False) -> Reply:
        """Replace the history by `messages`. A `step` may return the result, or messages that follow the new history.

        The next prompt is a full render. If it continues a segment token for token, it extends that segment; otherwise it
        opens a new segment, in which all earlier tokens are prompt. Before the first turn, the messages replace the prompt.

        Args:
            messages: The new history. A message keeps its origin (`Message.origin`), and so does a dict that equals a
                message of this history. Any other message without an origin counts as the environment's.
            goes_on: Whether the next turn continues the last message, which must be an assistant's.

        Raises:
            SchedulerError: `messages` is empty, or the last one cannot be continued.
        """
        history_edits.rewrite(self.history, self.history.typed(messages), goes_on=goes_on)
        return Reply(goes_on=True)

    def show_ids(self, ids: Ids | Sequence[int]) -> None:
        """Use exactly `ids` as the whole next prompt, for agents that encode their prompts themselves.

        If `ids` continue a segment token for token, they extend that segment; otherwise they open a new segment, in which
        all earlier tokens are prompt.
        """
        self.history.show_ids(np.asarray(ids, np.int32))

    def go_on(
        self, addition: str | Sequence[int] | Ids = "", *, keep: str | int | None = None, is_trusted: bool = False
    ) -> Reply:
        """Append `addition` to the last assistant message and let the next turn continue it. A `step` may return the result.

        A second call after the same turn replaces the addition of the first one, and may only keep what that one kept.
        The model sees `addition`, but it is not trained. Sampled tokens after the kept part are dropped; the metric
        `dropped_cut` counts them. The token that ended the turn is always dropped, because the message goes on.

            return episode.go_on(" But wait, that is wrong.", keep=turn.text.split("</think>")[0])

        Args:
            addition: A text, or ids.
            keep: The part of the last turn that stays: a prefix of its `text`, or a number of its tokens; None keeps it all.
            is_trusted: Whether the run's owner wrote the text, so that tags in it (a closing `</think>`) are control tokens;
                otherwise all of it is ordinary text.

        Raises:
            SchedulerError: there is no turn to continue, or its text does not begin with `keep`.
        """
        history_edits.go_on(self.history, addition, keep=keep, is_trusted=is_trusted)
        return Reply(goes_on=True)

    def fork(
        self,
        *,
        agent: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        at: Mark | None = None,
        aside: Aside | None = None,
        is_unanswered: bool = False,
    ) -> Episode:
        """Return a second run that continues independently from here, including the waiting messages.

        Its turns belong to the same trajectory. It shares tools, interaction and reward with this episode, so changes to
        their state are visible in both. Limits apply to each history separately. While only one fork continues a segment,
        its tokens extend that segment; any other fork opens a new segment, in which the tokens before the fork are prompt.
        So each sampled token is trained once. Forks may run concurrently.

        Args:
            agent: The name of another agent, whose history starts with `messages`; None continues as the same agent.
            messages: Replaces this history; required for another agent.
            at: An earlier position of this episode to continue from, instead of the current one.
            aside: Marks the fork as outside the conversation: the record has its tokens but not its turns.
            is_unanswered: Whether the fork drops the reply to its last turn; answer and `record` that turn first.

        Raises:
            LifecycleError: the episode does not have a prompt yet; call `prepare` first.
            SchedulerError: `agent` is set without `messages`.
        """
        shared = self.resources
        if not shared.is_started or not self.history.builder.is_open:
            raise LifecycleError(f"episode {self.id!r} cannot be forked before it has a prompt; call `prepare` first")
        if agent is not None and messages is None:
            raise SchedulerError(f"the agent {agent!r} needs messages of its own; pass its system and user message")
        number = len(shared.forks) + 1
        other = Episode(
            self._context,
            self.task,
            id=f"{shared.id}#{number}",
            seed=derive_seed(self.seed, "fork", number),
            sampling=self.sampling,
            limits=self.limits,
            history=self.history.fork(agent=agent, messages=messages, at=at),
            resources=shared,
        )
        other.stops, other.listed_tools = self.stops, self.listed_tools
        other._aside, other.aside_of = self._aside, self.aside_of
        if aside is not None:
            before = self.turns if agent is not None else other.turns
            if not before:
                raise SchedulerError(f"episode {self.id!r}: an aside belongs to a turn, and there is none yet")
            other._aside, other.aside_of, other.seed = aside, before[-1].index, aside.seed
            if agent is None:
                other.history.builder.rename(aside.label)
        if is_unanswered:
            # The state after a completion, in which tools and interaction may be called.
            sampled = other.history.sampled_spans(other.turns[-1])
            other.turns[-1] = other.turns[-1].unanswered(sampled=sampled)
            other.lifecycle.move(EpisodeState.GENERATING)
        shared.forks.append(Fork(other.id, other.history, other.lifecycle))
        return other

    def wait(self, awaitable: Awaitable[_Result]) -> _Result:
        """Wait for an async method from a scheduler's plain method: `turn = episode.wait(episode.generate())`.

        Raises:
            SchedulerError: the caller runs on the event loop, which would then wait for itself.
            LifecycleError: the episode has ended.
        """
        return self.resources.bridge.wait(awaitable, of=self.id)

    def guarded(self, scheduler: Scheduler, method: Any, **options: Any) -> Callable[..., Any]:
        """Return a scheduler's method: unchanged if it is the library's, wrapped with its deadline if an author wrote it."""
        return self._context.calls.guarded(method, is_shared=scheduler.shared, **options)

    async def call(self, scheduler: Scheduler, method: Any, *args: Any, **options: Any) -> Any:
        """Call a scheduler's method, plain or async, with the deadlines of `AuthorCalls.call`.

        Raises:
            SchedulerError: the method missed its deadline or raised an error that is not a `PolyturnError`.
        """
        return await self._context.calls.call(method, *args, is_shared=scheduler.shared, **options)
