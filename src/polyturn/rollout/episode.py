"""Episode: a live run of one task, which a scheduler reads and acts through.

The scheduler decides; the episode does: it asks the engine, lets the environment answer, and keeps the record. What the
model is shown next is encoded when the next generation needs it, so a reply that nothing follows is never encoded.

    prepare -> generate -> (call_tools | ask_partner) -> record -> prepare -> generate -> …
    rewrite          edits the history          go_on    continues the same assistant message
    fork             a second run from here, of the same agent or of another; its turns belong to the same trajectory

How it does it is elsewhere: `conversation` (history, turns, limits), of which each fork has its own, and `backstage`, which
all forks share: tools and interaction, the engine, threads that wait, the record, the journal.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from polyturn.core.arrays import Ids
from polyturn.core.errors import LifecycleError, SchedulerError
from polyturn.core.generation import SamplingParams
from polyturn.core.lifecycle import Lifecycle, RequestState, StopReason
from polyturn.core.messages import Message
from polyturn.core.own_time import not_own_time
from polyturn.core.seeds import derive_seed
from polyturn.core.task import Task
from polyturn.core.trajectory import Span, SpanRef, Trajectory
from polyturn.rollout import event_log
from polyturn.rollout import limits as limit_rules
from polyturn.rollout.asking import next_request, refuse_banned
from polyturn.rollout.backstage import Backstage
from polyturn.rollout.context import RolloutContext
from polyturn.rollout.conversation import EpisodeHistory, EpisodeMark
from polyturn.rollout.conversation_view import Aside, EpisodeView
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import GivenReward, MultiTurnScheduler, Reply
from polyturn.rollout.token_check import check_tokens
from polyturn.rollout.tool_branches import ToolBranch
from polyturn.rollout.transcript import Transcript
from polyturn.tokens.codec import Codec

_Result = TypeVar("_Result")


class Episode:
    """A live run of one task, or a fork of one: what a scheduler sees and acts through.

    Its own is the conversation; environment, requests and record it shares with its forks.
    """

    def __init__(
        self, context: RolloutContext, task: Task, *, id: str, seed: int = 0, sampling: SamplingParams | None = None
    ) -> None:
        """Begin a run of `task`, in which nothing has been started yet; `run_episode` says what the arguments mean."""
        self.id = id
        self.task = task
        self.given_reward: GivenReward | None = None
        """What the scheduler says the episode is worth, in place of the run's reward functions; None leaves it to them."""
        self.lifecycle = Lifecycle()
        """Which state it is in."""
        self.limits = context.limits
        """How far it may go; a scheduler that drives a fork may give it limits of its own."""
        self.listed_tools: tuple[Mapping[str, Any], ...] | None = None
        """The tools that prompts list in place of the task's; None for the task's."""
        self.aside_of = -1
        """The turn that an aside belongs to, by its index."""
        self.voices: dict[str, Episode] = {}
        """Who speaks with the run's own model in this conversation, by name."""
        self._context = context
        self._seed = seed
        self._sampling = sampling or context.sampling
        self._stops: tuple[str, ...] = ()
        self._aside: Aside | None = None
        self._tools: ToolBranch | None = None
        """Of a fork: its own tools; None where it has all in common with the episode."""
        encoder = context.encoder_for(task)
        transcript = Transcript(encoder, context.parser, task.prompt, renders_history=context.renders_history)
        self._conversation = EpisodeHistory(transcript, context.codec)
        self.backstage = Backstage(context, task, id=id)
        """What it shares with its forks, for who runs it and watches it; a scheduler needs none of it."""

    # What a scheduler reads.

    @property
    def seed(self) -> int:
        """What every random choice in this conversation follows from."""
        return self._seed

    @property
    def turns(self) -> list[OpenTurn]:
        """The turns of this episode, and those that it had when it was forked."""
        return self._conversation.turns

    @property
    def num_user_turns(self) -> int:
        """How many replies of the interaction this conversation has had."""
        return self._conversation.num_user_turns

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began that count for its time limit; the time between two processes does not."""
        return self.backstage.record.clock.elapsed_s

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as the model is shown it."""
        return self._conversation.transcript.messages

    @property
    def prompt(self) -> tuple[Message, ...]:
        """What the model is shown first: the task's prompt, unless a plug-in changed it."""
        return self.backstage.record.prompt or self.task.prompt

    @property
    def agent(self) -> str:
        """Whose history this is."""
        return self._conversation.transcript.builder.agent

    @property
    def has_partner(self) -> bool:
        """Whether the task's row names an interaction."""
        return self.backstage.environment.has_partner

    @property
    def shows_media(self) -> bool:
        """Whether messages may show images and other media."""
        return self._context.media is not None

    @property
    def codec(self) -> Codec:
        """The tokenizer and the chat template of the run."""
        return self._context.codec

    @property
    def sampling(self) -> SamplingParams:
        """How its turns are sampled, within the limits."""
        return self._sampling

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts with which a turn ends."""
        return self._stops

    @property
    def context_ids(self) -> Ids:
        """[T] the ids that the model has been shown and has written so far, read-only."""
        return self._conversation.transcript.context

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the task may call, in OpenAI's function form."""
        return self._context.tools.schemas_of(self.task)

    def count_tokens(
        self, messages: Sequence[Message | Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> int:
        """Return how many tokens the prompt of a history has, for policies with a budget; `tools` replace its own."""
        typed = self._conversation.transcript.typed(messages)
        if tools is None:
            return self._conversation.transcript.length_of(typed)
        return len(self._context.encoder_listing(tools).start(typed))

    # What a scheduler does.

    async def start(self) -> None:
        """Create the tools, start the interaction, and show the model its prompt; the first `prepare` does it.

        Raises:
            ToolStartError: a tool could not be created.
            InteractionError: the interaction could not be started.
            TemplateError: the template cannot render the prompt.
        """
        shared, transcript = self.backstage, self._conversation.transcript
        shared.is_started = True
        transcript.extend_prompt(await shared.environment.start())
        shared.record.prompt = transcript.messages
        await self.process_media(transcript.waiting)
        prompt = transcript.next_prompt()
        transcript.show(prompt, turn=-1)
        shared.record.prompt_tokens = prompt.length
        if shared.flight is not None:
            await shared.flight.begin(self)
        if event_log.is_on():
            event_log.start(self, num_tokens=prompt.length)

    @not_own_time
    async def prepare(self) -> StopReason | None:
        """Encode what waits to be shown, and show it; the first time, `start`.

        Returns:
            The limit that forbids another generation; None if none does.

        Raises:
            TemplateError: the template cannot render what waits.
            SchedulerError: it cannot render the history that the scheduler wrote.
        """
        if not self.backstage.is_started:
            await self.start()
        elif self.backstage.flight is not None:
            await self.backstage.flight.keep(self)
        conversation = self._conversation
        await self.process_media(conversation.transcript.waiting)
        prompt = conversation.transcript.next_prompt()
        at = conversation.progress(elapsed_s=self.elapsed_s, prompt=prompt)
        reason = limit_rules.reached(self.limits, at)
        may_shorten = reason in (None, StopReason.CONTEXT_FULL) and limit_rules.is_short_of_room(self.limits, at)
        if may_shorten and conversation.shorten(self.limits):
            return None
        if reason is None:
            conversation.show(prompt)
        elif event_log.is_on():
            event_log.limited(self, reason)
        return reason

    async def process_media(self, messages: Sequence[Message]) -> None:
        """Let the model's processor look at the media of messages, which no event loop then waits for.

        Raises:
            DataError: it cannot.
        """
        if self._context.media is not None:
            await self._context.media.prepare(messages)

    @not_own_time
    async def generate(self) -> OpenTurn:
        """Let the model speak: one completion, kept as it was sampled, and the message that it reads as.

        Raises:
            LifecycleError: the episode has ended.
            SchedulerError: a limit forbids another turn, as `prepare` would have said.
            EngineError: the engine is lost, refuses the request, or sampled what it must not.
        """
        shared = self.backstage
        if shared.bridge.is_closed:
            raise LifecycleError(f"episode {self.id!r} has ended; nothing can be generated for it any more")
        request, cut_by = next_request(
            self._context,
            self._conversation,
            limits=self.limits,
            sampling=self._sampling,
            id=self.id,
            seed=self._seed,
            elapsed_s=self.elapsed_s,
        )
        self.lifecycle.move(RequestState.GENERATING)
        began, start = time.monotonic(), time.time()
        with self.lifecycle.generating():
            ended = await shared.asking.ask(request, stops=self._stops)
        shared.record.num_cut += ended.num_dropped
        refuse_banned(ended.completion, request.sampling)
        index = len(shared.record.turns) if self._aside is None else self.aside_of
        turn = self._conversation.sample(ended, index=index, cut_by=cut_by)
        turn.timings["start"], turn.timings["generate"] = start, time.monotonic() - began
        if self._aside is None:
            shared.record.turns.append(turn)
        else:
            shared.record.num_asides += 1
            shared.record.aside_tokens += turn.num_tokens
            if not self._aside.is_trained:
                self.weigh(turn, 0.0)
        if event_log.is_on():
            event_log.sampled(self, turn)
        return turn

    def play_as(self, agent: str) -> None:
        """Give its agent a name, before the prompt is shown; segments and their rewards go by it.

        Raises:
            LifecycleError: the prompt is shown.
        """
        builder = self._conversation.transcript.builder
        if builder.is_open:
            raise LifecycleError(f"episode {self.id!r} has shown its prompt; name its agent in `on_trajectory_start`")
        builder.agent = agent

    def sample_as(self, sampling: SamplingParams, *, stops: Sequence[str] = ()) -> None:
        """Sample the next turns like this, within the limits.

        Args:
            sampling: Where the temperature is not the run's, the trainer's logprobs are not those of what was sampled.
            stops: Texts with which a turn ends. The token that completes one is the turn's last; it is kept and trained.
        """
        self._sampling, self._stops = sampling, tuple(stops)

    def list_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Let prompts that are rendered from now on list `tools`, schemas in OpenAI's function form, and not the task's."""
        self.listed_tools = tuple(tools)
        self._conversation.transcript.list_tools(self._context.encoder_listing(tools))

    def mark(self) -> EpisodeMark:
        """Return where the episode stands, right behind a turn; `fork(at=…)` goes on from there whatever came since."""
        return self._conversation.mark()

    @not_own_time
    async def mark_with_tools(self) -> EpisodeMark:
        """Return where the episode stands, with what its tools keep there: for forks that go on from it later.

        Raises:
            SnapshotError: a tool's `snapshot` raised or was late.
        """
        return self._conversation.mark()._replace(tools=await self.backstage.environment.tool_states(self._tools))

    @not_own_time
    async def call_tools(self, turn: OpenTurn) -> Reply:
        """Run the turn's tool calls; a call that fails is an observation like any other."""
        self.lifecycle.move(RequestState.TOOL_CALLING)
        reply = await self.backstage.environment.call_tools(
            turn, lambda: self._conversation.transcript.openai, branch=self._tools
        )
        if event_log.is_on():
            event_log.tools_answered(self, turn)
        return reply

    @not_own_time
    async def ask_partner(self, turn: OpenTurn) -> Reply:
        """Let the interaction answer the turn and score it.

        Raises:
            InteractionError: it raised, was late, or answered something that cannot be understood.
        """
        if self.has_partner:  # without one, the environment says what is wrong
            self.lifecycle.move(RequestState.INTERACTING)
        messages = self._conversation.transcript.openai
        leaves_time = self.backstage.environment.asks_person and not self.limits.counts_people
        with self.backstage.record.clock.still() if leaves_time else contextlib.nullcontext():
            reply = await self.backstage.environment.ask_partner(turn, messages, EpisodeView(self))
        if event_log.is_on():
            event_log.partner_answered(self, turn, reply)
        return reply

    def record(self, turn: OpenTurn, reply: Reply) -> None:
        """Keep what answered the turn; unless it ended the episode, the model is shown it before it speaks again.

        Raises:
            SchedulerError: the turn's message is to go on, which messages cannot answer as well.
        """
        self._conversation.record(turn, reply)

    def read(self, text: str, *, turn: OpenTurn) -> Message:
        """Return a text as the message that a turn with it would have; nothing becomes tokens."""
        return self._conversation.transcript.read(text, turn=turn.index)

    def weigh(self, turn: OpenTurn, weights: ArrayLike) -> None:
        """Set the loss weights of a turn's sampled tokens, one for all or one per token; 0 leaves one out of the loss."""
        self._conversation.weigh(turn, weights)

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
        transcript = self._conversation.transcript
        transcript.rewrite(transcript.typed(messages), goes_on=goes_on)
        return Reply(goes_on=True)

    def show_ids(self, ids: Ids | Sequence[int]) -> None:
        """Let the next turn go on from exactly `ids`, the whole prompt: for agents that write their prompts themselves.

        `prepare` shows them. They extend the segment that they continue token for token, or open a new one, in which
        everything that was sampled before is prompt.
        """
        self._conversation.transcript.show_ids(np.asarray(ids, np.int32))

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
        dropped = self._conversation.go_on(addition, keep=keep, is_trusted=is_trusted)
        self.backstage.record.num_cut += dropped
        return Reply(goes_on=True)

    def fork(
        self,
        *,
        agent: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        at: EpisodeMark | None = None,
        aside: Aside | None = None,
        is_unanswered: bool = False,
    ) -> Episode:
        """Return a second run that goes on from here by itself, with what waits to be shown; drive it as this one.

        Its turns belong to the same trajectory, and it shares interaction and reward with it. Of tools that can be
        snapshotted, a fork of the same agent has its own, which stand where this episode's do when the fork first calls one,
        or where they stood `at` a mark with tools; it shares the others, and another agent shares all. Limits hold along its
        own history. Its tokens go into the same segment as long as it continues it alone; else into a segment of its own, in
        which the tokens before the fork are prompt: each sampled token is trained once. Forks may run at the same time.

        Args:
            agent: The name of another agent, whose history begins with `messages`; None is the same agent.
            messages: The history instead of this one's; needed for another agent.
            at: A place where this episode stood, instead of where it stands now.
            aside: It is no part of the conversation: its tokens are in the record, its turns are not.
            is_unanswered: What answered the turn that it goes on from is not its own; answer and `record` that turn first.

        Raises:
            LifecycleError: the episode has no prompt yet; `prepare` it first.
            SchedulerError: another agent without messages.
        """
        if not self.backstage.is_started or not self._conversation.transcript.builder.is_open:
            raise LifecycleError(f"episode {self.id!r} cannot be forked before it has a prompt; call `prepare` first")
        if agent is not None and messages is None:
            raise SchedulerError(f"the agent {agent!r} needs messages of its own; pass its system and user message")
        number = len(self.backstage.forks) + 1
        other = copy.copy(self)
        other.id = f"{self.backstage.id}#{number}"
        other.lifecycle = Lifecycle()
        other._seed = derive_seed(self._seed, "fork", number)
        other._conversation = self._conversation.fork(agent=agent, messages=messages, at=at)
        other.voices = {}
        if agent is None:
            states = None if at is None else at.tools
            other._tools = self.backstage.environment.branch(other.id, above=self._tools, states=states)
        if aside is not None:
            before = self.turns if agent is not None else other.turns
            if not before:
                raise SchedulerError(f"episode {self.id!r}: an aside belongs to a turn, and there is none yet")
            other._aside, other.aside_of, other._seed = aside, before[-1].index, aside.seed
            if agent is None:
                other._conversation.transcript.builder.rename(aside.label)
        if is_unanswered:
            other.turns[-1] = other.turns[-1].unanswered()
            other.lifecycle.move(RequestState.GENERATING)
        self.backstage.forks.append(other)
        return other

    def wait(self, awaitable: Awaitable[_Result]) -> _Result:
        """Wait, in a plain method of a scheduler, for one of the async methods: `turn = episode.wait(episode.generate())`.

        Raises:
            SchedulerError: it was called on the event loop, which would then wait for itself.
            LifecycleError: the episode has ended.
        """
        return self.backstage.bridge.wait(awaitable, of=self.id)

    async def call(self, scheduler: MultiTurnScheduler, method: Any, *args: Any, **options: Any) -> Any:
        """Call a method that the scheduler's author wrote, plain or async; `AuthorCalls.call` says with which deadlines.

        Raises:
            SchedulerError: it raised something that is not of the library, or was late.
        """
        return await self._context.calls.call(method, *args, is_shared=scheduler.shared, **options)

    # What `run_episode` and a journal do.

    def state(self) -> dict[str, Any]:
        """Return all that it holds but its turns and plug-ins, for `restore`: behind a turn, without forks."""
        return {**self._conversation.state(), **self.backstage.record.state(), "stops": self._stops}

    def restore(self, state: Mapping[str, Any], turns: Callable[[Callable[[SpanRef], Span]], Sequence[OpenTurn]]) -> None:
        """Stand where the episode stood that `state` was taken of; its plug-ins are restored by themselves.

        Args:
            state: What `state` returned.
            turns: Gives the turns, once it is told how to find their spans.
        """
        self._conversation.restore(state, turns)
        self.backstage.record.restore(state, self.turns)
        self.backstage.is_started = True
        self._stops = tuple(state["stops"])

    def end(self, state: RequestState) -> None:
        """Move to the state that ends it, forks included."""
        self.lifecycle.move(state)
        for fork in self.backstage.forks:
            if state is RequestState.COMPLETED:
                fork.lifecycle.move(RequestState.SCORING)
            fork.lifecycle.move(state)
        self.backstage.forks.clear()  # each of them holds what they share

    def trajectory(
        self, stop_reason: StopReason, *, error: str | None = None, extra: Mapping[str, float] | None = None
    ) -> Trajectory:
        """Return the record of the episode, without its reward.

        Args:
            stop_reason: Why it ended.
            error: What failed, where something did.
            extra: Further metrics.
        """
        transcript, record = self._conversation.transcript, self.backstage.record
        metrics = record.metrics(num_forks=len(self.backstage.forks), context_tokens=transcript.num_tokens)
        return record.trajectory(
            self.task,
            id=self.id,
            segments=transcript.builder.build(),
            stop_reason=stop_reason,
            error=error,
            metrics={**metrics, **(extra or {})},
        )

    def check_tokens(self) -> dict[str, float]:
        """Compare the held ids with a full render of the same messages, if it is this episode's turn; return metrics.

        A history that was rewritten or rendered holds full renders by construction and is not compared.
        """
        if not self.backstage.record.turns or not self._context.is_sanity_due():
            return {}
        spoken = [e._conversation.transcript for e in (self, *self.backstage.forks) if e.turns]
        return check_tokens(self._context, spoken, where=self.id)
