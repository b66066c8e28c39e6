"""AgentSession: from the requests of an agent that owns its loop to the turns of one episode.

A request holds a whole history. It continues the turn whose history it repeats message for message: what is new is encoded
behind the tokens that were sampled there, as a scheduler's reply would be. Any other history is rendered whole, and extends
the longest segment that it continues token for token, or opens a new one. Nothing is repaired.

    [s, u]                    a conversation opens              segment 0: s u | a0
    [s, u, a0, tool]          goes on behind a0                 segment 0: s u | a0 | tool | a1
    [s, u, a0, other tool]    goes on behind a0, once more      segment 1: s u a0 other tool | a1'     (a branch)
    [s', u']                  another agent's, or an edit       segment 2: s' u' | …

Every history is driven by the one loop, `MultiTurnScheduler.run`: its `step` tells the agent what was said and waits for the
request that goes on from there. Limits, errors and the record are the loop's; requests at the same time are forks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polyturn.core.aio import first_error
from polyturn.core.errors import DataError, PolyturnError, SchedulerError, TemplateError, one_line
from polyturn.core.generation import FinishReason, SamplingParams
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.core.seeds import derive_seed
from polyturn.core.trajectory import CUT_BY_REQUEST
from polyturn.rollout.episode import Episode
from polyturn.rollout.history import Mark
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import GivenReward, MultiTurnScheduler, Reply
from polyturn.serving.openai.chat_request import BadRequest, ChatRequest, ChatResponse, key_of
from polyturn.serving.openai.turns import as_told, refuse_too_long, typed_messages, unrenderable

logger = logging.getLogger(__name__)


class _Node:
    """One message behind the messages above it."""

    __slots__ = ("children", "places")

    def __init__(self) -> None:
        self.children: dict[tuple[Any, ...], _Node] = {}
        self.places: list[_AfterTurn] = []
        """Turns that said this message."""


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
    """The turn that the loop waits behind."""
    heard: asyncio.Future[Reply] | None = None
    """The request that the loop waits for."""


@dataclasses.dataclass(slots=True, eq=False)
class _AfterTurn:
    """Right behind a turn."""

    conversation: _Conversation
    mark: Mark
    calls: Mapping[str, str]
    """Id to name of the calls that the turn made."""


class _Begun(NamedTuple):
    """A request that is being answered; the conversation may have moved on when its agent looks."""

    conversation: _Conversation
    reply: asyncio.Future[ChatResponse]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """The limits of requests."""

    samples_as_asked: bool = False
    """Whether a request's temperature, top_p and top_k are followed. A trainer needs the run's."""
    max_calls: int = 1000
    """Completions of one episode, over all its histories."""


class AgentSession:
    """An episode that is driven by requests."""

    def __init__(self, scheduler: MultiTurnScheduler, episode: Episode, rules: SessionRules) -> None:
        self.id = episode.id
        self.rules = rules
        self.ended: str | None = None
        """Why nothing more can be asked; None while it can."""
        self.num_calls = 0
        self.last_used = time.monotonic()
        self._scheduler = scheduler
        self._episode = episode
        self._sampling = episode.sampling
        self._tries: dict[str, _Node] = {}
        self._conversations: dict[str, _Conversation] = {}
        self._group: asyncio.TaskGroup | None = None
        self._has_root = False
        self._is_ready = asyncio.Event()
        self._over: StopReason | None = None
        """The reason that cut the latest request off; None where it was answered in full."""
        self._is_refused = False
        """Whether a limit of the run refused the latest request or cut its completion."""
        self._is_aborted = False

    async def run(self, agent: Callable[[], Awaitable[None]]) -> StopReason:
        """Let an agent make its requests and return why the episode ended.

        Raises:
            PolyturnError: the agent, the engine or a plug-in failed. An agent that fails because a limit refused it is
                truncated.
        """
        try:
            with first_error():
                async with asyncio.TaskGroup() as self._group:
                    await self._let(agent)
                    self._end("its agent has finished")
        finally:
            self._end("it was ended")
            self._group = None
            self._tries.clear()
            self._conversations.clear()
        if self._is_aborted:
            return StopReason.ABORTED
        return self._over or StopReason.STOP

    async def _let(self, agent: Callable[[], Awaitable[None]]) -> None:
        try:
            await agent()
        except SchedulerError as problem:
            if not self._is_refused and not self._is_aborted:
                raise
            logger.info("%s: its agent failed behind a limit, so the episode is truncated: %s", self.id, one_line(problem))

    def give_reward(self, score: float, info: Mapping[str, Any]) -> None:
        """Say what the episode is worth; the last word counts.

        Raises:
            BadRequest: the episode has ended.
        """
        self._check_live()
        self._episode.given_reward = GivenReward(score=score, info=info)

    def count_tokens(self, ask: ChatRequest) -> int:
        """Return the length of a request's prompt in tokens.

        Raises:
            BadRequest: the messages cannot be rendered.
        """
        self._check_live()
        try:
            return self._episode.count_tokens(typed_messages(ask.messages), tools=ask.tools)
        except (TemplateError, DataError) as problem:
            raise unrenderable(problem) from problem

    # Asking.

    async def ask(self, ask: ChatRequest) -> list[ChatResponse]:
        """Answer one request, with `ask.n` completions.

        Raises:
            BadRequest: a limit forbids it, the messages cannot be rendered, or the episode has ended.
        """
        self._check_live()
        self.last_used = time.monotonic()
        await refuse_too_long(ask, self._episode)
        self._check_live()
        if self.num_calls + ask.n > self.rules.max_calls:
            self._over, self._is_refused = StopReason.MAX_TURNS, True
            raise BadRequest(
                f"the episode may have {self.rules.max_calls} completions and has had {self.num_calls}", code="limit"
            )
        self.num_calls += ask.n
        begun: list[_Begun] = []
        if not self._has_root:
            begun += self._begin(ask, range(1))
        if len(begun) < ask.n and not self._is_ready.is_set():
            await self._is_ready.wait()
            self._check_live()
        begun += self._begin(ask, range(len(begun), ask.n))
        try:
            await asyncio.wait([b.reply for b in begun])
        except asyncio.CancelledError:
            for one in begun:
                self._leave(one)
            raise
        return [b.reply.result() for b in begun]

    def _check_live(self) -> None:
        if self.ended is not None:
            raise BadRequest(f"the episode has ended: {self.ended}", status=410, code="episode_ended")

    def _begin(self, ask: ChatRequest, choices: range) -> list[_Begun]:
        node = self._tries.setdefault(json.dumps(ask.tools, sort_keys=True) if ask.tools else "", _Node())
        place_in_tree, depth, above = None, 0, node
        for index, message in enumerate(ask.messages):
            key = key_of(message)
            if (following := node.children.get(key)) is None:
                following = node.children[key] = _Node()
            node, above = following, node
            if node.places:
                place_in_tree, depth = _waiting(node.places), index + 1
        new = ask.messages[depth:]
        if not self._episode.shows_media and not all(isinstance(m["content"], str) for m in ask.messages):
            raise BadRequest("a message shows media, and this model reads text only", param="messages")
        if ask.goes_on or not new or any(m["role"] == "assistant" for m in new):
            place_in_tree = None
        if place_in_tree is None:
            messages = typed_messages(ask.messages)
            node = above if ask.goes_on else node  # the answer takes the last message's place
            return [self._open(ask, node, messages, choice) for choice in choices]
        typed = typed_messages(new, place_in_tree.calls)
        return [self._continue(ask, node, place_in_tree, typed, choice) for choice in choices]

    def _continue(self, ask: ChatRequest, node: _Node, branch: _AfterTurn, new: tuple[Message, ...], choice: int) -> _Begun:
        """Go on behind a turn: where its loop waits, or in a fork."""
        conversation = branch.conversation
        if conversation.waiting_after is not branch or conversation.heard is None:
            episode = conversation.episode.fork(at=branch.mark)
            episode.record(episode.turns[-1], Reply(messages=new))
            return self._drive(_Conversation(episode, ask, node, None), choice)
        heard, conversation.heard, conversation.waiting_after = conversation.heard, None, None
        conversation.ask, conversation.node = ask, node
        reply = conversation.reply = asyncio.get_running_loop().create_future()
        self._set(conversation.episode, ask, choice)
        heard.set_result(Reply(messages=new))
        return _Begun(conversation, reply)

    def _open(self, ask: ChatRequest, node: _Node, messages: tuple[Message, ...], choice: int) -> _Begun:
        """Begin a conversation with a history that is rendered whole."""
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
                episode.count_tokens(messages_before)  # before the loop, where a history that no template takes ends the run
        except (TemplateError, DataError, SchedulerError) as problem:
            raise unrenderable(problem) from problem
        self._has_root = True
        return self._drive(_Conversation(episode, ask, node, None), choice, is_root=is_root)

    def _set(self, episode: Episode, ask: ChatRequest, choice: int) -> None:
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

    # The loop, and what it tells.

    def _drive(self, conversation: _Conversation, choice: int, *, is_root: bool = False) -> _Begun:
        assert self._group is not None  # requests are refused once it is gone
        reply = conversation.reply = asyncio.get_running_loop().create_future()
        self._set(conversation.episode, conversation.ask, choice)
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
                self._has_root = False  # nothing was shown, so the next request begins the episode
                self._is_ready.set()
                self._is_ready = asyncio.Event()
            _fail(conversation, unrenderable(problem))
        except PolyturnError as problem:
            _fail(conversation, BadRequest(f"the episode failed: {one_line(problem)}", status=410, code="episode_ended"))
            self._end("it failed")
            raise
        else:
            self._is_aborted |= reason is StopReason.ABORTED
            if conversation.reply is not None:  # the loop ended instead of an answer
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
            f"{limit_fields.get(reason, f'the episode is over: {reason.value}')}; shorten the history or end", code=code
        )

    async def answered(self, episode: Episode, turn: OpenTurn) -> Reply:
        """Tell the agent what was said and wait for what it answers: the `step` of the loop."""
        conversation = self._conversations[episode.id]
        response, message = as_told(episode, turn, conversation.ask)
        after_turn = _AfterTurn(conversation, episode.mark(), {c.id: c.name for c in response.calls})
        node = conversation.node.children.setdefault(key_of(message), _Node())
        node.places.append(after_turn)
        reply, conversation.reply = conversation.reply, None
        if reply is None or reply.done():
            episode.weigh(turn, 0.0)  # the client is gone, so nothing comes of it
            turn.info["is_unread"] = True
        else:
            reply.set_result(response)
            self._over = turn.cut_by if turn.finish_reason is FinishReason.LENGTH else None
            # A cut that the request asked for is not a limit of the run: an agent that fails behind it has failed.
            own = conversation.ask.max_tokens
            most = min(self._sampling.max_tokens, episode.limits.max_tokens_per_turn or self._sampling.max_tokens)
            is_own = turn.cut_by is StopReason.LENGTH and own is not None and own < most
            self._is_refused = self._over is not None and not is_own
            if self._over is not None and is_own:
                turn.info[CUT_BY_REQUEST] = own
        if self.ended is not None:
            return Reply()
        conversation.waiting_after, conversation.heard = after_turn, asyncio.get_running_loop().create_future()
        return await conversation.heard

    def _leave(self, begun: _Begun) -> None:
        """Forget a request whose agent has gone; what is being sampled for it is aborted."""
        task = begun.conversation.task
        if begun.reply.cancel() and self._is_ready.is_set() and task is not None:
            task.cancel()

    def _end(self, why: str) -> None:
        if self.ended is not None:
            return
        self.ended = why
        self._is_ready.set()
        for conversation in list(self._conversations.values()):
            if conversation.heard is not None and not conversation.heard.done():
                conversation.heard.set_result(Reply())
                conversation.heard = None
            elif conversation.reply is not None:
                _fail(conversation, BadRequest(f"the episode has ended: {why}", status=410, code="episode_ended"))
                if conversation.task is not None:
                    conversation.task.cancel()


def _fail(conversation: _Conversation, problem: BadRequest) -> None:
    reply, conversation.reply = conversation.reply, None
    if reply is not None and not reply.done():
        reply.set_exception(problem)
        reply.exception()  # an agent that has gone does not ask for it


def _waiting(places: Sequence[_AfterTurn]) -> _AfterTurn:
    """Return, of turns that said the same, one behind which the loop waits; else the latest."""
    return next((p for p in places if p.conversation.waiting_after is p), places[-1])
