"""HistoryState: messages and tokens of one conversation, and the way of a turn: next_prompt -> show -> sample.

What the model is shown next is one value:

    Append(messages)    held ids + the encoded new messages     the default: the model keeps all it wrote, reasoning included
    Continue(said, …)   held ids + a text or ids                the same assistant message goes on behind it
    Render(messages)    the template writes the whole history   after an edit; with `renders_history` before every turn
    Given(ids)          the caller's own ids                    for agents that write their prompts themselves

A rendered prompt extends the segment that it continues token for token; otherwise a new segment starts, in which what was
sampled before is prompt. Nothing is encoded before the next generation needs it, and sampled ids are never re-made.

Separate from `History`, in which schedulers edit, fork and replay it. Each thing that happens is an event, kept with the ids
and the messages that came of it:

    ("shown", …)  ("sampled", …)  ("answered", …)  ("edited", …)  ("given", …)  ("continued", …)  ("weighed", …)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.builder import BuilderState, TrajectoryBuilder
from polyturn.core.errors import SchedulerError, TemplateError
from polyturn.core.lifecycle import StopReason
from polyturn.core.media import Media
from polyturn.core.messages import Message, Origin, to_openai
from polyturn.core.trajectory import SpanRef, without_routes
from polyturn.rollout.edits import as_written
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.stop_strings import Stopped
from polyturn.tokens.delta import DeltaEncoder

NO_IDS = ids_array([])
_Result = TypeVar("_Result")


class Append(NamedTuple):
    """New messages behind the ids that are held."""

    messages: tuple[Message, ...] = ()


class Continue(NamedTuple):
    """The same assistant message goes on."""

    said: str
    """The text so far."""
    addition: Ids = NO_IDS
    """Ids behind those that are held."""


class Render(NamedTuple):
    """A full render of the history, which was edited, and of messages behind it."""

    messages: tuple[Message, ...] = ()
    last: Continue | None = None
    """The last message of the history, where it goes on."""


class Given(NamedTuple):
    """Ids that an agent wrote itself: the whole prompt, whatever the messages say."""

    ids: Ids
    messages: tuple[Message, ...] = ()
    """Kept in the history, not encoded."""


Next = Append | Continue | Render | Given


class Prompt(NamedTuple):
    """The next prompt of the model."""

    ids: Ids
    """The ids to append; the whole prompt if `is_whole`."""
    is_whole: bool
    num_new: int
    """Tokens that the environment adds, each counted once however often the history is rendered."""
    length: int
    """Tokens of the whole prompt."""
    media: tuple[Media, ...] = ()
    """The images and other media that `ids` show."""


class Mark(NamedTuple):
    """A place right behind a turn, to go on from when the history has gone on."""

    place: BuilderState
    messages: list[Message]
    """The history's own list, of which the first `num_messages` count: it only grows, and an edit replaces it."""
    num_messages: int
    num_prompt: int
    last_id: int | None
    is_canonical: bool
    num_turns: int
    response_tokens: int
    num_user_turns: int
    tools: Mapping[str, Any] | None = None
    """The tools' state there, where it was asked for; see `Episode.mark_with_tools`."""


Event = tuple[Any, ...]
"""The name of what happened, and its values: what a journal keeps."""


