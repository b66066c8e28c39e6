"""The edits of a history that schedulers and limits make between two turns. All of them are synchronous.

    rewrite          replaces the messages: the next prompt is a full render
    go_on            continues the same assistant message after a text or ids
    shorten_to_fit   leaves out messages if the context is full

Each edit makes one change of the history (`edit`, `continue_turn`), which is an event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from polyturn.core.arrays import Ids, ids_array
from polyturn.core.errors import SchedulerError
from polyturn.core.messages import Message, Origin
from polyturn.rollout.edits import kept_of, shorten
from polyturn.rollout.history import BOTH, History
from polyturn.rollout.limits import Limits
from polyturn.rollout.next_prompt import Continue, Given, Render


def rewrite(history: History, messages: Sequence[Message], *, goes_on: bool = False) -> None:
    """Replace the history: the next prompt is a full render of `messages` and of the waiting messages.

    Args:
        history: The history to edit.
        messages: The new messages.
        goes_on: Whether the next turn continues the last message, which must be an assistant's.

    Raises:
        SchedulerError: `messages` is empty, or the last one cannot be continued.
    """
    if not messages:
        raise SchedulerError("a history needs at least one message; keep the task's prompt, `episode.task.prompt`")
    if goes_on:
        if messages[-1].role != "assistant" or messages[-1].tool_calls or len(messages) == 1:
            raise SchedulerError(
                f"only an assistant message without calls that follows other messages can go on; the last one is "
                f"{messages[-1].to_openai()!r:.120}"
            )
        if history.waiting:
            raise SchedulerError(BOTH)
        own = messages[-1].text if messages[-1].origin is Origin.MODEL else ""
        history.edit(messages, (), Continue(messages[-1].text, own, _continuation(history, messages[-1])))
    elif history.builder.is_open:
        history.edit(messages, history.waiting)
    else:
        history.set_prompt(messages)


def go_on(history: History, addition: str | Sequence[int] | Ids, *, keep: str | int | None, is_trusted: bool) -> int:
    """Let the next turn continue the last assistant message after `addition`; see `Episode.go_on`.

    Returns:
        The number of sampled tokens that were dropped.

    Raises:
        SchedulerError: there is no turn to continue, its text does not begin with `keep`, or the history was rewritten
            since.
    """
    if not history.turns:
        raise SchedulerError("there is no turn to go on with; `go_on` continues the last one")
    if isinstance(history.next, Render):
        raise SchedulerError("the history was rewritten before `go_on`; pass `goes_on=True` to `rewrite` instead")
    if history.waiting:
        raise SchedulerError(BOTH)
    turn, codec = history.turns[-1], history.encoder.codec
    left = turn.completion.token_ids[: history.builder.num_before(history.sampled_spans(turn))]
    kept_before = len(turn.own_before) + len(turn.text)  # of an earlier call, whose addition this one replaces
    kept = kept_of(codec, left, keep, rest=history.next.own[kept_before:] if isinstance(history.next, Continue) else "")
    last_id = int(left[kept.num_tokens - 1]) if kept.num_tokens else None
    rest = (kept.rest, Origin.MODEL)
    if isinstance(addition, str):
        origin = Origin.OWNER if is_trusted else Origin.ENVIRONMENT
        ids, text = history.encoder.continuation(rest, (addition, origin), last_id=last_id), kept.rest + addition
    else:
        added = np.asarray(addition, np.int32)
        ids = ids_array(np.concatenate([history.encoder.continuation(rest, last_id=last_id), added]))
        text = kept.rest + codec.decode(added)
    text_so_far, own_so_far = turn.said_before + kept.text, turn.own_before + kept.text
    own = history.read(text_so_far, turn=turn.index, own=own_so_far)
    whole = history.read(text_so_far + text, turn=turn.index, own=own_so_far + kept.rest)
    if not own.tool_calls:  # a scheduler may have parsed calls in a format that the parser does not support
        calls = tuple(call for call in turn.message.tool_calls if call.raw and call.raw in kept.text + kept.rest)
        own = dataclasses.replace(own, tool_calls=calls)
    return history.continue_turn(kept.num_tokens, kept.text, text, ids, own, whole, kept.rest)


def shorten_to_fit(history: History, limits: Limits) -> bool:
    """Apply the context policy, and return whether it shortened the history so that the next turn fits.

    The ids of a shortened history become the context at once. A prompt from `show_ids` is never shortened.
    """
    if isinstance(history.next, Given):
        return False
    room = (limits.max_context or 0) - limits.reserve
    shorter = shorten(
        [*history.messages, *history.waiting],
        policy=limits.context_policy,
        num_prompt=history.num_prompt,
        fits=lambda messages: history.length_of(messages) <= room,
    )
    if shorter is None:
        return False
    # Count new tokens before the edit: the limits count all tokens of observations, even those that the edit leaves out.
    num_new, last = history.next_prompt().num_new, history.last
    if last is not None:
        last = last._replace(addition=_continuation(history, shorter[-1]))
    history.edit(shorter, (), last)
    history.append_prompt(history.next_prompt()._replace(num_new=num_new))
    return True


def _continuation(history: History, message: Message) -> Ids:
    """Encode the text of an assistant message, to be appended to the generation prompt; the next turn continues it."""
    return history.encoder.continuation((message.text, message.origin or Origin.ENVIRONMENT))
