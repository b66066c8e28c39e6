"""Cuts texts to a number of characters or tokens, on the configured side.

    left    (truncated)...the end        right   the beginning...(truncated)        middle   the beg...(truncated)...he end

A cut never splits the text of a control token. Even of a very long text, only about as much as is kept is copied or encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyturn.core.errors import ConfigError
from polyturn.tokens.codec import Codec

TruncateSide = Literal["left", "right", "middle"]

_MARKS: dict[TruncateSide, str] = {
    "left": "(truncated)...",
    "right": "...(truncated)",
    "middle": "...(truncated)...",
}
_WINDOW = 256
"""Number of characters on either side of a cut that are searched for control texts."""
_CHARS_PER_TOKEN = 6
_MAX_CHARS_PER_TOKEN = 64
"""The encoded window stops growing once it exceeds this number of characters per kept token. If the tokens are longer, fewer
tokens than allowed may be kept."""


def check_side(side: str) -> None:
    """Check the name of a side.

    Raises:
        ConfigError: the name is unknown.
    """
    if side not in _MARKS:
        raise ConfigError(f"truncate_side is {side!r}; use 'left' (keeps the tail), 'right' (keeps the head) or 'middle'")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultLimit:
    """The maximum length of a text for the model; None means no limit."""

    max_chars: int | None = None
    max_tokens: int | None = None
    """Maximum number of tokens; requires the codec."""
    side: TruncateSide = "middle"
    codec: Codec | None = None

    def __post_init__(self) -> None:
        check_side(self.side)
        if self.max_tokens is not None and self.codec is None:
            raise ConfigError(
                f"max_result_tokens is {self.max_tokens} and there is no tokenizer to count with; give a codec"
            )

    def cut(self, text: str) -> str:
        """Return the part of `text` that satisfies both limits."""
        return self.cut_and_count(text)[0]

    def cut_and_count(self, text: str) -> tuple[str, int]:
        """Return the part of `text` that satisfies both limits, and how many characters are left out.

        A short cut may make the text longer, because of the mark in place of the rest.
        """

        def num_left_out(cut: str) -> int:
            return 0 if cut == text else len(text) + len(_MARKS[self.side]) - len(cut)

        cut = truncate(text, max_chars=self.max_chars, side=self.side, codec=self.codec)
        if self.max_tokens is not None and self.codec is not None:
            fewer = truncate_tokens(text, max_tokens=self.max_tokens, side=self.side, codec=self.codec)
            cut = max(cut, fewer, key=num_left_out)
        return well_formed(cut), num_left_out(cut)


def truncate(text: str, *, max_chars: int | None, side: TruncateSide = "middle", codec: Codec | None = None) -> str:
    """Return `text` with at most `max_chars` of its characters, and a mark in place of the rest.

    Args:
        text: The text.
        max_chars: Maximum number of characters to keep; None keeps all.
        side: The part to cut: "left" keeps the tail, "right" keeps the head, "middle" keeps half of each.
        codec: Finds the texts of control tokens, which are kept or dropped whole.
    """
    if max_chars is None or len(text) <= max_chars:
        return text
    tail = {"left": max_chars, "right": 0, "middle": max_chars // 2}[side]
    return _joined(text, _head_end(text, max_chars - tail, codec), _tail_start(text, len(text) - tail, codec), side)


def truncate_tokens(text: str, *, max_tokens: int | None, codec: Codec, side: TruncateSide = "middle") -> str:
    """Return `text` with at most `max_tokens` of its tokens, and an uncounted mark in place of the rest."""
    if max_tokens is None or 4 * len(text) <= max_tokens:
        return text  # no token is shorter than a byte
    tail = {"left": max_tokens, "right": 0, "middle": max_tokens // 2}[side]
    window = (max_tokens + 1) * _CHARS_PER_TOKEN
    while True:
        if window >= len(text):
            first = last = codec.token_spans(text)
            if len(first) <= max_tokens:
                return text
            offset = 0
            break
        first = codec.token_spans(text[:window]) if tail < max_tokens else []
        last = codec.token_spans(text[-window:]) if tail else []
        offset = len(text) - window
        if window > max_tokens * _MAX_CHARS_PER_TOKEN or min(len(s) for s in (first, last) if s) > max_tokens:
            break
        window *= 4
    head_end = _kept_head(first, max_tokens - tail)
    tail_start = offset + _kept_tail(last, tail) if tail else len(text)
    if head_end >= tail_start:  # tokens of hundreds of characters, of which the two windows keep all
        return text
    return _joined(text, _head_end(text, head_end, codec), _tail_start(text, tail_start, codec), side)


def well_formed(text: str) -> str:
    """Return `text` in a form that UTF-8 can encode: surrogate pairs are joined, single surrogates are replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _joined(text: str, head_end: int, tail_start: int, side: TruncateSide) -> str:
    if side == "left":
        return _MARKS[side] + text[tail_start:]
    if side == "right":
        return text[:head_end] + _MARKS[side]
    return f"{text[:head_end]}{_MARKS[side]}{text[tail_start:]}"


def _kept_head(spans: list[tuple[int, int]], count: int) -> int:
    """Return the end of the first `count` tokens, or of fewer if the next token shares a character with them."""
    count = min(count, len(spans))
    while 0 < count < len(spans) and spans[count][0] < spans[count - 1][1]:
        count -= 1
    return spans[count - 1][1] if count else 0


def _kept_tail(spans: list[tuple[int, int]], count: int) -> int:
    """Return the start of the last `count` tokens, or of fewer if the previous token shares a character with them."""
    at = max(0, len(spans) - count)
    while 0 < at < len(spans) and spans[at - 1][1] > spans[at][0]:
        at += 1
    return spans[at][0] if at < len(spans) else (spans[-1][1] if spans else 0)


def _head_end(text: str, end: int, codec: Codec | None) -> int:
    """Return the end of a head, moved from `end` so that it does not split a control text."""
    return min(end, _control_at(text, end, codec)[0])


def _tail_start(text: str, start: int, codec: Codec | None) -> int:
    """Return the start of a tail, moved from `start` so that it does not split a control text."""
    return max(start, _control_at(text, start, codec)[1])


def _control_at(text: str, at: int, codec: Codec | None) -> tuple[int, int]:
    """Return the start and end of the control text around `at`; (at, at) if there is none."""
    if codec is None or not 0 < at < len(text):
        return at, at
    low = max(0, at - _WINDOW)
    for span in codec.control_spans(text[low : at + _WINDOW]):
        if low + span.start < at < low + span.end:
            return low + span.start, low + span.end
    return at, at
