"""Episode: a live run of one task, which a scheduler reads and acts through.

The scheduler decides; the episode does: it asks the engine, lets tools and interaction answer, and keeps the record. What
the model is shown next is encoded when the next generation needs it, so a reply that nothing follows is never encoded.

    prepare -> generate -> (call_tools | ask_partner) -> record -> prepare -> generate -> …
    rewrite          edits the history          go_on    continues the same assistant message
    fork             a second run from here, of the same agent or of another; its turns belong to the same trajectory

It is one `History`, of which each fork has its own, and one set of `Resources`, which all forks share.
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
from polyturn.interactions.context import SpeakOptions
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
    """A live run of one task, or a fork of one: what a scheduler sees and acts through."""

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
        """Begin a run of `task`, in which nothing has been started yet; `run_episode` says what the arguments mean.

        A fork brings its history and the resources that it shares.
        """
        self.id = id
        self.task = task
        self.given_reward: GivenReward | None = None
        """The reward that the scheduler gives, in place of the run's reward functions; None leaves it to them."""
        self.lifecycle = Lifecycle(context.running)
        """Its state."""
        self.limits = limits or context.limits
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
        self.history = history or History(
            context.encoder_for(task), context.parser, task.prompt, renders_history=context.renders_history
        )
        """Its messages and tokens, for who runs it and watches it."""
        self.resources = resources or Resources(context, task, id=id)
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
        """Return the length of a history's prompt in tokens, for policies with a budget; `tools` replace its own."""
        typed = self.history.typed(messages)
        if tools is None:
            return self.history.length_of(typed)
        return len(self._context.encoder_listing(tools).start(typed))

    # The way of a turn.

    @pauses_stretch
    async def prepare(self) -> StopReason | None:
        """Encode what waits to be shown, and show it; the first time, create the tools and start the interaction before.

        Returns:
            The limit that forbids another generation; None if none does. What is shown first is shown all the same.

        Raises:
            ToolStartError: a tool could not be created.
            InteractionError: the interaction could not be started.
            TemplateError: the template cannot render what waits.
            SchedulerError: it cannot render the history that the scheduler wrote.
            DataError: what is shown first has more characters than the context can hold.
        """
        shared, history = self.resources, self.history
        is_first = not shared.is_started
        if is_first:
            if message := await shared.start():
                history.set_prompt([*history.messages, *message])
        elif shared.on_turn is not None:
            await shared.on_turn()
        await self.process_media(history.to_encode)
        num_chars = count_chars(history.to_encode)
        if limit_rules.exceeds_context(self.limits, num_chars=num_chars, longest_token=self.codec.longest_token):
            if is_first:  # a task that cannot begin is wrong; an observation that does not fit is a truncation
                raise DataError(
                    f"the prompt has {num_chars} characters, more than a context of {self.limits.max_context} tokens holds"
                )
            logger.debug(_LIMIT, self.id, StopReason.CONTEXT_FULL.value, len(history.turns))
            return StopReason.CONTEXT_FULL
        # A long text takes seconds to encode, in which the event loop serves the other episodes.
        prompt = await asyncio.to_thread(history.next_prompt) if num_chars > LONG_CHARS else history.next_prompt()
        if is_first:
            history.show(prompt)  # before the limits, so that a record has its prompt even where no turn fits
            if shared.on_turn is not None:
                await shared.on_turn()
            tools = shared.tools.names
            logger.debug("%s starts: task %s, %d prompt tokens, tools %s", self.id, self.task.id, prompt.length, tools)
        at = history.progress(elapsed_s=self.elapsed_s, prompt=prompt)
        reason = limit_rules.reached(self.limits, at)
        # No other limit is moved by a shorter history.
        may_shorten = reason in (None, StopReason.CONTEXT_FULL) and limit_rules.is_short_of_room(self.limits, at)
        if may_shorten and history_edits.shorten_to_fit(history, self.limits):
            return None
        if reason is not None:
            logger.debug(_LIMIT, self.id, reason.value, len(history.turns))
        elif not is_first:  # where a limit ends the episode nothing follows, so what waits is never shown
            history.show(prompt)
        return reason

    async def process_media(self, messages: Sequence[Message]) -> None:
        """Process the media of messages in a thread, so that the event loop need not do it when they are encoded.

        Raises:
            DataError: it cannot.
        """
        if self._context.media is not None:
            await self._context.media.prepare(messages)

    @pauses_stretch
    async def generate(self) -> OpenTurn:
        """Sample one completion, keep it as it was sampled, and read it as a message.

        Raises:
            LifecycleError: the episode has ended.
            SchedulerError: a limit forbids another turn, as `prepare` would have said.
            EngineError: the engine is lost, refuses the request, or sampled what it must not.
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
        # Numbered over all forks, in the order of their completions: scores and spans are found by this number.
        index = len(shared.turns) if self._aside is None else self.aside_of
        message, text = history.read_completion(ended.completion.token_ids, turn=index)
        turn = history.sample(message, text, ended, index=index, cut_by=cut_by)
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
        """Return the next request to the engine, and the limit that gives it its budget.

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
        generate_request = dataclasses.replace(
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
            sampling=generate_request,
            media=history.builder.media,
            routed_from=history.builder.num_routed,
        )
        return request, budget.cut_by

    # What a scheduler may do beside.

    def play_as(self, agent: str) -> None:
        """Name the agent before the prompt is shown; its segments and rewards carry the name.

        Raises:
            LifecycleError: the prompt is shown.
        """
        if self.history.builder.is_open:
            raise LifecycleError(f"episode {self.id!r} has shown its prompt; name its agent in `on_trajectory_start`")
        self.history.play_as(agent)

    def sample_as(self, sampling: SamplingParams, *, stops: Sequence[str] = ()) -> None:
        """Set how the next turns are sampled, within the limits.

        Args:
            sampling: Where the temperature is not the run's, the trainer's logprobs are not those of what was sampled.
            stops: Texts with which a turn ends. The token that completes one is the turn's last; it is kept and trained.
        """
        self.sampling, self.stops = sampling, tuple(stops)

    def list_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Let prompts that are rendered from now on list `tools`, schemas in OpenAI's function form, and not the task's."""
        self.history.encoder = self._context.encoder_listing(tools)
        self.listed_tools = tuple(tools)

    def mark(self) -> Mark:
        """Return a mark of the present position, right behind a turn; `fork(at=…)` continues from it."""
        return self.history.mark()

    @pauses_stretch
    async def call_tools(self, turn: OpenTurn) -> Reply:
        """Run the turn's tool calls; a call that fails is an observation like any other."""
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
            InteractionError: it raised, was late, or answered something that cannot be understood.
        """
        interaction = self.resources.interaction
        if interaction is None:
            raise LifecycleError(f"task {self.task.id!r} has no interaction; ask `has_partner` first")
        view = EpisodeView(self.id, self.seed, self.num_user_turns, self._speak)
        # A person's time is none of the episode's, unless the run counts it.
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
        """Let the run's own model go on with `messages`, under another agent's name; `ConversationView.speak`."""
        label = options.agent
        speaker: Episode | None = self._speakers.get(label)
        if speaker is None:
            aside = Aside(label=label, seed=derive_seed(self.seed, "voice", label), is_trained=options.is_trained)
            speaker = self._speakers[label] = self.fork(agent=label, messages=messages, aside=aside)
            # The limits of the conversation are not its own; the context is, which the model's size sets.
            speaker.limits = dataclasses.replace(
                speaker.limits, max_turns=None, max_user_turns=None, max_tokens=None, max_tokens_per_turn=options.max_tokens
            )
            speaker.sample_as(sampled_for(options, self.sampling))
            speaker.list_tools(())
        speaker.aside_of = self.turns[-1].index
        # Rewritten, because the other side of a conversation reads it with the roles exchanged.
        speaker.rewrite(messages)
        if (limit := await speaker.prepare()) is not None:
            raise InteractionError(
                f"the run's own model cannot speak for {label!r} ({limit.value}): its prompt has "
                f"{speaker.count_tokens(messages)} tokens; raise rollout.limits.max_context, or shorten the persona"
            )
        return (await speaker.generate()).message

    def record(self, turn: OpenTurn, reply: Reply) -> None:
        """Keep what answered the turn; unless it ended the episode, the model is shown it before it speaks again.

        Raises:
            SchedulerError: the turn's message is to go on, which messages cannot answer as well.
        """
        self.history.record(turn, reply)

    def read(self, text: str, *, turn: OpenTurn) -> Message:
        """Return a text as the message that a turn with it would have; nothing becomes tokens."""
        return self.history.read(text, turn=turn.index)

    def weigh(self, turn: OpenTurn, weights: ArrayLike) -> None:
        """Set the loss weights of a turn's sampled tokens, one for all or one per token; 0 leaves one out of the loss."""
        self.history.weigh(turn, weights)

    def rewrite(self, messages: Sequence[Message | Mapping[str, Any]], *, goes_on: bool = False) -> Reply:
        """Replace the history by `messages`; a `step` returns what this returns, or messages to be shown behind them.

        The next prompt is a full render. It extends the segment that it continues token for token, or opens a new one, in
        which everything that was sampled before is prompt. Before the first turn, the messages replace the prompt.

        Args:
            messages: The new history. Who wrote a message stays with it (`Message.origin`), also where a dict says what a
                message of this history says; what is new, and says nothing of it, is encoded as the environment's words.
            goes_on: The last message is an assistant's and the next turn continues it, whatever the model said before.

        Raises:
            SchedulerError: there is no message, or the last one cannot go on.
        """
        history_edits.rewrite(self.history, self.history.typed(messages), goes_on=goes_on)
        return Reply(goes_on=True)

    def show_ids(self, ids: Ids | Sequence[int]) -> None:
        """Let the next turn go on from exactly `ids`, the whole prompt: for agents that write their prompts themselves.

        `prepare` shows them. They extend the segment that they continue token for token, or open a new one, in which
        everything that was sampled before is prompt.
        """
        self.history.show_ids(np.asarray(ids, np.int32))

    def go_on(
        self, addition: str | Sequence[int] | Ids = "", *, keep: str | int | None = None, is_trusted: bool = False
    ) -> Reply:
        """Let the next turn continue the last assistant message behind `addition`; a `step` returns what this returns.

        `addition` is seen by the model and not trained. Sampled tokens behind what is kept are dropped and counted, the
        token that ended the turn always: the message has not ended.

            return episode.go_on(" But wait, that is wrong.", keep=turn.text.split("</think>")[0])

        Args:
            addition: A text, or ids.
            keep: What stays of the last turn: a beginning of its `text`, or a number of its tokens; None keeps all of it.
            is_trusted: Whether the run's owner wrote the text, so that tags in it are meant as such (a closing `</think>`);
                else all of it is ordinary text.

        Raises:
            SchedulerError: there is no turn to continue, or it does not begin with what is to be kept.
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
        """Return a second run that goes on from here by itself, with what waits to be shown; drive it as this one.

        Its turns belong to the same trajectory, and it shares tools, interaction and reward with it: what a call of one
        changes, the others see. Limits hold along its own history. Its tokens go into the same segment as long as it
        continues it alone; else into a segment of its own, in which the tokens before the fork are prompt: each sampled
        token is trained once. Forks may run at the same time.

        Args:
            agent: The name of another agent, whose history begins with `messages`; None is the same agent.
            messages: The history instead of this one's; needed for another agent.
            at: A place where this episode stood, instead of where it stands now.
            aside: It is not part of the conversation: its tokens are in the record, its turns are not.
            is_unanswered: What answered the turn that it goes on from is not its own; answer and `record` that turn first.

        Raises:
            LifecycleError: the episode has no prompt yet; `prepare` it first.
            SchedulerError: another agent without messages.
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
            # As behind a completion, which is where tools and interaction may be called from.
            sampled = other.history.sampled_spans(other.turns[-1])
            other.turns[-1] = other.turns[-1].unanswered(sampled=sampled)
            other.lifecycle.move(EpisodeState.GENERATING)
        shared.forks.append(Fork(other.id, other.history, other.lifecycle))
        return other

    def wait(self, awaitable: Awaitable[_Result]) -> _Result:
        """Wait, in a plain method of a scheduler, for one of the async methods: `turn = episode.wait(episode.generate())`.

        Raises:
            SchedulerError: it was called on the event loop, which would then wait for itself.
            LifecycleError: the episode has ended.
        """
        return self.resources.bridge.wait(awaitable, of=self.id)

    def guarded(self, scheduler: Scheduler, method: Any, **options: Any) -> Callable[..., Any]:
        """Return a callable for a scheduler's method: our own itself, its author's with deadlines."""
        return self._context.calls.guarded(method, is_shared=scheduler.shared, **options)

    async def call(self, scheduler: Scheduler, method: Any, *args: Any, **options: Any) -> Any:
        """Call a method that the scheduler's author wrote, plain or async; `AuthorCalls.call` says with which deadlines.

        Raises:
            SchedulerError: it raised something that is not of the library, or was late.
        """
        return await self._context.calls.call(method, *args, is_shared=scheduler.shared, **options)
