"""Transcript: one place in an episode's history, as messages and as the tokens that the model is shown.

Separate from the episode, which acts on the world, because this is where it is decided what the next prompt is:

    append    held ids + the encoded new messages     the default: the model keeps all it wrote, reasoning included
    continue  held ids + a text or ids                the same assistant message goes on behind it
    render    the template writes the whole history   `renders_history`, and after any edit (`rewrite`)
    given     the caller's own ids                    `show_ids`, for agents that write their prompts themselves

A rendered prompt extends the segment that it continues token for token; otherwise a new segment starts, in which what was
sampled before is prompt. Nothing is encoded before the next generation needs it, and sampled ids are never re-made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.builder import BuilderState, TrajectoryBuilder
from polyturn.core.errors import SchedulerError, TemplateError
from polyturn.core.generation import Completion
from polyturn.core.media import Media
from polyturn.core.messages import Message, Origin, to_openai, with_origin
from polyturn.core.trajectory import SpanRef
from polyturn.rollout.as_written import AsWritten
from polyturn.rollout.kept import Kept, kept_of
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import ToolCallParser

NO_IDS = ids_array([])


class Prompt(NamedTuple):
    """What the model is going to be shown."""

    ids: Ids
    """What is appended; the whole prompt if `is_whole`."""
    is_whole: bool
    num_new: int
    """Tokens that the environment adds, each counted once however often the history is rendered."""
    length: int
    """Tokens of the whole prompt."""
    media: tuple[Media, ...] = ()
    """The images and other media that `ids` show."""


class Mark(NamedTuple):
    """A place in a transcript right behind a turn, to be taken up again when the transcript has gone on."""

    place: BuilderState
    messages: list[Message]
    """The transcript's own list, of which the first `num_messages` count: it only grows, and an edit replaces it."""
    num_messages: int
    num_prompt: int
    last_id: int | None
    is_canonical: bool


