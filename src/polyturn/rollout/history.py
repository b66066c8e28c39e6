"""History: the operations of schedulers and journals on a conversation: edits, forks, replay. Pure: nothing here waits.

    next_prompt -> show -> sample -> record | go_on | rewrite | show_ids -> next_prompt -> show -> …      turn after turn

None of these encodes a message before the next prompt is asked for (`history_state`), and each is an event. An event has the
ids and the messages that came of it, so `replay` of the events of one history, on a new one of the same prompt, leaves it
where the first one stood, without an encoder, a parser or a plug-in being asked again. A fork is a copy with a place of its
own in the same segments.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from polyturn.core.arrays import Floats, Ids, ids_array
from polyturn.core.errors import SchedulerError
from polyturn.core.generation import Completion, FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.media import Media
from polyturn.core.messages import Message, Origin, to_openai, with_origin
from polyturn.core.trajectory import Span
from polyturn.rollout.edits import as_written, kept_of, shorten, with_known_origin
from polyturn.rollout.history_state import NO_IDS, Append, Event, Given, HistoryState, Mark, Prompt, Render
from polyturn.rollout.limits import EpisodeProgress, Limits
from polyturn.rollout.open_turn import OpenTurn, Reply
from polyturn.rollout.stop_strings import Stopped
from polyturn.tokens.delta import DeltaEncoder
from polyturn.tokens.parsers import ToolCallParser


class History(HistoryState):
    """One history that the model is shown, with the turns that it took in it."""

    def __init__(
        self, encoder: DeltaEncoder, parser: ToolCallParser, messages: Sequence[Message], *, renders_history: bool = False
    ) -> None:
        """Begin with `messages` as the prompt.

        Args:
            encoder: Of the tools that the agent may call.
            parser: Reads what the model wrote.
            messages: The prompt.
            renders_history: Render the whole history before every turn, as an inference server does.
        """
        super().__init__(encoder, messages, renders_history=renders_history)
        self._parser = parser

    # Reading.

    def progress(self, *, elapsed_s: float, prompt: Prompt | None = None) -> EpisodeProgress:
        """Return where it is in the units of the limits; with `prompt`, where it would be once that is shown."""
        return EpisodeProgress(
            elapsed_s=elapsed_s,
            turns=len(self.turns),
            user_turns=self.num_user_turns,
            has_user_reply=self._has_user_reply and bool(self._waiting),
            response_tokens=self._response_tokens + (0 if prompt is None else prompt.num_new),
            context_tokens=self.num_tokens if prompt is None else prompt.length,
        )

    def mark(self) -> Mark:
        """Return where it stands, right behind a turn; `fork(at=…)` goes on from there whatever came since."""
        held = self._messages
        place = (self.builder.place, held, len(held), self.num_prompt, self._last_id, self.is_canonical)
        return Mark(*place, len(self.turns), self._response_tokens, self.num_user_turns)

    def typed(self, messages: Sequence[Message | Mapping[str, Any]]) -> tuple[Message, ...]:
        """Return messages for this history as values, each with who wrote it."""
        return with_known_origin([Message.from_openai(m) for m in messages], (*self._messages, *self._waiting))

    def full_render(self) -> Ids:
        """Return the ids of the whole conversation as the template writes it, for the sanity check."""
        return self._encoder.full(as_written(self._messages, self._written))

    def length_of(self, messages: Sequence[Message]) -> int:
        """Return how many tokens the prompt of `messages` has."""
        return len(self._encoder.start(as_written(messages, self._written)))

    def read_completion(self, ids: Ids, *, turn: int) -> tuple[Message, str]:
        """Read a completion as the message that goes on or begins with it; return that, and the completion's own text."""
        text = self._encoder.codec.decode_turn(ids)
        return self.read((self._said or "") + text, turn=turn), text

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
        if parsed.reasoning and not codec.template.has_reasoning_field:
            # What the generation prompt opened stands in no completion, and a history that is rendered lacks it.
            opened = "" if text.lstrip().startswith("<think>") else codec.opened_reasoning
            self._happen(self._reasoned, message, opened + text)
        return message

    # What happens in it. None of these encodes a message; each is an event.

    def list_tools(self, encoder: DeltaEncoder) -> None:
        """Let prompts that are rendered from now on list the tools of `encoder`."""
        self._encoder = encoder

    def play_as(self, agent: str) -> None:
        """Name its agent, before the prompt is shown."""
        self._happen(self._named, agent)

    def extend_prompt(self, messages: Sequence[Message]) -> None:
        """Add messages to the prompt, before it is shown."""
        if messages:
            self._happen(self._prompt, [*self._messages, *messages])

    def record(self, turn: OpenTurn, reply: Reply) -> None:
        """Keep what answered the turn; unless it ended the episode, the model is shown it before it speaks again.

        Raises:
            SchedulerError: the turn's message is to go on, which messages cannot answer as well.
        """
        messages = with_origin(reply.messages, Origin.ENVIRONMENT)
        turn.observation += messages
        turn.info.update(reply.info)
        turn.scores.update(reply.scores)
        if reply.is_done:
            return
        if messages and self._said is not None:
            raise SchedulerError(_BOTH)
        self._happen(self._answered, messages, "interaction" in turn.timings)

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
        if goes_on:
            if messages[-1].role != "assistant" or messages[-1].tool_calls or len(messages) == 1:
                raise SchedulerError(
                    f"only an assistant message without calls, behind other messages, can go on; the last one is "
                    f"{messages[-1].to_openai()!r:.120}"
                )
            if self._waiting:
                raise SchedulerError(_BOTH)
            self._happen(self._edited, list(messages), (), messages[-1].text, self._continuation(messages[-1]))
        elif self.builder.is_open:
            self._happen(self._edited, list(messages), self._waiting, None, NO_IDS)
        else:
            self._happen(self._prompt, list(messages))

    def show_ids(self, ids: Ids) -> None:
        """Let `ids` be the whole next prompt, whatever the messages say."""
        self._happen(self._given, ids_array(ids))

    def go_on(self, addition: str | Sequence[int] | Ids, *, keep: str | int | None, is_trusted: bool) -> int:
        """Let the next turn continue the last assistant message behind `addition`; see `Episode.go_on`.

        Returns:
            How many sampled tokens were dropped.

        Raises:
            SchedulerError: there is no turn to continue, it does not begin with what is to be kept, or the history was
                edited, which decides by itself what goes on.
        """
        if not self.turns:
            raise SchedulerError("there is no turn to go on with; `go_on` continues the last one")
        if isinstance(self._next, Render):
            raise SchedulerError("the history was rewritten before `go_on`; pass `goes_on=True` to `rewrite` instead")
        if self._waiting:
            raise SchedulerError(_BOTH)
        turn, codec = self.turns[-1], self._encoder.codec
        kept = kept_of(codec, turn.completion, keep)
        last_id = int(turn.completion.token_ids[kept.num_tokens - 1]) if kept.num_tokens else None
        rest = (kept.rest, Origin.MODEL)
        if isinstance(addition, str):
            origin = Origin.OWNER if is_trusted else Origin.ENVIRONMENT
            ids, text = self._encoder.continuation(rest, (addition, origin), last_id=last_id), kept.rest + addition
        else:
            added = np.asarray(addition, np.int32)
            ids = ids_array(np.concatenate([self._encoder.continuation(rest, last_id=last_id), added]))
            text = kept.rest + codec.decode(added)
        said = turn.said_before + kept.text
        own, whole = self.read(said, turn=turn.index), self.read(said + text, turn=turn.index)
        if not own.tool_calls:  # a scheduler may have read them, in a form that the parser does not know
            calls = tuple(call for call in turn.message.tool_calls if call.raw and call.raw in kept.text)
            own = dataclasses.replace(own, tool_calls=calls)
        return self._happen(self._continued, kept.num_tokens, kept.text, text, ids, own, whole)

    def weigh(self, turn: OpenTurn, weights: ArrayLike) -> None:
        """Set the loss weights of a turn's sampled tokens, one for all or one per token."""
        values = np.asarray(weights, np.float32)
        values = values if values.ndim else np.full(turn.num_tokens, values, np.float32)
        self.builder.reweigh(turn.sampled_spans, values)
        self._happened("weighed", turn.index, values)

    def shorten(self, limits: Limits) -> bool:
        """Apply the context policy; return whether the history was shortened so that the next turn fits.

        A history that was shortened is shown at once. Ids that an agent wrote itself are never shortened.
        """
        if isinstance(self._next, Given):
            return False
        room = (limits.max_context or 0) - limits.reserve
        shorter = shorten(
            [*self._messages, *self._waiting],
            policy=limits.context_policy,
            num_prompt=self.num_prompt,
            fits=lambda messages: self.length_of(messages) <= room,
        )
        if shorter is None:
            return False
        # Counted before the edit: what the environment added is as many tokens, however little of it is shown again.
        num_new, said = self.next_prompt().num_new, self._said
        self._happen(self._edited, shorter, (), said, NO_IDS if said is None else self._continuation(shorter[-1]))
        self.show(self.next_prompt()._replace(num_new=num_new))
        return True

    def _continuation(self, message: Message) -> Ids:
        """Return the ids of an assistant message behind the generation prompt, for the next turn to go on with."""
        return self._encoder.continuation((message.text, message.origin or Origin.ENVIRONMENT))

    def fork(
        self,
        *,
        agent: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        at: Mark | None = None,
    ) -> History:
        """Return a second history that goes on from here, or from `at`; with `agent`, one that begins with `messages`."""
        given = None if messages is None else self.typed(messages)
        # `_written` stays shared: a message that a fork shows again is told by its identity, whoever wrote it.
        other = copy.copy(self)
        other.events, other.num_cut = None, 0
        other.builder = self.builder.fork(agent=agent, at=None if at is None else at.place)
        if agent is not None:
            other.turns, other._written, other._next, other._last_id, other._rejoins = [], [], Append(), None, False
            other.is_canonical = not self._renders_history
            other._response_tokens, other.num_user_turns, other._has_user_reply = 0, 0, False
            other._prompt(given or ())
        elif at is not None:
            # A place further back, where another branch may have appended: hence `_rejoins`.
            other._messages, other.turns = at.messages[: at.num_messages], self.turns[: at.num_turns]
            other._openai = to_openai(other._messages)
            other._next, other._has_user_reply, other._rejoins = Append(), False, True
            other.num_prompt, other.is_canonical, other._last_id = at.num_prompt, at.is_canonical, at.last_id
            other._response_tokens, other.num_user_turns = at.response_tokens, at.num_user_turns
        else:
            other._messages, other._openai, other.turns = list(self._messages), list(self._openai), list(self.turns)
        if agent is None and given is not None:
            other._edited(given, (), None, NO_IDS)
        return other

    # Its events, once more.

    def replay(self, events: Sequence[Event]) -> None:
        """Apply the `events` of another history of the same prompt; nothing is encoded or parsed."""
        kept, self.events = self.events, None
        for name, *values in events:
            _REPLAYED[name](self, *values)
        self.events = kept

    def _shown(
        self, is_whole: bool, segment: int, span: Span | None, num_new: int, length: int, media: Sequence[Media]
    ) -> None:
        ids, held = NO_IDS if span is None else span.ids, self.builder.build()
        if is_whole and segment < len(held):
            ids = np.concatenate([held[segment].token_ids, ids])
        self.show(Prompt(ids, is_whole, num_new, length, tuple(media)))

    def _resampled(self, message: Message, text: str, spans: Sequence[Span], *rest: Any) -> None:
        finish, versions, info, stop, num_dropped, index, cut_by, *routes = rest
        given = [span.logprobs for span in spans if span.logprobs is not None]
        completion = Completion(
            token_ids=np.concatenate([span.ids for span in spans]),
            logprobs=np.concatenate(given) if given else None,
            finish_reason=FinishReason(finish),
            policy_versions=tuple((start, version) for start, version in versions),
            routed_experts=routes[0] if routes else None,
            info=info,
        )
        self.sample(message, text, Stopped(completion, stop, num_dropped), index=index, cut_by=StopReason(cut_by))

    def _weighed(self, index: int, weights: Floats) -> None:
        turn = next(turn for turn in self.turns if turn.index == index)
        self.builder.reweigh(turn.sampled_spans, weights)


_BOTH = "a step that lets the assistant message go on cannot answer it with messages as well"

_REPLAYED: dict[str, Callable[..., Any]] = {
    "named": HistoryState._named,
    "reasoned": HistoryState._reasoned,
    "prompt": HistoryState._prompt,
    "shown": History._shown,
    "sampled": History._resampled,
    "answered": HistoryState._answered,
    "edited": HistoryState._edited,
    "given": HistoryState._given,
    "continued": HistoryState._continued,
    "weighed": History._weighed,
}
