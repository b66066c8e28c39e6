"""Finds the tokens that end assistant turns, by rendering sample conversations.

There are two kinds: the tokens at which the model stops, and those that end a past turn in a history. A template may use
different tokens for the two, and others again for a turn with calls. It may also write nothing at the end of a turn; then
the token that opens the next turn ends it. Two renders show what a template does, one in which the assistant turn is the
last message ("alone") and one in which another message follows it ("followed"):

    alone     …Paris.<|im_end|>\\n        followed  …Paris.<|im_end|>\\n<|im_start|>user…  ends with <|im_end|>
    alone     …Paris.<|return|>           followed  …Paris.<|end|><|start|>user…          stops with <|return|>, past <|end|>
    alone     …Paris.                     followed  …Paris.<|user|>…                      stops with the next opener
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from polyturn.core.messages import Message, ToolCall
from polyturn.tokens.template import ChatTemplate

ANCHOR = "Zq0anchorZ"


class ControlSpan(NamedTuple):
    """A control token in a text."""

    start: int
    end: int
    id: int


class Renderer(Protocol):
    """The methods of a codec that `find_turn_ends` uses."""

    @property
    def template(self) -> ChatTemplate:
        """Writes messages as text."""
        ...

    def control_spans(self, text: str) -> list[ControlSpan]:
        """Return the control tokens in a template text, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """The tokens at the end of assistant turns."""

    stops: tuple[int, ...]
    """The tokens with which the model ends a turn: after text, after calls, after reasoning."""
    past: tuple[int, ...]
    """The tokens that end past turns in a history. They may be the same as `stops` or others."""
    closing: frozenset[int]
    """The tokens of `past`, and the control tokens that the template writes directly after them."""
    openers: bool
    """Whether the template writes nothing after a turn, so that the stop tokens are those that open the next turn."""
    behind_calls: int | None = None
    """The stop token after a turn with calls, which opens the tool's turn; None unless `openers`."""


def find_turn_ends(codec: Renderer) -> TurnEnds:
    """Find the ends of turns from renders of turns with text, with calls and with reasoning, alone and followed."""
    user = Message(role="user", content="Hi")
    call = ToolCall(id="call_0_0", name="probe", arguments={"x": ANCHOR})
    plain = Message(role="assistant", content=ANCHOR)
    calling = Message(role="assistant", content=ANCHOR, tool_calls=(call,))
    thinking = Message(role="assistant", content=ANCHOR, reasoning="Hm")
    result = Message(role="tool", content="4", tool_call_id=call.id, name=call.name)

    closes_user = _closing_of_user(codec)
    stops: list[int] = []
    past: list[int] = []
    closing: set[int] = set()
    has_end, behind_calls = False, None
    for turn, answers in ((plain, (user,)), (calling, (result, user)), (thinking, (user,))):
        alone = behind_anchor(codec.template.try_render([user, turn]), ANCHOR)
        followed = None
        for answer in answers:
            followed = behind_anchor(codec.template.try_render([user, turn, answer], add_generation_prompt=True), ANCHOR)
            if followed is not None:
                break
        if alone is None or followed is None:
            continue
        spans, later = codec.control_spans(alone), codec.control_spans(followed)
        common = common_length(alone, followed)
        shared = [s for s in spans if s.end <= common]
        if turn is plain:
            if shared:
                has_end = True
                run = _run(shared)
                stops += run
                past.append(run[0])
                closing.update(run)
            elif spans and later and later[0].id == closes_user:
                has_end = True
                stops.append(spans[0].id)
                past.append(later[0].id)
            else:  # nothing, or only the end of the document
                stops += [s.id for s in (*spans[:1], *later[:1])]
        elif not has_end:
            opener = next((s.id for s in later if s.start >= common), None)
            stops += [] if opener is None else [opener]
            behind_calls = opener if turn is calling else behind_calls
        elif shared and turn is calling:
            known = [s.id for s in shared if s.id in past]
            end = known[0] if known else shared[-1].id
            stops.append(end)
            past.append(end)
        elif turn is thinking and spans and spans[0].id not in past:
            stops.append(spans[0].id)
    closing.update(past)
    return TurnEnds(
        stops=tuple(dict.fromkeys(stops)),
        past=tuple(dict.fromkeys(past)),
        closing=frozenset(closing),
        openers=not has_end,
        behind_calls=behind_calls,
    )


def _run(spans: Sequence[ControlSpan]) -> list[int]:
    """Return the first token and all tokens that follow it without text in between."""
    run = [spans[0].id]
    for left, right in itertools.pairwise(spans):
        if left.end != right.start:
            break
        run.append(right.id)
    return run


def common_length(a: str, b: str) -> int:
    """Return the length of the common prefix of `a` and `b`, in characters."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def behind_anchor(text: str | None, anchor: str) -> str | None:
    """Return the text after the last `anchor` in `text`; None if there is no anchor."""
    if text is None:
        return None
    _, before, behind = text.rpartition(anchor)
    return behind if before else None


def split_turn(alone: str | None, followed: str, ends: TurnEnds, codec: Renderer) -> int | None:
    """Return the position in `followed` where the model's text ends and the template's begins.

    Return None if there is no such position, because the template ends the turn differently when messages follow it.

    Args:
        alone: The text after the anchor if the turn is the last message; None if the template cannot render that.
        followed: The text after the anchor if messages follow the turn.
        ends: The tokens at the end of turns.
        codec: Finds control tokens.
    """
    if alone is None:
        spans = [s for s in codec.control_spans(followed) if s.id in ends.past]
        return spans[0].start if spans else None
    common = common_length(alone, followed)
    shared = [s for s in codec.control_spans(alone) if s.end <= common and s.id in ends.past]
    if shared:
        return shared[0].start
    closing = [s for s in codec.control_spans(alone) if s.id in ends.stops]
    # White space before the end belongs to the template, because the model ends its text with a token.
    rest = (alone[: closing[0].start] if closing else alone).rstrip()
    return len(rest) if followed.startswith(rest) else None


def _closing_of_user(codec: Renderer) -> int | None:
    """Return the token that closes every user message; None if there is none."""
    messages = Message(role="user", content=ANCHOR)
    alone = behind_anchor(codec.template.try_render([messages]), ANCHOR)
    opened = behind_anchor(codec.template.try_render([messages], add_generation_prompt=True), ANCHOR)
    if alone is None or opened is None:
        return None
    common = common_length(alone, opened)
    closing = [s for s in codec.control_spans(alone) if s.end <= common]
    return closing[0].id if closing else None