class Transcript:
    """The history of one agent up to one place."""

    def __init__(
        self,
        encoder: DeltaEncoder,
        parser: ToolCallParser,
        messages: Sequence[Message],
        *,
        renders_history: bool = False,
        builder: TrajectoryBuilder | None = None,
    ) -> None:
        """Begin with `messages` as the prompt.

        Args:
            encoder: Of the tools that the agent may call.
            parser: Reads what the model wrote.
            messages: The prompt.
            renders_history: Render the whole history before every turn, as an inference server does.
            builder: Where the tokens go; a fork of another transcript's.
        """
        self.builder = builder or TrajectoryBuilder()
        self.is_canonical = not renders_history
        """Whether the held ids are meant to equal a full render of the messages."""
        self._encoder = encoder
        self._parser = parser
        self._renders_history = renders_history
        self._set_prompt(messages)
        self._pending: tuple[Message, ...] = ()
        self._last_id: int | None = None
        self._is_edited = False
        self._given: Ids | None = None
        """The whole next prompt, where the caller wrote it."""
        self._rejoins = False
        """Another branch may have appended here: the next prompt looks for a segment that it continues."""
        self._is_open_message = False
        self._said = ""
        """The text so far of the assistant message that goes on, while `_is_open_message`."""
        self._addition = NO_IDS
        self._written = AsWritten()
        """What the model wrote where it reasoned; shared with forks."""
        self.text = ""
        """What was sampled last, as text."""

    # Reading.

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
        """How many tokens the model has been shown and has written."""
        return self.builder.num_tokens

    @property
    def has_pending(self) -> bool:
        """Whether messages wait to be shown."""
        return bool(self._pending)

    @property
    def said(self) -> str:
        """What the assistant message that goes on says already; "" when the next turn opens one."""
        return self._said if self._is_open_message else ""

    def mark(self) -> Mark:
        """Return where it stands, right behind a turn."""
        messages = self._messages
        return Mark(self.builder.place, messages, len(messages), self.num_prompt, self._last_id, self.is_canonical)

    # Writing. None of these encodes a message.

    def list_tools(self, encoder: DeltaEncoder) -> None:
        """Let prompts that are rendered from now on list the tools of `encoder`."""
        self._encoder = encoder

    def extend_prompt(self, messages: Sequence[Message]) -> None:
        """Add messages to the prompt, before it is shown."""
        if messages:
            self._set_prompt([*self._messages, *messages])

    def typed(self, messages: Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
        """Return messages for this history as values, each with who wrote it.

        Where nobody says it, a message that says what one of this history says is that one, each of them once, and any
        other is the environment's.
        """
        read = [Message.from_openai(m) for m in messages]
        if any(m.origin is None for m in read):
            known: dict[str, list[Message]] = {}
            for held in (*self._messages, *self._pending):
                known.setdefault(repr(held.to_openai()), []).append(held)
            read = [m if m.origin is not None else _taken(known, m) for m in read]
        return with_origin(read, Origin.ENVIRONMENT)

    def answer(self, messages: tuple[Message, ...]) -> None:
        """Let `messages` be shown before the next turn.

        Raises:
            SchedulerError: the assistant message is to go on.
        """
        if messages and self._is_open_message:
            raise SchedulerError("a step that lets the assistant message go on cannot answer it with messages as well")
        self._pending = with_origin(messages, Origin.ENVIRONMENT)

    def rewrite(self, messages: Sequence[Message], *, goes_on: bool = False) -> None:
        """Replace the history: the next prompt is a full render of `messages` and of what waits to be shown.

        Args:
            messages: The new history.
            goes_on: The next turn continues the last message, which must be an assistant's.

        Raises:
            SchedulerError: there is no message, or the last one cannot be continued.
        """
        if not messages:
            raise SchedulerError("a history needs at least one message; keep the task's prompt, `episode.task.prompt`")
        self._is_open_message, self._addition = goes_on, NO_IDS
        if goes_on:
            if messages[-1].role != "assistant" or messages[-1].tool_calls or len(messages) == 1:
                raise SchedulerError(
                    f"only an assistant message without calls, behind other messages, can go on; the last one is "
                    f"{messages[-1].to_openai()!r:.120}"
                )
            self._said = messages[-1].text
            self._addition = self._encoder.continuation((self._said, messages[-1].origin or Origin.ENVIRONMENT))
        if not self.builder.is_open and not goes_on:
            self._set_prompt(messages)
            return
        self._messages = list(messages)
        self._openai = to_openai(messages)
        self._is_edited = True
        self.is_canonical = False

    def show_ids(self, ids: Ids) -> None:
        """Let `ids` be the whole next prompt, whatever the messages say."""
        self._given = ids_array(ids)
        self._pending, self._is_open_message, self._addition = (), False, NO_IDS
        self.is_canonical = False

    def sample(self, completion: Completion, *, turn: int) -> tuple[Message, tuple[SpanRef, ...]]:
        """Append a completion as it was sampled; return how it reads, and its spans."""
        self.text = text = self._encoder.codec.decode_turn(completion.token_ids)
        if self._is_open_message:
            text = self._said + text
            self._messages.pop()
            self._openai.pop()
        self._is_open_message = False
        message = self.read(text, turn=turn)
        self._messages.append(message)
        self._openai.append(message.to_openai())
        self._last_id = int(completion.token_ids[-1]) if len(completion.token_ids) else None
        return message, self.builder.sample(completion, turn=turn)

    def read(self, text: str, *, turn: int) -> Message:
        """Read a text as a message. Text is a view: nothing that is read here becomes tokens again."""
        parsed = self._parser.parse(text, id_prefix=f"call_{turn}", tools=self._encoder.tools)
        message = Message(
            role="assistant",
            content=parsed.content,
            tool_calls=parsed.tool_calls,
            reasoning=parsed.reasoning,
            origin=Origin.MODEL,
        )
        codec = self._encoder.codec
        if parsed.reasoning and not codec.has_reasoning_field:
            opened = "" if text.lstrip().startswith("<think>") else codec.opened_reasoning
            self._written.add(message, opened + text)
        return message

    def go_on(
        self, said: str, rest: str, addition: str | Ids, *, last_id: int | None, turn: int, is_trusted: bool = False
    ) -> str:
        """Let the next turn continue the assistant message, which says `said`, behind `rest` and `addition`.

        Args:
            said: The text that the message keeps; its tokens are those that the builder holds now.
            rest: What it keeps beyond them, because that ends inside a token.
            addition: What follows it, a masked observation.
            last_id: The last token that it keeps.
            turn: The last turn.
            is_trusted: Whether the run's owner wrote the text, who may mean its tags; given ids are as they are.

        Returns:
            What is added, as text.

        Raises:
            SchedulerError: the history was edited, which decides by itself what goes on.
        """
        if self._is_edited:
            raise SchedulerError("the history was rewritten before `go_on`; pass `goes_on=True` to `rewrite` instead")
        if isinstance(addition, str):
            origin = Origin.OWNER if is_trusted else Origin.ENVIRONMENT
            self._addition = self._encoder.continuation((rest, Origin.MODEL), (addition, origin), last_id=last_id)
            text = rest + addition
        else:
            held = self._encoder.continuation((rest, Origin.MODEL), last_id=last_id)
            self._addition = ids_array(np.concatenate([held, addition]))
            text = rest + self._encoder.codec.decode(addition)
        self._said, self._is_open_message, self.is_canonical = said + text, True, False
        self._messages[-1] = self.read(self._said, turn=turn)
        self._openai[-1] = self._messages[-1].to_openai()
        return text

    def kept_of(self, completion: Completion, keep: str | int | None) -> Kept:
        """Say what stays of the last completion when its message goes on; see `rollout.kept`.

        Raises:
            SchedulerError: the completion does not begin like that, or has fewer tokens.
        """
        return kept_of(self._encoder.codec, completion, keep)

    # To a journal and back.

    def state(self) -> dict[str, Any]:
        """Return all it holds but the encoder, for `restore`; messages, spans and media are the records themselves."""
        return {
            "builder": self.builder.state(),
            "messages": list(self._messages),
            "num_prompt": self.num_prompt,
            "pending": self._pending,
            "last_id": self._last_id,
            "is_canonical": self.is_canonical,
            "is_edited": self._is_edited,
            "given": self._given,
            "rejoins": self._rejoins,
            "is_open_message": self._is_open_message,
            "said": self._said,
            "addition": self._addition,
            "written": list(self._written.pairs),
            "text": self.text,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where the transcript stood that `state` was taken of."""
        self.builder = TrajectoryBuilder.from_state(state["builder"])
        self._set_prompt(state["messages"])
        self.num_prompt = state["num_prompt"]
        self._pending, self._last_id = tuple(state["pending"]), state["last_id"]
        self.is_canonical, self._is_edited = state["is_canonical"], state["is_edited"]
        self._given, self._rejoins = state["given"], state["rejoins"]
        self._is_open_message, self._said, self._addition = state["is_open_message"], state["said"], state["addition"]
        self._written = AsWritten(state["written"])
        self.text = state["text"]

    # What the model is shown next.

    @property
    def waiting(self) -> Sequence[Message]:
        """The messages that the next prompt encodes."""
        is_whole = not self.builder.is_open or self._is_edited or self._renders_history
        return (*self._messages, *self._pending) if is_whole else self._pending

    def next_prompt(self) -> Prompt:
        """Encode what waits to be shown: the tokens between turns, the messages, the next generation prompt.

        Raises:
            TemplateError: the template cannot render it.
        """
        if self._given is not None:
            return Prompt(self._given, True, max(0, len(self._given) - self.num_tokens), len(self._given))
        if not self.builder.is_open or self._is_edited or (self._renders_history and self._pending):
            return self._rendered()
        ids = self._addition if self._is_open_message else NO_IDS
        if self._pending:
            ids = self._encoder.extend(self._pending, last_id=self._last_id, history=self._messages)
        return Prompt(ids, False, len(ids), self.num_tokens + len(ids), _media(self._pending))

    def show(self, prompt: Prompt, *, turn: int) -> SpanRef | None:
        """Append what `next_prompt` returned, and the messages to the history; return the span, if any was added."""
        ref: SpanRef | None = None
        if prompt.is_whole:
            ref = self.builder.rewrite(prompt.ids, turn=turn, media=prompt.media)
        elif self._rejoins:
            whole = np.concatenate([self.builder.context, prompt.ids])
            ref = self.builder.rewrite(whole, turn=turn, media=(*self.builder.media, *prompt.media))
        elif len(prompt.ids) or self._pending:
            ref = self.builder.observe(prompt.ids, turn=turn)
            self.builder.add_media(*prompt.media)
        self._messages += self._pending
        self._openai += to_openai(self._pending)
        self._pending, self._addition, self._is_edited, self._given = (), NO_IDS, False, None
        self._rejoins = False
        return ref

    def fork(
        self, *, agent: str | None = None, messages: Sequence[Message] | None = None, at: Mark | None = None
    ) -> Transcript:
        """Return one that goes on from here, or from `at`, by itself; with `agent`, one that begins with `messages`."""
        held = self._messages if at is None else at.messages[: at.num_messages]
        other = Transcript(
            self._encoder,
            self._parser,
            held if messages is None else messages,
            renders_history=self._renders_history,
            builder=self.builder.fork(agent=agent, at=None if at is None else at.place),
        )
        if agent is not None:
            return other
        if at is not None:
            other._written, other._rejoins = self._written, True
            other.num_prompt, other.is_canonical, other._last_id = at.num_prompt, at.is_canonical, at.last_id
            return other
        other._written = self._written
        other.num_prompt, other.is_canonical, other._last_id = self.num_prompt, self.is_canonical, self._last_id
        other._is_open_message, other._said, other._addition = self._is_open_message, self._said, self._addition
        other._pending, other._is_edited = self._pending, self._is_edited
        if messages is not None:
            other._pending, other._is_open_message, other._addition = (), False, NO_IDS
            other._is_edited, other.is_canonical = True, False
        return other

    def full_render(self) -> Ids:
        """Return the ids of the whole conversation as the template writes it, for the sanity check."""
        return self._encoder.full(self._written.of(self._messages))

    def candidates(self) -> list[Message]:
        """Return the history and what waits to be shown, for a policy that leaves some of it out."""
        return [*self._messages, *self._pending]

    def length_of(self, messages: Sequence[Message]) -> int:
        """Return how many tokens the prompt of `messages` has."""
        return len(self._encoder.start(self._written.of(messages)))

    def _set_prompt(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)
        self._openai = to_openai(messages)
        self.num_prompt = len(self._messages)
        """How many leading messages are the prompt, which no context policy leaves out."""

    def _rendered(self) -> Prompt:
        """Render the whole history; keep held ids that spell just what the template writes."""
        messages = [*self._messages, *self._pending]
        media = _media(messages)
        try:
            shown = self._written.of(messages[:-1] if self._is_open_message else messages)
            ids = self._encoder.start(shown)
        except TemplateError as problem:
            if not self._is_edited:
                raise
            raise SchedulerError(f"the history that the scheduler wrote cannot be rendered: {problem}") from problem
        if self._is_open_message:
            ids = np.concatenate([ids, self._addition])
        if not self.builder.is_open:
            return Prompt(ids, True, 0, len(ids), media)
        held = self.builder.context
        if self.builder.continues(ids, media=media):
            return Prompt(ids, True, len(ids) - len(held), len(ids), media)
        added = self._appended()
        if added is None:
            return Prompt(ids, True, max(0, len(ids) - len(held)), len(ids), media)
        if not self._is_edited:
            kept = np.concatenate([held, added])
            if self._spells(kept, ids):
                ids = kept
        return Prompt(ids, True, len(added), len(ids), media)

    def _appended(self) -> Ids | None:
        """Encode what waits as an addition; None where this template cannot be added to."""
        if not self._pending:
            return NO_IDS
        try:
            return self._encoder.extend(self._pending, last_id=self._last_id, history=self._messages)
        except TemplateError:
            return None

    def _spells(self, kept: Ids, rendered: Ids) -> bool:
        """Return whether both are the same text and the same control tokens, in whatever tokens."""
        codec = self._encoder.codec
        return np.array_equal(codec.control_in(kept), codec.control_in(rendered)) and codec.decode(kept) == codec.decode(
            rendered
        )


def _taken(known: Mapping[str, list[Message]], message: Message) -> Message:
    """Return the message of a history that says what this one says, which is then taken; this one where there is none.

    Of those that say the same, none is trusted more than the others.
    """
    same = known.get(repr(message.to_openai()), [])
    least = next((m for m in same if m.origin is Origin.ENVIRONMENT), None)
    return least or (same.pop(0) if same else message)


def _media(messages: Sequence[Message]) -> tuple[Media, ...]:
    return tuple(medium for message in messages for medium in message.media)
