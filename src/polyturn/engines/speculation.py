"""Speculative decoding by lookup: tokens that followed the same context before are drafted, and one forward pass checks all.

Agents repeat themselves: the syntax of a call, the line with which a kind of turn begins, an answer of the last epoch. A
decoding step may therefore feed some drafted tokens behind the last known one. Every position is sampled from its own logits
with its own uniform number, as it would be in a step of its own, and a sample stands as long as the drafts before it are
what was sampled. So drafts change how many forward passes there are, and not what is drawn. (Leviathan et al., 2023, arXiv
2211.17192, draft with a smaller model and accept by a ratio of probabilities; drafts that are looked up need neither.)

Free of torch: this is bookkeeping on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Place: TypeAlias = tuple[list[int], int]
"""Ids of some request, and an index into them."""

CONTEXTS = (12, 4)
"""Numbers of last tokens that are looked up, the longer context first."""
MAX_ENTRIES = 2**16
"""Contexts of one generation; the oldest of two is forgotten as a whole when the newer one is full."""
MAX_WIDTH = 16
"""Tokens of one request in one decoding step, at most."""
FORGET = 0.99
"""By how much what was measured of acceptance and of unused widths fades with every step."""


class Drafts:
    """The n-grams of earlier requests, and the width at which a decoding step pays.

    A step of width w feeds every request its last token and up to w - 1 drafted ones. With a share a of drafts that turn
    out right it is expected to yield (1 - a^w) / (1 - a) tokens. What it costs is measured: seconds, by how many tokens
    a step feeds, in powers of two; a size not yet tried is taken to cost as much as the next smaller one.
    """

    def __init__(self) -> None:
        self._young: dict[int, Place] = {}
        self._old: dict[int, Place] = {}
        self._right = self._wrong = 1.0
        self._seconds: dict[int, float] = {}

    @property
    def num_contexts(self) -> int:
        """Contexts that can be looked up."""
        return len(self._young) + len(self._old)

    def after(self, ids: list[int]) -> Place | None:
        """Return the place behind the last tokens of `ids` in a request that has ended; None if it is unknown."""
        for length in CONTEXTS:
            key = hash(tuple(ids[-length:]))
            if span := self._young.get(key) or self._old.get(key):
                return span
        return None

    def learn(self, ids: list[int], *, start: int) -> None:
        """Note what followed what in the ids of a request that has ended, from index `start` on."""
        if len(self._young) >= MAX_ENTRIES:
            self._young, self._old = {}, self._young
        for at in range(start, len(ids)):
            for length in CONTEXTS:
                self._young[hash(tuple(ids[max(0, at - length) : at]))] = (ids, at)

    def count(self, *, right: bool) -> None:
        """Note whether a token was the one that would have been drafted."""
        self._right, self._wrong = FORGET * self._right + right, FORGET * self._wrong + (not right)

    def width(self, available: Sequence[int]) -> int:
        """Return the number of tokens that a step should feed each request, of which `available` drafts exist."""
        accepted = self._right / (self._right + self._wrong + 0.1)  # below 1, also behind thousands that were right
        best, best_pace, width = 1, 0.0, 1
        while width <= MAX_WIDTH:
            tokens = sum((1 - accepted ** (1 + min(width - 1, most))) / (1 - accepted) for most in available)
            pace = tokens / self._cost(width * len(available))
            if pace > best_pace:
                best, best_pace = width, pace
            if width > max(available):
                break
            width *= 2
        return best

    def took(self, num_tokens: int, seconds: float) -> None:
        """Note that a step that fed `num_tokens` took so long."""
        size = num_tokens.bit_length()
        known = self._seconds.get(size, seconds)
        # A width that once was slow by chance is never tried again; fading, it comes to look worth a try.
        for larger in self._seconds:
            if larger > size:
                self._seconds[larger] *= FORGET
        self._seconds[size] = (known + seconds) / 2

    def _cost(self, num_tokens: int) -> float:
        tried = [size for size in self._seconds if size <= num_tokens.bit_length()]
        return self._seconds[max(tried)] if tried else min(self._seconds.values(), default=1.0)


class Follower:
    """One request beside an earlier one that said the same so far."""

    __slots__ = ("_drafts", "_place", "_said", "_start")

    def __init__(self, drafts: Drafts, prompt: Sequence[int]) -> None:
        self._drafts = drafts
        self._said = list(prompt[-max(CONTEXTS) :])
        self._start = len(self._said)
        self._place = drafts.after(self._said)

    def drafted(self, most: int) -> list[int]:
        """Return at most `most` tokens that are expected next."""
        if self._place is None or most < 1:
            return []
        ids, at = self._place
        return ids[at : at + most]

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the tokens that were sampled."""
        for token in tokens:
            span, self._place = self._place, None
            self._said.append(token)
            if span is not None:
                ids, at = span
                is_right = ids[at] == token
                self._drafts.count(right=is_right)
                if is_right and at + 1 < len(ids):
                    self._place = (ids, at + 1)
            if self._place is None:
                self._place = self._drafts.after(self._said)

    def end(self) -> None:
        """Let later requests draft what this one said."""
        self._drafts.learn(self._said, start=self._start)
