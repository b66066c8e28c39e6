"""EpisodeEngine: the `infer_engine` of a scheduler in ms-swift's form; each `infer_async` is a turn of a native episode.

The request is compared with the episode's history, so that sampled ids are never recreated from text:

    episode [user "2+2?"] sampled "5"  request [user "2+2?", assistant "5", user "Wrong."]      an observation is appended
                                       request [user "2+2?", assistant "5 But wait,"]           the message is continued
                                       request [user "2+2?", assistant "five", user "Wrong."]   the history was edited: it
                                                                       is rendered again, as a new segment unless it fits

A step may return the ids of its turn. A common prefix with the sampled ids is kept. Missing sampled ids are dropped and
counted, or get weight 0 if other ids follow. Ids added by the step are observations and are never trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polyturn.compat.swift.base import EngineOver, SchedulerEngine
from polyturn.compat.swift.template import Template, TemplateMeta, ThinkingTemplate
from polyturn.compat.swift.turns import as_request, ids_of
from polyturn.core.errors import DataError, SchedulerError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message
from polyturn.data.media import with_media
from polyturn.rollout.scheduler import Reply
from polyturn.serving.rollout_protocol import (
    MEDIA,
    ChatCompletionMessageToolCall,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    Function,
    RequestConfig,
    RolloutInferRequest,
    SampledId,
    SampledText,
    UsageInfo,
)

if TYPE_CHECKING:
    from pathlib import Path

    from polyturn.rollout.episode import Episode
    from polyturn.rollout.open_turn import OpenTurn
    from polyturn.rollout.scheduler import MultiTurnScheduler

_ROLES = {"tool_response": "tool", "observation": "tool", "function": "tool"}
"""Role in ms-swift's messages -> native role, if different."""
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "repetition_penalty", "min_p")


class InferCall(NamedTuple):
    """One `infer_async` call: its turn and its response."""

    turn: OpenTurn
    response: ChatCompletionResponse
    ids: tuple[SampledId, ...]
    """The sampled ids in the response."""
    text: SampledText
    """The text in the response, without the part that a stop word cut off."""
    is_open: bool
    """Whether a stop word cut the reply. The message then has no end token."""


class _StepIds(NamedTuple):
    """The ids and mask that a step returned for the answered turn."""

    ids: Sequence[int] | None
    mask: Sequence[int] | None

    def kept(self, turn: OpenTurn) -> int | None:
        """Return the length of the common prefix of the sampled ids and `ids`; None if `ids` is None.

        If sampled ids are missing, masked ids after the last trained one count as the step's own, even if they equal the
        sampled ones.
        """
        if self.ids is None:
            return None
        ids = turn.completion.token_ids[: turn.num_tokens]
        n = min(len(ids), len(self.ids))
        different = np.flatnonzero(ids[:n] != np.asarray(self.ids[:n], np.int64))
        kept = int(different[0]) if len(different) else n
        if self.mask is not None and kept < turn.num_tokens:
            trained = np.flatnonzero(np.asarray(self.mask[:kept]))
            kept = int(trained[-1]) + 1 if len(trained) else 0
        return kept


