"""AgentSession: turns the requests of an agent that owns its loop into turns of one episode.

A request holds a whole history. If it repeats the history of an earlier turn message for message, the request continues the
turn: only the new messages are encoded, after the sampled tokens, like a scheduler's reply. Any other history is rendered
whole; it extends the longest segment that it repeats token for token, or opens a new one. Histories are never repaired.

    [s, u]                    a conversation opens              segment 0: s u | a0
    [s, u, a0, tool]          continues a0                      segment 0: s u | a0 | tool | a1
    [s, u, a0, other tool]    continues a0 again                segment 1: s u a0 other tool | a1'     (a branch)
    [s', u']                  another agent's, or an edit       segment 2: s' u' | …

The loop `MultiTurnScheduler.run` drives every history: its `step` sends the completion to the agent and waits for the
request that continues it. The loop also enforces limits and records turns. Concurrent requests are forks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polyturn.core.errors import DataError, PolyturnError, SchedulerError, TemplateError, one_line, raised_at
from polyturn.core.generation import FinishReason, SamplingParams
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.seeds import derive_seed
from polyturn.core.trajectory import CUT_BY_REQUEST
from polyturn.infra.aio import first_error
from polyturn.rollout.episode import Episode
from polyturn.rollout.history import Mark
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import GivenReward, MultiTurnScheduler, Reply
from polyturn.serving.openai.chat_request import BadRequest, ChatRequest, ChatResponse, key_of
from polyturn.serving.openai.turns import refuse_too_long, response_of, typed_messages, unrenderable


class _Node:
    """One message in the tree of all histories; its ancestors are the messages before it."""

    __slots__ = ("children", "turns")

    def __init__(self) -> None:
        self.children: dict[tuple[Any, ...], _Node] = {}
        self.turns: list[_AfterTurn] = []
        """The turns whose completion is this message."""


@dataclasses.dataclass(slots=True, eq=False)
class _Conversation:
    """One history that the loop drives."""

    episode: Episode
    ask: ChatRequest
    node: _Node
    reply: asyncio.Future[ChatResponse] | None
    """The reply that the agent waits for; None while the loop waits for the agent."""
    task: asyncio.Task[None] | None = None
    waiting_after: _AfterTurn | None = None
    """The turn after which the loop waits."""
    next_request: asyncio.Future[Reply] | None = None
    """The agent's next request, while the loop waits for it."""


@dataclasses.dataclass(slots=True, eq=False)
class _AfterTurn:
    """The point right after a turn, where a request can continue."""

    conversation: _Conversation
    mark: Mark
    calls: Mapping[str, str]
    """Call id -> tool name, of the turn's calls."""


class _Begun(NamedTuple):
    """A request that is being answered, with its own reply: the conversation may already wait for a later one."""

    conversation: _Conversation
    reply: asyncio.Future[ChatResponse]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """The limits of an agent's requests."""

    samples_as_asked: bool = False
    """Whether a request's temperature, top_p and top_k are used. Training needs the run's values."""
    max_calls: int = 1000
    """Largest number of completions of one episode, over all its histories."""


