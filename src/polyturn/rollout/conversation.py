"""EpisodeHistory: one agent's line through an episode: its transcript, its turns, and how far it is in the limits' units.

    sample -> record -> next_prompt -> show -> sample -> …     what an episode does with it, turn after turn
    shorten     leave some of it out, where the context is full
    go_on       let the last message continue behind a text of the scheduler's
    mark, fork  a place in it, and a second line that goes on from there

Separate from the episode, which acts on the world: nothing here waits, calls foreign code, or knows of other lines. What all
lines of an episode leave together is its `EpisodeRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from polyturn.core.arrays import Ids
from polyturn.core.errors import SchedulerError
from polyturn.core.lifecycle import StopReason
from polyturn.core.messages import Message, Origin, with_origin
from polyturn.core.trajectory import Span, SpanRef
from polyturn.rollout.history import shorten
from polyturn.rollout.limits import EpisodeProgress, Limits
from polyturn.rollout.open_turn import OpenTurn
from polyturn.rollout.scheduler import Reply
from polyturn.rollout.stop_strings import Stopped
from polyturn.rollout.transcript import Mark, Prompt, Transcript
from polyturn.tokens.codec import Codec


class EpisodeMark(NamedTuple):
    """A place in a conversation, right behind a turn."""

    transcript: Mark
    num_turns: int
    response_tokens: int
    num_user_turns: int
    tools: Mapping[str, Any] | None = None
    """What the tools kept there, where it was asked for; see `Episode.mark_with_tools`."""


class EpisodeHistory:
    """One history that the model is shown, with the turns that it took in it."""

    __slots__ = ("_codec", "_has_user_reply", "_response_tokens", "num_user_turns", "transcript", "turns")

    def __init__(self, transcript: Transcript, codec: Codec) -> None:
        """Begin with a transcript that has no turn yet."""
        self.transcript = transcript
        """The messages and the tokens."""
        self.turns: list[OpenTurn] = []
        """In order; a fork begins with those that there were before it."""
        self.num_user_turns = 0
        """How many replies of the interaction it has had."""
        self._codec = codec
        self._has_user_reply = False
        """Whether the last answer came from the interaction."""
        self._response_tokens = 0
        """Tokens after the first prompt, sampled and observed."""

    # Where it is.

    def progress(self, *, elapsed_s: float, prompt: Prompt | None = None) -> EpisodeProgress:
        """Return where it is in the units of the limits; with `prompt`, where it would be once that is shown."""
        return EpisodeProgress(
            elapsed_s=elapsed_s,
            turns=len(self.turns),
            user_turns=self.num_user_turns,
            has_user_reply=self._has_user_reply and self.transcript.has_pending,
            response_tokens=self._response_tokens + (0 if prompt is None else prompt.num_new),
            context_tokens=self.transcript.num_tokens if prompt is None else prompt.length,
        )

    def mark(self) -> EpisodeMark:
        """Return where it stands, right behind a turn; `fork(at=…)` goes on from there whatever came since."""
        return EpisodeMark(self.transcript.mark(), len(self.turns), self._response_tokens, self.num_user_turns)

    # What happens in it.

    def show(self, prompt: Prompt) -> None:
        """Show the model its next prompt; what is new belongs to the last turn, which drew it."""
        last = self.turns[-1] if self.turns else None
        ref = self.transcript.show(prompt, turn=-1 if last is None else last.index)
        if ref is not None and last is not None:
            last.spans.append(ref)
        self._response_tokens += prompt.num_new

    def sample(self, ended: Stopped, *, index: int, cut_by: StopReason) -> OpenTurn:
        """Append a completion, as it was sampled, and return the turn that it makes.

        Args:
            ended: The completion, and what ended it.
            index: The turn's number among all turns of the episode.
            cut_by: The limit that gave the completion its budget.
        """
        transcript, completion = self.transcript, ended.completion
        said_before = transcript.said
        message, spans = transcript.sample(completion, turn=index)
        turn = OpenTurn(
            index=index,
            message=message,
            completion=completion,
            cut_by=cut_by,
            text=transcript.text,
            said_before=said_before,
            num_tokens=len(completion.token_ids),
            spans=list(spans),
            stopped_by=ended.stop,
        )
        self._response_tokens += turn.num_tokens
        self.turns.append(turn)
        return turn

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
        self.transcript.answer(messages)
        self._has_user_reply = "interaction" in turn.timings
        self.num_user_turns += self._has_user_reply

    def weigh(self, turn: OpenTurn, weights: ArrayLike) -> None:
        """Set the loss weights of a turn's sampled tokens, one for all or one per token."""
        values = np.asarray(weights, np.float32)
        if values.ndim == 0:
            values = np.full(turn.num_tokens, values, np.float32)
        self.transcript.builder.reweigh(turn.sampled_spans, values)

    def go_on(self, addition: str | Sequence[int] | Ids, *, keep: str | int | None, is_trusted: bool) -> int:
        """Let the next turn continue the last assistant message behind `addition`; see `Episode.go_on`.

        Returns:
            How many sampled tokens were dropped.

        Raises:
            SchedulerError: there is no turn to continue, or it does not begin with what is to be kept.
        """
        if not self.turns:
            raise SchedulerError("there is no turn to go on with; `go_on` continues the last one")
        turn, transcript = self.turns[-1], self.transcript
        kept = transcript.kept_of(turn.completion, keep)
        added = addition if isinstance(addition, str) else np.asarray(addition, np.int32)
        dropped = transcript.builder.cut(turn.sampled_spans, keep=kept.num_tokens)
        self._response_tokens -= turn.num_tokens - kept.num_tokens
        if dropped:
            turn.num_tokens = kept.num_tokens
        turn.text, turn.is_continued = kept.text, True
        turn.message = transcript.read(turn.said_before + kept.text, turn=turn.index)
        last_id = int(turn.completion.token_ids[kept.num_tokens - 1]) if kept.num_tokens else None
        text = transcript.go_on(
            turn.said_before + kept.text, kept.rest, added, last_id=last_id, turn=turn.index, is_trusted=is_trusted
        )
        turn.observation += (Message(role="assistant", content=text, origin=Origin.ENVIRONMENT),)
        return dropped

    def shorten(self, limits: Limits) -> bool:
        """Apply the context policy; return whether the history was shortened so that the next turn fits.

        A history that was shortened is shown at once.
        """
        room, transcript = (limits.max_context or 0) - limits.reserve, self.transcript
        shorter = shorten(
            transcript.candidates(),
            policy=limits.context_policy,
            num_prompt=transcript.num_prompt,
            fits=lambda messages: transcript.length_of(messages) <= room,
        )
        if shorter is None:
            return False
        num_new = transcript.next_prompt().num_new
        transcript.answer(())
        transcript.rewrite(shorter)
        self.show(transcript.next_prompt()._replace(num_new=num_new))
        return True

    # A second line, and another process.

    def fork(
        self,
        *,
        agent: str | None = None,
        messages: Sequence[Message | Mapping[str, Any]] | None = None,
        at: EpisodeMark | None = None,
    ) -> EpisodeHistory:
        """Return a second line that goes on from here, or from `at`; with `agent`, one that begins with `messages`."""
        given = None if messages is None else self.transcript.typed(messages)
        transcript = self.transcript.fork(agent=agent, messages=given, at=None if at is None else at.transcript)
        other = EpisodeHistory(transcript, self._codec)
        if agent is not None:
            return other
        if at is not None:
            other.turns = self.turns[: at.num_turns]
            other._response_tokens, other.num_user_turns = at.response_tokens, at.num_user_turns
            return other
        other.turns = list(self.turns)
        other._response_tokens, other.num_user_turns = self._response_tokens, self.num_user_turns
        other._has_user_reply = self._has_user_reply
        return other

    def state(self) -> dict[str, Any]:
        """Return all that it holds but its turns, for `restore`."""
        return {
            "transcript": self.transcript.state(),
            "pending_user_reply": self._has_user_reply,
            "user_turns": self.num_user_turns,
            "response_tokens": self._response_tokens,
        }

    def restore(self, state: Mapping[str, Any], turns: Callable[[Callable[[SpanRef], Span]], Sequence[OpenTurn]]) -> None:
        """Stand where it stood that `state` was taken of.

        Args:
            state: What `state` returned.
            turns: Gives the turns, once it is told how to find their spans.
        """
        self.transcript.restore(state["transcript"])
        self._has_user_reply, self.num_user_turns = state["pending_user_reply"], state["user_turns"]
        self._response_tokens = state["response_tokens"]
        self.turns = list(turns(self.transcript.builder.span))
