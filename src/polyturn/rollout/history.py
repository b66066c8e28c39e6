"""History: messages and tokens of one conversation, turn after turn. It is synchronous and does no I/O.

    next_prompt -> append_prompt -> add_turn -> record -> next_prompt -> …

`next_prompt` encodes the waiting messages, and `append_prompt` makes the result the context for the next completion.
Schedulers edit a history between two turns with `history_edits`.

If a rendered prompt continues a segment token for token, it extends that segment; otherwise it starts a new segment, in
which all earlier tokens are prompt. Messages are encoded only when the next generation needs them, and sampled ids are never
re-encoded. A fork is a copy with a separate position in the same segments.

Each change is an event (`rollout/events.py`), which a journal stores and replays.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.builder import BuilderState, TrajectoryBuilder
from polyturn.core.errors import SchedulerError, TemplateError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, Origin, OwnText, to_openai, with_origin
from polyturn.core.trajectory import SpanRef, SpanSource
from polyturn.rollout.edits import as_written, with_known_origin
from polyturn.rollout.events import Answered, Continued, Edited, Event, IdsGiven, Prompted, Shown, TurnSampled, Weighed
from polyturn.rollout.limits import EpisodeProgress
from polyturn.rollout.next_prompt import NO_IDS, Append, Continue, Given, Next, Prompt, Render, all_media
from polyturn.rollout.open_turn import PROMPTED_REASONING, OpenTurn, Reply
from polyturn.rollout.stop_strings import Stopped
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import ToolCallParser

BOTH = "a step that lets the assistant message go on cannot answer it with messages as well"


class Mark(NamedTuple):
    """A saved position right after a turn, from which a fork can start later."""

    builder: BuilderState
    history: History
    """A copy of the history at this position."""


class History:
    """The history that the model sees, and the turns taken in it."""

    def __init__(
        self, encoder: DeltaEncoder, parser: ToolCallParser, messages: Sequence[Message], *, renders_history: bool = False
    ) -> None:
        """Start with `messages` as the prompt.

        Args:
            encoder: Encodes messages and the schemas of the agent's tools.
            parser: Parses completions.
            messages: The prompt.
            renders_history: Render the whole history before every turn, as an inference server does.
        """
        self.builder = TrajectoryBuilder()
        self.turns: list[OpenTurn] = []
        """The turns in order; a fork starts with the turns before it."""
        self.events: list[Event] | None = None
        """The events that a journal has not taken yet; None without a journal."""
        self.prompt: tuple[Message, ...] | None = None
        """The messages of the first prompt; None before the first `append_prompt`."""
        self.prompt_tokens = 0
        """Number of tokens of the first prompt."""
        self.num_cut = 0
        """Number of sampled tokens that were cut away, excluding those of forks."""
        self.num_user_turns = 0
        """Number of the interaction's replies."""
        self.is_canonical = not renders_history
        """Whether the ids of the context should equal a full render of the messages; the sanity check then compares them."""
        self.encoder = encoder
        """Encodes the next prompts, with the tools that they list."""
        self._parser, self._renders_history = parser, renders_history
        self.next: Next = Append()
        """The form of the next prompt."""
        self._last_id: int | None = None
        self._rejoins = False
        """Whether another fork may have appended to this segment; `append_prompt` then searches for a segment to extend."""
        self._has_user_reply = False
        """Whether the last answer came from the interaction."""
        self._response_tokens = 0
        """Number of tokens after the first prompt, sampled and observed."""
        self.set_prompt(messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as the model sees it."""
        return tuple(self._messages)

    @property
    def openai(self) -> list[dict[str, Any]]:
        """`messages` as OpenAI-style dicts, in a new list."""
        return list(self._openai)

    @property
    def context(self) -> Ids:
        """[T] the ids of the current context; after `append_prompt`, these are the prompt of the next completion."""
        return self.builder.context

    @property
    def to_encode(self) -> Sequence[Message]:
        """The messages that will be encoded for the next prompt."""
        is_whole = not self.builder.is_open or isinstance(self.next, Render) or self._renders_history
        return (*self._messages, *self.waiting) if is_whole else self.waiting

    def _happened(self, event: Event) -> None:
        if self.events is not None:
            self.events.append(event)

    @property
    def waiting(self) -> tuple[Message, ...]:
        """The messages that the model has not seen yet."""
        return () if isinstance(self.next, Continue) else self.next.messages

    @property
    def last(self) -> Continue | None:
        """The assistant message that the next turn continues; None if it starts a new message."""
        last = self.next.last if isinstance(self.next, Render) else self.next
        return last if isinstance(last, Continue) else None

    # The steps of a turn.

    def next_prompt(self) -> Prompt:
        """Encode the next part of the prompt: the tokens between turns, the waiting messages and the generation prompt.

        If a full render only splits the text of the context into other tokens, the ids of the context are kept.

        Raises:
            TemplateError: the template cannot render the messages.
            SchedulerError: the template cannot render the history that the scheduler wrote.
        """
        coming, waiting = self.next, self.waiting
        if isinstance(coming, Given):
            num_new = max(0, len(coming.ids) - self.builder.num_tokens) if self.builder.is_open else 0
            return Prompt(coming.ids, True, num_new, len(coming.ids))
        edit = coming if isinstance(coming, Render) else None
        extend = functools.partial(self.encoder.extend, waiting, last_id=self._last_id, history=self._messages)
        if self.builder.is_open and edit is None and not (self._renders_history and waiting):
            ids = coming.addition if isinstance(coming, Continue) else extend() if waiting else NO_IDS
            return Prompt(ids, False, len(ids), self.builder.num_tokens + len(ids), all_media(waiting))
        messages = [*self._messages, *waiting]
        media = all_media(messages)
        try:
            ids = self.encoder.start(self._as_written(messages[:-1] if edit and edit.last else messages))
        except TemplateError as problem:
            if edit is None:
                raise
            raise SchedulerError(f"the history that the scheduler wrote cannot be rendered: {problem}") from problem
        if edit is not None and edit.last is not None:
            ids = np.concatenate([ids, edit.last.addition])
        if not self.builder.is_open:
            return Prompt(ids, True, 0, len(ids), media)
        # From here on, `num_new` counts new tokens as if they were appended, so limits do not depend on the rendering.
        context = self.context
        if self.builder.continues(ids, media=media):
            return Prompt(ids, True, len(ids) - len(context), len(ids), media)
        try:
            added = extend() if waiting else NO_IDS
        except TemplateError:  # this template cannot encode appended messages
            return Prompt(ids, True, max(0, len(ids) - len(context)), len(ids), media)
        # If the render only splits the same text into other tokens, keep the sampled ids, so that the segment continues.
        if edit is None and self._spells(kept := np.concatenate([context, added]), ids):
            ids = kept
        return Prompt(ids, True, len(added), len(ids), media)

    def _spells(self, kept: Ids, rendered: Ids) -> bool:
        """Return whether both decode to the same text and have the same control tokens."""
        codec = self.encoder.codec
        has_same_control = np.array_equal(codec.control_in(kept), codec.control_in(rendered))
        return has_same_control and codec.decode(kept) == codec.decode(rendered)

    def append_prompt(self, prompt: Prompt) -> None:
        """Make `prompt` the context: append its new ids to a segment, or open a segment; add the span to the last turn."""
        last, builder, waiting = self.turns[-1] if self.turns else None, self.builder, self.waiting
        turn = -1 if last is None else last.index
        ref: SpanRef | None = None
        if self.prompt is None:
            self.prompt, self.prompt_tokens = self.messages, prompt.length
        if prompt.is_whole:
            ref = builder.set_prompt(prompt.ids, turn=turn, media=prompt.media)
        elif self._rejoins:  # pass the whole prompt, so that the builder can find a segment to extend
            whole = np.concatenate([builder.context, prompt.ids])
            ref = builder.set_prompt(whole, turn=turn, media=(*builder.media, *prompt.media))
        elif len(prompt.ids) or waiting:
            ref = builder.observe(prompt.ids, turn=turn)
            builder.add_media(*prompt.media)
        self._messages += waiting
        self._openai += to_openai(waiting)
        self.next = Append() if self.last is None else self.last._replace(addition=NO_IDS)
        self._rejoins = False
        if ref is not None and last is not None:
            last.spans.append(ref)
        self._response_tokens += prompt.num_new
        if self.events is not None:
            ids, segment = NO_IDS if ref is None else builder.span(ref).ids, builder.place.segment
            self._happened(
                Shown(is_whole=prompt.is_whole, segment=segment, ids=ids, num_new=prompt.num_new, length=prompt.length)
            )

    def add_turn(self, message: Message, text: str, ended: Stopped, *, index: int, cut_by: StopReason) -> OpenTurn:
        """Append a completion with its sampled ids, and return its turn.

        Args:
            message: The parsed message, including earlier text of the same message.
            text: The text of the completion alone.
            ended: The completion and its stop string, if any.
            index: The turn's number among all turns of the episode.
            cut_by: The limit that sets the completion's token budget.
        """
        completion, last = ended.completion, self.last
        if last is not None:  # `message` replaces the message that it continues
            self._messages.pop()
            self._openai.pop()
        self._messages.append(message)
        self._openai.append(message.to_openai())
        self._last_id = int(completion.token_ids[-1]) if len(completion.token_ids) else None
        if isinstance(self.next, Continue | Render):
            self.next = Append() if isinstance(self.next, Continue) else self.next._replace(last=None)
        prompted = self.encoder.codec.prompted_reasoning if last is None else ""
        turn = OpenTurn(
            index=index,
            message=message,
            completion=completion,
            cut_by=cut_by,
            text=text,
            said_before="" if last is None else last.said,
            own_before="" if last is None else last.own,
            num_tokens=len(completion.token_ids),
            spans=list(self.builder.sample(completion, turn=index)),
            stopped_by=ended.stop,
            info={PROMPTED_REASONING: prompted} if prompted else {},
        )
        self.num_cut += ended.num_dropped
        self._response_tokens += turn.num_tokens
        self.turns.append(turn)
        self._happened(
            TurnSampled(
                message=message,
                text=text,
                completion=completion,
                stop=ended.stop,
                num_dropped=ended.num_dropped,
                index=index,
                cut_by=cut_by,
            )
        )
        return turn

    # Reading.

    def progress(self, *, elapsed_s: float, prompt: Prompt | None = None) -> EpisodeProgress:
        """Return the progress in the units of the limits; with `prompt`, the progress after showing it."""
        return EpisodeProgress(
            elapsed_s=elapsed_s,
            turns=len(self.turns),
            user_turns=self.num_user_turns,
            has_user_reply=self._has_user_reply and bool(self.waiting),
            response_tokens=self._response_tokens + (0 if prompt is None else prompt.num_new),
            context_tokens=self.builder.num_tokens if prompt is None else prompt.length,
        )

    def sampled_spans(self, turn: OpenTurn) -> list[SpanRef]:
        """Return the spans of a turn's completion."""
        spans = ((ref, self.builder.span(ref)) for ref in turn.spans)
        return [ref for ref, span in spans if span.source is SpanSource.SAMPLED and span.turn == turn.index]

    def mark(self) -> Mark:
        """Return a mark of the current position, to which `fork(at=…)` can return later; call it right after a turn."""
        return Mark(self.builder.place, self._copy())

    def typed(self, messages: Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
        """Return `messages` as typed messages, each with its origin."""
        return with_known_origin([Message.from_openai(m) for m in messages], (*self._messages, *self.waiting))

    def full_render(self) -> Ids:
        """Render and encode the whole conversation at once, for the sanity check."""
        return self.encoder.full(self._as_written(self._messages))

    def length_of(self, messages: Sequence[Message]) -> int:
        """Return the length of the prompt of `messages` in tokens."""
        return len(self.encoder.start(self._as_written(messages)))

    def read_completion(self, ids: Ids, *, turn: int) -> tuple[Message, str]:
        """Parse a completion; return the message that it starts or continues, and the completion's own text."""
        text = self.encoder.codec.decode_turn(ids)
        if (last := self.last) is None:
            return self.read(text, turn=turn), text
        return self.read(last.said + text, turn=turn, own=last.own + text), text

    def read(self, text: str, *, turn: int, own: str | None = None) -> Message:
        """Parse a text as a message. The result is only a view: it is never encoded in place of the sampled ids.

        `own` is the model's part of `text`; None if the model wrote all of it.
        """
        parsed = self._parser.parse(text, id_prefix=f"call_{turn}", tools=self.encoder.tools)
        own_text: OwnText | None = None
        if own is not None and own != text:
            own_parsed = self._parser.parse(own, id_prefix=f"call_{turn}", tools=self.encoder.tools)
            own_text = OwnText(text=own_parsed.content, written=own)
        return Message(
            role="assistant",
            content=parsed.content,
            tool_calls=parsed.tool_calls,
            reasoning=parsed.reasoning,
            origin=Origin.MODEL,
            written=text,
            own=own_text,
        )

    def _as_written(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages for a full render; if the template has no reasoning field, the reasoning is in the content."""
        codec = self.encoder.codec
        return messages if codec.template.has_reasoning_field else as_written(messages, opened=codec.opened_reasoning)

    # Changes. None of these methods encodes a message; each records an event.

    def play_as(self, agent: str) -> None:
        """Set the agent's name, before the prompt is shown."""
        last = self.last
        self.set_prompt(self._messages, agent=agent)
        if last is not None:
            self.edit(self._messages, (), last)

    def record(self, turn: OpenTurn, reply: Reply) -> StopReason | None:
        """Record the reply to the turn; unless it ends the episode, the next prompt contains its messages.

        Returns:
            Why the episode ends with this reply, or None.

        Raises:
            SchedulerError: the reply has messages, but after `go_on` the next turn continues the turn's own message.
        """
        messages = with_origin(reply.messages, Origin.ENVIRONMENT)
        turn.observation += messages
        turn.info.update(reply.info)
        turn.scores.update(reply.scores)
        if reply.is_done:
            return StopReason.ENV_DONE
        if messages and self.last is not None:
            raise SchedulerError(BOTH)
        self.answer(messages, "interaction" in turn.timings)
        return None if messages or reply.goes_on else StopReason.STOP

    def show_ids(self, ids: Ids) -> None:
        """Use `ids` as the whole next prompt, regardless of the messages."""
        self.next, self.is_canonical = Given(ids_array(ids)), False
        self._happened(IdsGiven(ids=self.next.ids))

    def weigh(self, turn: OpenTurn, weights: ArrayLike) -> None:
        """Set the loss weights of a turn's sampled tokens, one for all or one per token."""
        values = np.asarray(weights, np.float32)
        values = values if values.ndim else np.full(turn.num_tokens, values, np.float32)
        self.builder.reweigh(self.sampled_spans(turn), values)
        self._happened(Weighed(index=turn.index, weights=values))

    def fork(
        self,
        *,
        agent: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        at: Mark | None = None,
    ) -> History:
        """Return a history that continues from here, or from `at`; with `agent`, a new one that begins with `messages`."""
        messages_typed = None if messages is None else self.typed(messages)
        if agent is not None:
            other = History(self.encoder, self._parser, messages_typed or (), renders_history=self._renders_history)
            other.prompt, other.prompt_tokens = self.prompt, self.prompt_tokens
        else:
            other = self._copy() if at is None else at.history._copy()
            if at is not None:  # after this position, another fork may have appended to the segment
                other.encoder, other.next, other._has_user_reply, other._rejoins = self.encoder, Append(), False, True
            if messages_typed is not None:
                other.edit(messages_typed, ())
        other.builder = self.builder.fork(agent=agent, at=None if at is None else at.builder)
        return other

    def _copy(self) -> History:
        """Return a copy at this position, with the same builder but without a journal and with `num_cut` at 0."""
        other = copy.copy(self)
        other._messages, other._openai, other.turns = list(self._messages), list(self._openai), list(self.turns)
        other.events, other.num_cut = None, 0
        return other

    # The primitive changes. Each records an event, which a journal replays with the same arguments.

    def set_prompt(self, messages: Sequence[Message], *, agent: str | None = None) -> None:
        """Replace the prompt before it is encoded, and the agent's name if `agent` is given."""
        self.builder.agent = agent or self.builder.agent
        self._messages, self._openai = list(messages), to_openai(messages)
        self.num_prompt = len(self._messages)
        """Number of leading messages that are the prompt; context policies never leave them out."""
        self.next = Append(self.waiting)
        self._happened(Prompted(agent=self.builder.agent, messages=tuple(messages)))

    def answer(self, messages: Sequence[Message], is_user: bool) -> None:
        """Queue `messages` for the next prompt; `is_user` is true if the interaction wrote them."""
        if not isinstance(self.next, Continue):
            self.next = self.next._replace(messages=tuple(messages))
        self._has_user_reply = is_user
        self.num_user_turns += is_user
        self._happened(Answered(messages=tuple(messages), is_user=is_user))

    def edit(self, messages: Sequence[Message], waiting: Sequence[Message], last: Continue | None = None) -> None:
        """Replace the history by `messages`, then `waiting`. With `last`, the next turn continues the last message."""
        pairs = enumerate(zip(self._messages, messages, strict=False))
        kept = next((i for i, (a, b) in pairs if a is not b), min(len(self._messages), len(messages)))
        self._messages, self._openai = list(messages), to_openai(messages)
        if not self.builder.is_open:  # the edit replaces the prompt; `last` is the beginning of the first turn
            self.num_prompt = len(self._messages) - (last is not None)
        self.next = Render(tuple(waiting), last)
        self.is_canonical = False
        behind = tuple(messages[kept:])
        text, own, addition = (None, None, NO_IDS) if last is None else last
        self._happened(Edited(num_kept=kept, messages=behind, waiting=tuple(waiting), said=text, own=own, addition=addition))

    def continue_turn(
        self, num_kept: int, kept: str, text: str, addition: Ids, own: Message, whole: Message, rest: str
    ) -> int:
        """Keep `num_kept` tokens of the last turn and let it go on after `addition`; return the number of dropped tokens.

        `text` is the text of `addition`. It begins with `rest`, the end of the model's kept text, which was cut inside a
        token and is therefore encoded anew. The kept tokens parse as the message `own`; with `text` appended, as `whole`.
        """
        turn, spans = self.turns[-1], self.sampled_spans(self.turns[-1])
        self._response_tokens -= self.builder.num_before(spans) - num_kept
        dropped = self.builder.cut(spans, keep=num_kept)
        if dropped:
            turn.num_tokens = num_kept
        self.num_cut += dropped
        if isinstance(self.next, Continue):  # an earlier call, whose addition this one replaces
            turn.observation = turn.observation[:-1]
        turn.text, turn.is_continued, turn.message = kept, True, own
        turn.observation += (Message(role="assistant", content=text, origin=Origin.ENVIRONMENT),)
        self._messages[-1], self._openai[-1] = whole, whole.to_openai()
        self.next = Continue(turn.said_before + kept + text, turn.own_before + kept + rest, addition)
        self.is_canonical = False
        self._happened(
            Continued(num_kept=num_kept, kept=kept, text=text, addition=addition, own=own, whole=whole, rest=rest)
        )
        return dropped