class EpisodeEngine(SchedulerEngine):
    """Lets a scheduler generate turns of an episode, one at a time."""

    def __init__(self, episode: Episode, owner: MultiTurnScheduler, *, config: RequestConfig, base: Path) -> None:
        """Create the engine of one episode.

        Args:
            episode: The episode.
            owner: The native scheduler that drives it.
            config: The run's sampling settings; a request may not use others.
            base: The folder that relative paths of media are resolved against.
        """
        self._episode = episode
        self._owner = owner
        self._config = config
        self._base = base
        self._lock = asyncio.Lock()
        self._conversation: list[Message] = []
        """The conversation including the last reply, as the scheduler wrote it."""
        self._step_ids: _StepIds | None = None
        self.calls: list[InferCall] = []
        self.over: StopReason | None = None
        self.why: str | None = None
        is_thinking = "think" in (episode.codec.chat_template or "")
        kind = ThinkingTemplate if is_thinking else Template
        self.template: Template = kind(self.tokenizer, TemplateMeta(is_thinking=is_thinking), max_length=self.max_model_len)
        self.default_template = self.template
        """The same template under its name in ms-swift before release 4."""

    @property
    def tokenizer(self) -> Any:
        """The run's tokenizer."""
        return self._episode.codec.tokenizer

    @property
    def processor(self) -> Any:
        """The tokenizer; schedulers of vision models use this name."""
        return self.tokenizer

    @property
    def max_model_len(self) -> int | None:
        """Largest number of tokens of a conversation."""
        return self._episode.limits.max_context

    @property
    def engine(self) -> EpisodeEngine:
        """The engine itself: it does not wrap another one."""
        return self

    # Called by the loop of `base.py`.

    async def call_author(self, method: Any, *args: Any) -> Any:
        """Call a user's method, sync or async, without blocking other episodes."""
        return await self._episode.call(self._owner, method, *args)

    def take(self, ids: Sequence[int] | None, mask: Sequence[int] | None) -> None:
        """Receive the ids and mask that a step returned for the turn that it answers.

        Raises:
            SchedulerError: none of the ids was sampled in this turn although some are trained, or an id does not exist.
        """
        own_ids = self._step_ids = _StepIds(ids, mask)
        turn = self.calls[-1].turn
        if ids is None:
            return
        kept = own_ids.kept(turn)
        if not kept and (mask is None or any(mask)):
            raise SchedulerError(
                f"response_token_ids of turn {len(self.calls)} of trajectory {self._episode.id!r} begin with {ids[0]}, but "
                f"{turn.completion.token_ids[:1].tolist()} was sampled; return the choice's token_ids, with your own ids "
                "after them, or mask your ids with zeros"
            )
        size = len(self.tokenizer)
        if odd := [i for i in ids[kept:] if not isinstance(i, SampledId) and not 0 <= i < size]:
            raise SchedulerError(
                f"response_token_ids of turn {len(self.calls)} of trajectory {self._episode.id!r} hold {odd[0]}; the "
                f"tokenizer has {size} ids"
            )

    def score(self, value: float) -> None:
        """Score the last turn."""
        self.calls[-1].turn.scores["env"] = value

    def ended(self, why: str) -> None:
        """Receive the reason why the loop ends."""
        self.why = why

    # Called by schedulers.

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig | None = None, **kwargs: Any
    ) -> ChatCompletionResponse:
        """Continue the request's conversation by one turn of the episode.

        Raises:
            EngineOver: a limit is reached.
            SchedulerError: the request has other sampling settings, or messages that cannot be rendered.
        """
        request = as_request(infer_request)
        config = request_config or self._config
        self._check(config)
        async with self._lock:
            messages, goes_on = self._messages(request)
            if not self.calls:
                self._begin(messages, goes_on=goes_on)
            else:
                self._episode.record(self.calls[-1].turn, self._next(messages, goes_on=goes_on))
            self._step_ids = None
            if (reason := await self._episode.prepare()) is not None:
                self.over = reason
                raise EngineOver(reason.value)
            turn = await self._episode.generate()
            if turn.finish_reason is FinishReason.ABORT:
                self.over = StopReason.ABORTED
                raise EngineOver(StopReason.ABORTED.value)
            return self._answer(turn, request, config, messages, goes_on=goes_on)

    async def _batch_infer_stream(self, tasks: Sequence[Any], *_: Any, **__: Any) -> list[Any]:
        """Await the tasks one after another, because they share one trajectory."""
        return [await task for task in tasks]

    # Private.

    def _check(self, config: RequestConfig) -> None:
        if config.n != 1:
            raise SchedulerError(f"request_config.n is {config.n}; a request gives one reply, so send another request")
        for name in _SAMPLING:
            value, own = getattr(config, name), getattr(self._config, name)
            if value is not None and value != own:
                raise SchedulerError(
                    f"request_config.{name} is {value}, but the run's is {own}; the trainer's logprobs depend on it, "
                    "so set it for the run (rollout.sampling, rollout.limits)"
                )

    def _messages(self, request: RolloutInferRequest) -> tuple[list[Message], bool]:
        """Return a request's conversation with its media, and whether the last message is to be continued."""
        written = [{**m, "role": _ROLES.get(m["role"], m["role"])} for m in request.messages]
        while written and written[-1]["role"] == "assistant" and not written[-1].get("content"):
            written.pop()
        if not written:
            raise SchedulerError(f"the request of trajectory {request.uuid!r} has no messages; keep the row's prompt")
        try:
            # Media markers in the model's own messages are plain text.
            indices = [i for i, m in enumerate(written) if m["role"] != "assistant"]
            media = {name: getattr(request, name) for name in MEDIA}
            for i, message in zip(indices, with_media([written[i] for i in indices], media, base=self._base), strict=True):
                written[i] = message
            messages = [Message.from_openai(self._plain(m)) for m in written]
        except DataError as problem:
            raise SchedulerError(f"the request of trajectory {request.uuid!r}: {problem}") from problem
        return messages, messages[-1].role == "assistant"

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message for the record: plain texts, with ids of a reply replaced by its text."""
        read = {k: str(v) if isinstance(v, str) else v for k, v in message.items()}
        if (ids := ids_of(read.get("content"))) is not None:
            stops = self._episode.codec.stop_token_ids
            ids = ids[:-1] if ids[-1] in stops else ids
            read["content"] = self.tokenizer.decode(ids, skip_special_tokens=False)
        return read

    def _begin(self, messages: list[Message], *, goes_on: bool) -> None:
        if goes_on or tuple(messages) != self._episode.messages:
            self._episode.rewrite(messages, goes_on=goes_on)

    def _next(self, messages: list[Message], *, goes_on: bool) -> Reply:
        """Set the episode's next prompt to a request's messages."""
        call, pending = self.calls[-1], self._conversation
        turn, own_ids = call.turn, self._step_ids
        kept = own_ids.kept(turn) if own_ids is not None else None
        cuts = kept is not None and kept < turn.num_tokens
        is_extended = messages[: len(pending)] == pending
        reply: Reply | None = None
        if goes_on and len(messages) == len(pending) and messages[:-1] == pending[:-1]:
            reply = self._continued(call, messages[-1].text, kept)
        elif is_extended and not goes_on and not cuts and not call.is_open:
            reply = Reply(messages=tuple(messages[len(pending) :]))
        self._mask(turn, own_ids)
        return self._rewritten(messages, goes_on=goes_on) if reply is None else reply

    def _continued(self, call: InferCall, text: str, kept: int | None) -> Reply | None:
        """Continue the last message from the step's ids or text; return None if the history must be rendered again."""
        own_ids = None if self._step_ids is None else self._step_ids.ids
        if kept is not None and own_ids is not None:
            return self._episode.go_on(np.asarray(own_ids[kept:], np.int32), keep=kept)
        before = self._conversation[-1].text
        if text.startswith(before):
            return self._episode.go_on(text[len(before) :], keep=call.text if call.is_open else None)
        return None

    def _rewritten(self, messages: list[Message], *, goes_on: bool) -> Reply:
        """Render the history again; the messages after its last reply are recorded as the answer to the turn."""
        read = [self._as_read(m) for m in messages]
        if goes_on:
            return self._episode.rewrite(messages, goes_on=True)
        replies = [i for i, m in enumerate(read) if m.role == "assistant"]
        first = max(1, replies[-1] + 1 if replies else len(read) - 1)
        self._episode.rewrite(read[:first])
        return Reply(messages=tuple(read[first:]), goes_on=True)

    def _mask(self, turn: OpenTurn, own_ids: _StepIds | None) -> None:
        """Set the weights of the turn's sampled tokens from the step's ids and mask; missing ids get 0."""
        if own_ids is None or own_ids.ids is None:
            return
        kept = min(own_ids.kept(turn) or 0, turn.num_tokens)
        if own_ids.mask is None and kept == turn.num_tokens:
            return
        weights = np.zeros(turn.num_tokens, np.float32)
        weights[:kept] = 1.0 if own_ids.mask is None else own_ids.mask[:kept]
        self._episode.weigh(turn, weights)

    def _as_read(self, message: Message) -> Message:
        """Return the episode's parsed message if an assistant message equals the sampled text."""
        if message.role != "assistant":
            return message
        for call in reversed(self.calls):
            if message.text == call.turn.said_before + call.text:
                return call.turn.message
        return message

    def _answer(
        self,
        turn: OpenTurn,
        request: RolloutInferRequest,
        config: RequestConfig,
        messages: list[Message],
        *,
        goes_on: bool,
    ) -> ChatCompletionResponse:
        text, is_stopped = turn.text, False
        stops = [config.stop] if isinstance(config.stop, str) else config.stop or []
        if hits := [at for stop in stops if (at := text.find(stop)) >= 0]:
            # A reply's text ends before a stop word; the ids of the stop word and after it are dropped and counted.
            text, is_stopped = text[: min(hits)], True
            self._episode.go_on(keep=text)
            turn.observation, turn.is_continued = (), False
        text_so_far = messages[-1].text + text if goes_on else text
        before = messages[:-1] if goes_on else messages
        self._conversation = [*before, Message(role="assistant", content=text_so_far)]
        ids = tuple(map(SampledId, turn.completion.token_ids[: turn.num_tokens].tolist()))
        sampled = SampledText(text)
        probs = turn.completion.logprobs
        calls = [
            ChatCompletionMessageToolCall(function=Function(c.name, c.raw or str(dict(c.arguments))), id=c.id)
            for c in (turn.message.tool_calls if request.tools else ())
        ]
        is_cut = turn.finish_reason is FinishReason.LENGTH and not is_stopped
        tokens = self.tokenizer.convert_ids_to_tokens(list(ids))
        entries = (
            []
            if probs is None
            else [{"token": t, "logprob": float(p), "bytes": None} for t, p in zip(tokens, probs[: len(ids)], strict=True)]
        )
        choice = ChatCompletionResponseChoice(
            index=0,
            message=ChatMessage(role="assistant", content=sampled, tool_calls=calls or None),
            finish_reason="length" if is_cut else "stop",
            logprobs=None if probs is None else {"content": entries},
            token_ids=list(ids),
        )
        prompt = len(self._episode.context_ids) - len(ids)
        response = ChatCompletionResponse(
            model="polyturn",
            choices=[choice],
            usage=UsageInfo(prompt, len(ids), prompt + len(ids)),
            id=request.uuid or self._episode.id,
        )
        self.calls.append(InferCall(turn, response, ids, sampled, is_stopped))
        return response