class AgentSession:
    """An episode that is driven by requests."""

    def __init__(self, scheduler: MultiTurnScheduler, episode: Episode, rules: SessionRules) -> None:
        self.id = episode.id
        self.rules = rules
        self.ended: str | None = None
        """Why the session has ended; None while it accepts requests."""
        self.num_calls = 0
        """Number of completions so far, including those that are being sampled."""
        self.has_requests = False
        self._last_used = time.monotonic()
        self._scheduler = scheduler
        self._episode = episode
        self._sampling = episode.sampling
        self._tries: dict[str, _Node] = {}
        self._conversations: dict[str, _Conversation] = {}
        self._group: asyncio.TaskGroup | None = None
        self._has_root = False
        self._is_ready = asyncio.Event()
        self._over: StopReason | None = None
        """The limit that cut the latest completion; None if it was complete."""
        self._is_refused = False
        """Whether a limit of the run refused the latest request or cut its completion."""
        self._is_aborted = False

    @property
    def idle_s(self) -> float:
        """Seconds since the last request or answer; 0 while a request is being answered."""
        is_answering = any(c.reply is not None and not c.reply.done() for c in self._conversations.values())
        return 0.0 if is_answering else time.monotonic() - self._last_used

    async def run(self, agent: Callable[[], Awaitable[None]]) -> StopReason:
        """Run an agent and return why the episode ended. If the agent fails after it met a limit, the episode is truncated.

        Raises:
            PolyturnError: the agent, the engine or a plug-in failed.
        """
        try:
            with first_error():
                async with asyncio.TaskGroup() as self._group:
                    await self._run_agent(agent)
                    self._end("its agent has finished")
        finally:
            self._end("it was ended")
            self._group = None
            self._tries.clear()
            self._conversations.clear()
        if self._is_aborted:
            return StopReason.ABORTED
        return self._over or StopReason.STOP

    async def _run_agent(self, agent: Callable[[], Awaitable[None]]) -> None:
        try:
            await agent()
        except SchedulerError as problem:
            if not self._is_refused and not self._is_aborted:
                raise
            at = raised_at(problem)
            self._episode.warn(
                f"its agent failed after reaching a limit, so the episode is truncated: {one_line(problem)}{at}",
                reason=f"truncated{at}",
            )

    def give_reward(self, score: float, info: Mapping[str, Any]) -> None:
        """Set the episode's reward; the last call counts.

        Raises:
            BadRequest: the episode has ended.
        """
        self._check_live()
        self._episode.given_reward = GivenReward(score=score, info=info)

    def count_tokens(self, ask: ChatRequest) -> int:
        """Return the number of tokens in a request's prompt.

        Raises:
            BadRequest: the messages cannot be rendered.
        """
        self._check_live()
        try:
            return self._episode.count_tokens(typed_messages(ask.messages), tools=ask.tools)
        except (TemplateError, DataError) as problem:
            raise unrenderable(problem) from problem

    # Requests.

    async def ask(self, ask: ChatRequest) -> list[ChatResponse]:
        """Answer one request with `ask.n` completions.

        Raises:
            BadRequest: a limit forbids it, the messages cannot be rendered, or the episode has ended.
        """
        self._check_live()
        self.has_requests, self._last_used = True, time.monotonic()
        await refuse_too_long(ask, self._episode)
        self._check_live()
        if self.num_calls + ask.n > self.rules.max_calls:
            self._over, self._is_refused = StopReason.MAX_TURNS, True
            raise BadRequest(
                f"the episode has had {self.num_calls} completions; at most {self.rules.max_calls} are allowed", code="limit"
            )
        self.num_calls += ask.n
        begun: list[_Begun] = []
        try:
            if not self._has_root:
                begun += self._begin(ask, range(1))
            if len(begun) < ask.n and not self._is_ready.is_set():
                await self._is_ready.wait()
                self._check_live()
            begun += self._begin(ask, range(len(begun), ask.n))
            await asyncio.wait([b.reply for b in begun])
            return [b.reply.result() for b in begun]
        except BaseException:
            for one in begun:
                self._leave(one)
            raise
        finally:  # only completions count, also those that a client did not wait for
            self.num_calls -= ask.n - sum(b.reply.cancelled() or b.reply.exception() is None for b in begun)

    def _check_live(self) -> None:
        if self.ended is not None:
            raise BadRequest(f"the episode has ended: {self.ended}", status=410, code="episode_ended")

    def _begin(self, ask: ChatRequest, choices: range) -> list[_Begun]:
        node = self._tries.setdefault(json.dumps(ask.tools, sort_keys=True) if ask.tools else "", _Node())
        branch, depth, above = None, 0, node
        for index, message in enumerate(ask.messages):
            key = key_of(message)
            if (following := node.children.get(key)) is None:
                following = node.children[key] = _Node()
            node, above = following, node
            if node.turns:
                branch, depth = _waiting(node.turns), index + 1
        new = ask.messages[depth:]
        if not self._episode.shows_media and not all(isinstance(m["content"], str) for m in ask.messages):
            raise BadRequest("a message has media, but this model reads text only", param="messages")
        if ask.goes_on or not new or any(m["role"] == "assistant" for m in new):
            branch = None
        if branch is None:
            messages = typed_messages(ask.messages)
            node = above if ask.goes_on else node  # the answer replaces the last message
            return [self._open(ask, node, messages, choice) for choice in choices]
        typed = typed_messages(new, branch.calls)
        return [self._continue(ask, node, branch, typed, choice) for choice in choices]

    def _continue(self, ask: ChatRequest, node: _Node, branch: _AfterTurn, new: tuple[Message, ...], choice: int) -> _Begun:
        """Continue after a turn: in the loop of its history if that waits after this turn, else in a fork."""
        conversation = branch.conversation
        if conversation.waiting_after is not branch or conversation.next_request is None:
            episode = conversation.episode.fork(at=branch.mark)
            episode.record(episode.turns[-1], Reply(messages=new))
            return self._drive(_Conversation(episode, ask, node, None), choice)
        next_request, conversation.next_request, conversation.waiting_after = conversation.next_request, None, None
        conversation.ask, conversation.node = ask, node
        reply = conversation.reply = asyncio.get_running_loop().create_future()
        self._set_sampling(conversation.episode, ask, choice)
        next_request.set_result(Reply(messages=new))
        return _Begun(conversation, reply)

    def _open(self, ask: ChatRequest, node: _Node, messages: tuple[Message, ...], choice: int) -> _Begun:
        """Begin a conversation by rendering its whole history."""
        episode, is_root = self._episode, not self._has_root
        if not is_root:
            episode = episode.fork(agent=episode.agent, messages=messages)
        try:
            episode.list_tools(ask.tools)
        except TemplateError as problem:
            raise BadRequest(str(problem), param="tools") from problem
        messages_before = messages[:-1] if ask.goes_on else messages
        try:
            episode.rewrite(messages, goes_on=ask.goes_on)
            if is_root:
                # Here, because inside the loop a history that the template cannot render would end the run.
                episode.count_tokens(messages_before)
        except (TemplateError, DataError, SchedulerError) as problem:
            raise unrenderable(problem) from problem
        self._has_root = True
        return self._drive(_Conversation(episode, ask, node, None), choice, is_root=is_root)

    def _set_sampling(self, episode: Episode, ask: ChatRequest, choice: int) -> None:
        own = self._sampling
        values: dict[str, Any] = {}
        if ask.max_tokens is not None:
            values["max_tokens"] = min(ask.max_tokens, own.max_tokens)
        if ask.seed is not None:
            values["seed"] = ask.seed if choice == 0 and ask.seed >= 0 else derive_seed(ask.seed, choice)
        if self.rules.samples_as_asked:
            sampling_fields = {"temperature": ask.temperature, "top_p": ask.top_p, "top_k": ask.top_k}
            values.update({k: v for k, v in sampling_fields.items() if v is not None})
        sampling: SamplingParams = dataclasses.replace(own, **values) if values else own
        episode.sample_as(sampling, stops=ask.stops)

    # The loop of each history.

    def _drive(self, conversation: _Conversation, choice: int, *, is_root: bool = False) -> _Begun:
        assert self._group is not None  # requests are refused once it is gone
        reply = conversation.reply = asyncio.get_running_loop().create_future()
        self._set_sampling(conversation.episode, conversation.ask, choice)
        self._conversations[conversation.episode.id] = conversation
        conversation.task = self._group.create_task(self._loop(conversation, is_root), name=conversation.episode.id)
        return _Begun(conversation, reply)

    async def _loop(self, conversation: _Conversation, is_root: bool) -> None:
        episode = conversation.episode
        try:
            if is_root:
                await episode.prepare()
                self._is_ready.set()
            reason = await MultiTurnScheduler.run(self._scheduler, episode)
        except (TemplateError, DataError) as problem:
            if is_root and not self._is_ready.is_set():
                self._has_root = False  # the model saw nothing, so the next request begins the episode
                self._is_ready.set()
                self._is_ready = asyncio.Event()
            _fail(conversation, unrenderable(problem))
        except PolyturnError as problem:
            _fail(conversation, BadRequest(f"the episode failed: {one_line(problem)}", status=410, code="episode_ended"))
            self._end("it failed")
            raise
        else:
            self._is_aborted |= reason is StopReason.ABORTED
            if conversation.reply is not None:  # the loop ended before it answered
                self._over, self._is_refused = reason, True
                _fail(conversation, self._limit(episode, reason))

    def _limit(self, episode: Episode, reason: StopReason) -> BadRequest:
        limits = episode.limits
        limit_fields = {
            StopReason.CONTEXT_FULL: f"the context of {limits.max_context} tokens is full",
            StopReason.MAX_TURNS: f"the conversation has had its {limits.max_turns} turns (rollout.limits.max_turns)",
            StopReason.MAX_TOKENS: f"the conversation has had its {limits.max_tokens} tokens (rollout.limits.max_tokens)",
            StopReason.TIMEOUT: f"the episode has had its {limits.timeout_s} seconds (rollout.limits.timeout_s)",
        }
        code = "context_full" if reason is StopReason.CONTEXT_FULL else "limit"
        return BadRequest(
            f"{limit_fields.get(reason, f'the episode is over: {reason.value}')}; shorten the history or stop", code=code
        )

    async def answered(self, episode: Episode, turn: OpenTurn) -> Reply:
        """Send a completion to the agent and return its next request as the reply: the `step` of the loop."""
        conversation = self._conversations[episode.id]
        response, message = response_of(episode, turn, conversation.ask)
        after_turn = _AfterTurn(conversation, episode.mark(), {c.id: c.name for c in response.calls})
        node = conversation.node.children.setdefault(key_of(message), _Node())
        node.turns.append(after_turn)
        reply, conversation.reply = conversation.reply, None
        if reply is None or reply.done():
            episode.weigh(turn, 0.0)  # the client has disconnected, so nothing follows from this turn
            turn.info["is_unread"] = True
        else:
            reply.set_result(response)
            self._last_used = time.monotonic()
            self._over = turn.cut_by if turn.finish_reason is FinishReason.LENGTH else None
            # The request's own max_tokens is not a limit of the run: an agent that fails after such a cut has failed.
            own = conversation.ask.max_tokens
            most = min(self._sampling.max_tokens, episode.limits.max_tokens_per_turn or self._sampling.max_tokens)
            is_own = turn.cut_by is StopReason.LENGTH and own is not None and own < most
            self._is_refused = self._over is not None and not is_own
            if self._over is not None and is_own:
                turn.info[CUT_BY_REQUEST] = own
        if self.ended is not None:
            return Reply()
        conversation.waiting_after, conversation.next_request = after_turn, asyncio.get_running_loop().create_future()
        return await conversation.next_request

    def _leave(self, begun: _Begun) -> None:
        """Drop a request whose client has disconnected, and abort its sampling."""
        task = begun.conversation.task
        if begun.reply.cancel() and self._is_ready.is_set() and task is not None:
            task.cancel()

    def _end(self, why: str) -> None:
        if self.ended is not None:
            return
        self.ended = why
        self._is_ready.set()
        for conversation in list(self._conversations.values()):
            if conversation.next_request is not None and not conversation.next_request.done():
                conversation.next_request.set_result(Reply())
                conversation.next_request = None
            elif conversation.reply is not None:
                _fail(conversation, BadRequest(f"the episode has ended: {why}", status=410, code="episode_ended"))
                if conversation.task is not None:
                    conversation.task.cancel()


def _fail(conversation: _Conversation, problem: BadRequest) -> None:
    reply, conversation.reply = conversation.reply, None
    if reply is not None and not reply.done():
        reply.set_exception(problem)
        reply.exception()  # marks the exception as retrieved: a disconnected client never reads it


def _waiting(turns: Sequence[_AfterTurn]) -> _AfterTurn:
    """Among turns with the same message, return the turn after which the loop waits, or else the latest turn."""
    return next((p for p in turns if p.conversation.waiting_after is p), turns[-1])