class HistoryState:
    """The state of a history, and the addition of a turn."""

    def __init__(self, encoder: DeltaEncoder, messages: Sequence[Message], *, renders_history: bool) -> None:
        """Begin with `messages` as the prompt; `History` says what the arguments mean."""
        self.builder = TrajectoryBuilder()
        self.turns: list[OpenTurn] = []
        """In order; a fork begins with those that there were before it."""
        self.events: list[Event] | None = None
        """The events since a journal last asked; None where none does."""
        self.prompt: tuple[Message, ...] | None = None
        """The first prompt, once it was shown."""
        self.prompt_tokens = 0
        """Number of its tokens."""
        self.num_cut = 0
        """Sampled tokens that were cut away, those of forks not counted."""
        self.num_user_turns = 0
        """Number of replies of the interaction."""
        self.is_canonical = not renders_history
        """Whether the held ids are meant to equal a full render of the messages."""
        self._encoder, self._renders_history = encoder, renders_history
        self._next: Next = Append()
        self._last_id: int | None = None
        self._rejoins = False
        """Another branch may have appended here: the next prompt looks for a segment that it continues."""
        self._written: list[tuple[Message, str]] = []
        """The model's text where it reasoned; shared with forks."""
        self._has_user_reply = False
        """Whether the last answer came from the interaction."""
        self._response_tokens = 0
        """Tokens after the first prompt, sampled and observed."""
        self._prompt(messages)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far, as the model is shown it."""
        return tuple(self._messages)

    @property
    def openai(self) -> list[dict[str, Any]]:
        """The same as OpenAI-style dicts, in a list of the caller's own."""
        return list(self._openai)

    @property
    def context(self) -> Ids:
        """[T] the ids of the next prompt, once it is shown."""
        return self.builder.context

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the context: prompts, completions and observations."""
        return self.builder.num_tokens

    @property
    def next(self) -> Next:
        """The form of the next prompt."""
        return self._next

    @property
    def to_encode(self) -> Sequence[Message]:
        """The messages that the next prompt encodes."""
        is_whole = not self.builder.is_open or isinstance(self._next, Render) or self._renders_history
        return (*self._messages, *self._waiting) if is_whole else self._waiting

    def _happened(self, *event: Any) -> None:
        if self.events is not None:
            self.events.append(event)

    def _happen(self, change: Callable[..., _Result], *values: Any) -> _Result:
        """Change the history by one of the methods below, and keep that as an event of the method's name."""
        result = change(*values)
        self._happened(change.__name__.removeprefix("_"), *values)
        return result

    @property
    def _waiting(self) -> tuple[Message, ...]:
        """The messages that wait to be shown."""
        return () if isinstance(self._next, Continue) else self._next.messages

    @property
    def _said(self) -> str | None:
        """The text so far of an assistant message that goes on; None where the next turn opens one."""
        last = self._next.last if isinstance(self._next, Render) else self._next
        return last.said if isinstance(last, Continue) else None

    # The way of a turn.

    def next_prompt(self) -> Prompt:
        """Encode what waits to be shown: the tokens between turns, the messages, the next generation prompt.

        Of a full render, held ids are kept that spell just what the template writes.

        Raises:
            TemplateError: the template cannot render it.
            SchedulerError: it cannot render the history that the scheduler wrote.
        """
        coming, waiting = self._next, self._waiting
        if isinstance(coming, Given):
            num_new = max(0, len(coming.ids) - self.num_tokens) if self.builder.is_open else 0
            return Prompt(coming.ids, True, num_new, len(coming.ids))
        edit = coming if isinstance(coming, Render) else None
        extend = functools.partial(self._encoder.extend, waiting, last_id=self._last_id, history=self._messages)
        if self.builder.is_open and edit is None and not (self._renders_history and waiting):
            ids = coming.addition if isinstance(coming, Continue) else extend() if waiting else NO_IDS
            return Prompt(ids, False, len(ids), self.num_tokens + len(ids), _media(waiting))
        messages = [*self._messages, *waiting]
        media = _media(messages)
        try:
            ids = self._encoder.start(as_written(messages[:-1] if edit and edit.last else messages, self._written))
        except TemplateError as problem:
            if edit is None:
                raise
            raise SchedulerError(f"the history that the scheduler wrote cannot be rendered: {problem}") from problem
        if edit is not None and edit.last is not None:
            ids = np.concatenate([ids, edit.last.addition])
        if not self.builder.is_open:
            return Prompt(ids, True, 0, len(ids), media)
        # From here on: what is new is counted as if it were appended, so that limits mean the same however it is rendered.
        held = self.context
        if self.builder.continues(ids, media=media):
            return Prompt(ids, True, len(ids) - len(held), len(ids), media)
        try:
            added = extend() if waiting else NO_IDS
        except TemplateError:  # this template cannot be added to
            return Prompt(ids, True, max(0, len(ids) - len(held)), len(ids), media)
        # The same text in other tokens than were sampled: the sampled ones stay, and the segment with them.
        if edit is None and self._spells(kept := np.concatenate([held, added]), ids):
            ids = kept
        return Prompt(ids, True, len(added), len(ids), media)

    def _spells(self, kept: Ids, rendered: Ids) -> bool:
        """Return whether both are the same text and the same control tokens, in whatever tokens."""
        codec = self._encoder.codec
        has_same_control = np.array_equal(codec.control_in(kept), codec.control_in(rendered))
        return has_same_control and codec.decode(kept) == codec.decode(rendered)

    def show(self, prompt: Prompt) -> None:
        """Show the model its next prompt; what is new belongs to the last turn, which drew it."""
        last, builder, waiting = self.turns[-1] if self.turns else None, self.builder, self._waiting
        turn = -1 if last is None else last.index
        ref: SpanRef | None = None
        if self.prompt is None:
            self.prompt, self.prompt_tokens = self.messages, prompt.length
        if prompt.is_whole:
            ref = builder.rewrite(prompt.ids, turn=turn, media=prompt.media)
        elif self._rejoins:  # whole, so that the builder looks for a segment that goes on like this, or opens one
            whole = np.concatenate([builder.context, prompt.ids])
            ref = builder.rewrite(whole, turn=turn, media=(*builder.media, *prompt.media))
        elif len(prompt.ids) or waiting:
            ref = builder.observe(prompt.ids, turn=turn)
            builder.add_media(*prompt.media)
        self._messages += waiting
        self._openai += to_openai(waiting)
        self._next = Append() if self._said is None else Continue(self._said)
        self._rejoins = False
        if ref is not None and last is not None:
            last.spans.append(ref)
        self._response_tokens += prompt.num_new
        span = None if ref is None else builder.span(ref)
        segment = builder.place.segment
        self._happened("shown", prompt.is_whole, segment, span, prompt.num_new, prompt.length, prompt.media)

    def sample(self, message: Message, text: str, ended: Stopped, *, index: int, cut_by: StopReason) -> OpenTurn:
        """Append a completion, as it was sampled, and return the turn that it makes.

        Args:
            message: What it reads as, with what the same message said before.
            text: What it reads as by itself.
            ended: The completion, and what ended it.
            index: The turn's number among all turns of the episode.
            cut_by: The limit that gave the completion its budget.
        """
        completion, said = ended.completion, self._said
        if said is not None:  # the message that went on is replaced by the whole of it
            self._messages.pop()
            self._openai.pop()
        self._messages.append(message)
        self._openai.append(message.to_openai())
        self._last_id = int(completion.token_ids[-1]) if len(completion.token_ids) else None
        if isinstance(self._next, Continue | Render):
            self._next = Append() if isinstance(self._next, Continue) else self._next._replace(last=None)
        turn = OpenTurn(
            index=index,
            message=message,
            completion=completion,
            cut_by=cut_by,
            text=text,
            said_before=said or "",
            num_tokens=len(completion.token_ids),
            spans=list(self.builder.sample(completion, turn=index)),
            stopped_by=ended.stop,
        )
        self.num_cut += ended.num_dropped
        self._response_tokens += turn.num_tokens
        self.turns.append(turn)
        if self.events is not None:
            # Routes go beside the spans, because they are also those of tokens before them.
            spans = [without_routes(self.builder.span(ref)) for ref in turn.spans]
            figures = (completion.finish_reason, completion.policy_versions, dict(completion.info))
            ends = (ended.stop, ended.num_dropped, index, cut_by)
            self._happened("sampled", message, text, spans, *figures, *ends, completion.routed_experts)
        return turn

    # Changes, each an event: to replay one is to call its method with the same values.

    def _answered(self, messages: Sequence[Message], is_user: bool) -> None:
        if not isinstance(self._next, Continue):
            self._next = self._next._replace(messages=tuple(messages))
        self._has_user_reply = is_user
        self.num_user_turns += is_user

    def _edited(self, messages: Sequence[Message], waiting: Sequence[Message], said: str | None, addition: Ids) -> None:
        self._messages, self._openai = list(messages), to_openai(messages)
        self._next = Render(tuple(waiting), None if said is None else Continue(said, addition))
        self.is_canonical = False

    def _named(self, agent: str) -> None:
        self.builder.agent = agent

    def _reasoned(self, message: Message, text: str) -> None:
        self._written.append((message, text))

    def _prompt(self, messages: Sequence[Message]) -> None:
        self._messages, self._openai = list(messages), to_openai(messages)
        self.num_prompt = len(self._messages)
        """Number of leading messages that are the prompt, which no context policy leaves out."""
        self._next = Append(self._waiting)

    def _given(self, ids: Ids) -> None:
        self._next, self.is_canonical = Given(ids), False

    def _continued(self, num_kept: int, kept: str, text: str, addition: Ids, own: Message, whole: Message) -> int:
        turn = self.turns[-1]
        dropped = self.builder.cut(turn.sampled_spans, keep=num_kept)
        self._response_tokens -= turn.num_tokens - num_kept
        if dropped:
            turn.num_tokens = num_kept
        self.num_cut += dropped
        turn.text, turn.is_continued, turn.message = kept, True, own
        turn.observation += (Message(role="assistant", content=text, origin=Origin.ENVIRONMENT),)
        self._messages[-1], self._openai[-1] = whole, whole.to_openai()
        self._next, self.is_canonical = Continue(turn.said_before + kept + text, addition), False
        return dropped


def _media(messages: Sequence[Message]) -> tuple[Media, ...]:
    return tuple(medium for message in messages for medium in message.media)
