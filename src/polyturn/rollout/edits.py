"""Pure functions for the edits of a history: shortening it to fit the context, cutting a completion that goes on,
writing reasoning into the content again, and finding the author of a message that comes back as a dict.

    shorten     prompt a0 o0 a1 o1 a2 o2   --drop_oldest-->   prompt a1 o1 a2 o2
                prompt a0 o0 a1 o1 a2 o2   --compact------>   prompt a0 [left out] a1 [left out] a2 o2
    kept_of     ids [The][ answer][ is][ 8][.], keep "The answer i"   ->   ids [The][ answer], and the text " i" beyond them
    as_written  reasoning "2 + 2 is 4.", content "4"   ->   content "<think>2 + 2 is 4.</think>\\n4", in parts

The newest observation always stays, because the model has not seen it yet. Sampled ids are never cut inside a token and
never re-encoded: `kept_of` keeps the longest run of ids whose text does not exceed the text to keep, and the remaining text
becomes an addition like any other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from polyturn.core.arrays import Ids
from polyturn.core.errors import SchedulerError
from polyturn.core.messages import Message, Origin, with_origin
from polyturn.rollout.limits import ContextPolicy
from polyturn.tokens.codec import Codec
from polyturn.tokens.frames import origin_of

LEFT_OUT = "[left out to save space]"
_LEAST_FIRST = (Origin.ENVIRONMENT, Origin.MODEL, Origin.OWNER)


def shorten(
    messages: Sequence[Message],
    *,
    policy: ContextPolicy,
    num_prompt: int,
    fits: Callable[[Sequence[Message]], bool],
) -> list[Message] | None:
    """Return the longest shortened history that fits; None if the policy cannot make it fit.

    Args:
        messages: The prompt, then turns and their observations, the newest observation last.
        policy: Selects what may be left out.
        num_prompt: Number of leading messages that are the task's prompt, which always stays.
        fits: Whether a history leaves room for at least one sampled token.
    """
    prompt, rest = list(messages[:num_prompt]), list(messages[num_prompt:])
    starts = [i for i, m in enumerate(rest) if m.role == "assistant"]
    if policy is ContextPolicy.STOP or not starts:
        return None
    for newest in range(1, len(starts)):  # try to leave out as little as possible
        if policy is ContextPolicy.DROP_OLDEST:
            candidate = prompt + rest[starts[newest] :]
        else:
            older = [m if m.role == "assistant" else _left_out(m) for m in rest[: starts[newest]]]
            candidate = prompt + older + rest[starts[newest] :]
        if fits(candidate):
            return candidate
    return None


def _left_out(message: Message) -> Message:
    is_short = len(message.text) <= len(LEFT_OUT) and not message.media
    return message if is_short else dataclasses.replace(message, content=LEFT_OUT)


class Kept(NamedTuple):
    """The part of a completion that stays."""

    num_tokens: int
    """Number of sampled ids that stay."""
    text: str
    """The text of these ids."""
    rest: str
    """The text to keep that follows these ids, because the cut is inside a token."""


def kept_of(codec: Codec, ids: Ids, keep: str | int | None, *, rest: str = "") -> Kept:
    """Return the part of a completion that stays when its message goes on.

    Args:
        codec: Decodes the ids.
        ids: [N] the sampled ids of the last completion.
        keep: A prefix of the completion's text, or a number of tokens; None keeps all but the token that ends the turn.
        rest: The text to keep that followed these ids after an earlier cut.

    Raises:
        SchedulerError: the completion does not begin with `keep`, or has fewer tokens.
    """
    ends = len(ids) > 0 and int(ids[-1]) in codec.stop_token_ids
    total = len(ids) - 1 if ends else len(ids)
    text = codec.decode(ids[:total])
    if keep is None:
        return Kept(total, text, rest)
    if isinstance(keep, int):
        if not 0 <= keep <= len(ids):
            raise SchedulerError(f"a completion of {len(ids)} tokens cannot keep {keep} of them")
        count = min(keep, total)
        return Kept(count, codec.decode(ids[:count]), "")
    if not (whole := text + rest).startswith(keep):
        raise SchedulerError(
            f"the turn cannot keep {keep[:80]!r}, because its text is {whole[:80]!r}; keep a prefix of `turn.text`, or edit "
            "the history with `rewrite`"
        )
    low, high = 0, total  # finds the largest number of ids whose text is a prefix of `keep`
    while low < high:
        middle = (low + high + 1) // 2
        if len(codec.decode(ids[:middle])) <= len(keep):
            low = middle
        else:
            high = middle - 1
    while low and not keep.startswith(codec.decode(ids[:low])):
        low -= 1  # a character that is cut in the middle decodes to a different one
    kept = codec.decode(ids[:low])
    return Kept(low, kept, keep[len(kept) :])


def as_written(messages: Sequence[Message], *, opened: str) -> Sequence[Message]:
    """Return messages with their reasoning in the content, as the model wrote it, for templates without a reasoning field.

    A message whose reasoning or content was changed by a plug-in is returned unchanged.

    Args:
        messages: The messages to render.
        opened: The beginning of the reasoning that the generation prompt writes, which completions therefore lack.
    """
    return [m if not m.reasoning or m.written is None else _with_reasoning(m, m.written, opened) for m in messages]


_THOUGHT = re.compile(r"(\s*)<think>(.*?)(?:(</think>)(.*))?", re.DOTALL)


def _with_reasoning(message: Message, text: str, opened: str) -> Message:
    """Return the message with `text` as its content, in parts for the reasoning and the answer; calls are left out.

    If the parsed fields of the message do not match `text`, the message is returned unchanged.
    """
    text = text if text.lstrip().startswith("<think>") else opened + text
    if message.text:
        start = text.rfind(message.text)
        if start < 0:  # calls split the content into pieces
            return message
        text = text[: start + len(message.text)]
    elif message.tool_calls:
        raw = message.tool_calls[0].raw
        if not raw or raw not in text:
            return message
        text = text.partition(raw)[0].rstrip()
    match = _THOUGHT.fullmatch(text)
    if match is None:
        return message
    before, thought, closing, after = match.groups()
    if thought.strip() != (message.reasoning or "").strip() or (after or "").strip() != message.text.strip():
        return message
    parts = (
        {"type": "text", "text": before},
        {"type": "reasoning", "text": thought, "is_open": closing is None},
        {"type": "text", "text": after or ""},
    )
    return dataclasses.replace(message, content=parts, reasoning=None)


def with_known_origin(messages: Sequence[Message], earlier: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages for a history that already has `earlier`, each with its origin set.

    A message without an origin that equals one of `earlier` is replaced by that one; each earlier message is used once. A
    message without a match is the environment's. If equal earlier messages have different origins, the least trusted of
    these origins is used.
    """
    if all(m.origin is not None for m in messages):
        return tuple(messages)
    known: dict[str, list[Message]] = {}
    for one in earlier:
        known.setdefault(repr(one.to_openai()), []).append(one)

    def taken(message: Message) -> Message:
        same = known.get(repr(message.to_openai()), [])
        least = min(same, key=lambda m: _LEAST_FIRST.index(origin_of(m)), default=message)
        if all(origin_of(m) is origin_of(least) for m in same):
            return same.pop(0) if same else message
        return least

    return with_origin([m if m.origin is not None else taken(m) for m in messages], Origin.ENVIRONMENT)
