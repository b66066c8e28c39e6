"""TrajectoryBuilder: the only object that appends tokens to a trajectory.

It keeps one growing buffer per segment, so that a turn costs O(new tokens) however long the history is, and hands the
engine a read-only view of it: the prompt that the engine sees *is* the prefix of the training sample (I1).

    builder.open(prompt_ids)                     segment 0: PROMPT
    builder.sample(completion, turn=0)           segment 0: PROMPT SAMPLED
    builder.observe(feedback_ids, turn=0)        segment 0: PROMPT SAMPLED OBSERVATION
    builder.rewrite(edited_ids, turn=1)          segment 1: PROMPT, a branch of segment 0 (or segment 0 goes on)
    other = builder.fork()                       a second position; the one that appends second opens a segment

A builder is a position in the segments of an episode. Forks share the segments and have positions of their own. At the end
of a segment a token is appended to it; elsewhere a new segment starts, whose prompt replays everything before. So a sampled
token is in exactly one segment as sampled, and in others at most as prompt (I4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from polyturn.core.arrays import Floats, Ids, float_array, ids_array
from polyturn.core.errors import AlignmentError
from polyturn.core.generation import Completion
from polyturn.core.routing import fill
from polyturn.core.trajectory import Branch, Segment, Span, SpanRef, SpanSource


@dataclass(slots=True)
class _Open:
    """A segment that still grows: one id buffer with spare room, and the spans so far."""

    agent: str
    parent: Branch | None
    buffer: Ids = field(default_factory=lambda: np.empty(256, np.int32))
    length: int = 0
    spans: list[Span] = field(default_factory=list)
    media: list[Any] = field(default_factory=list)
    pinned: int = 0
    """The place of the furthest fork: tokens before it are in its context and stay."""
    routed: int = 0
    """Number of tokens up to the first whose experts are unknown."""

    @property
    def ids(self) -> Ids:
        view = self.buffer[: self.length]
        view.flags.writeable = False
        return view

    def append(self, span: Span) -> None:
        end = self.length + len(span)
        if end > len(self.buffer):
            grown = np.empty(max(end, 2 * len(self.buffer)), np.int32)
            grown[: self.length] = self.buffer[: self.length]
            self.buffer = grown  # views that engines still hold keep the old buffer, which no longer changes
        self.buffer[self.length : end] = span.ids
        self.length = end
        self.spans.append(span)

    def route(self, routes: Any, *, first: int) -> None:
        """Note the experts of the tokens from `first` on that have none yet; touches no span before them."""
        if first < 0:
            raise AlignmentError(f"{len(routes)} tokens came with routes where {first + len(routes)} are known")
        end = self.length
        for index in reversed(range(len(self.spans))):
            span = self.spans[index]
            begin, low = end - len(span), max(first, end - len(span))
            part = routes[low - first : end - first]
            if end <= first:
                break
            if len(part):
                routes_so_far = fill(span.routed_experts, len(span), part, at=low - begin)
                self.spans[index] = dataclasses.replace(span, routed_experts=routes_so_far)
            end = begin
        if first <= self.routed:
            self.routed = max(self.routed, first + len(routes))

    def routes(self, length: int) -> Any | None:
        """Return the experts of the first `length` tokens, as far as they are known without a gap."""
        known = Segment(spans=tuple(self.spans)).routed_experts if self.routed else None
        return None if known is None else known[: min(length, self.routed)]

    def truncate(self, length: int) -> None:
        self.routed = min(self.routed, length)
        self.buffer = self.buffer[: self.length].copy()  # views that are still held keep the old tokens
        self.length = length


class BuilderState(NamedTuple):
    """A place in a builder, from which `fork` goes on after the builder itself has gone on."""

    segment: int
    length: int
    num_media: int


class TrajectoryBuilder:
    """Collects the tokens of one episode into segments."""

    def __init__(self, *, agent: str = "assistant") -> None:
        self.agent = agent
        self._segments: list[_Open] = []
        self._current = -1
        self._length = 0
        """Number of tokens of the current segment before this place."""
        self._num_media = 0
        """Number of its media that are shown before this place."""
        self._origin: Branch | None = None
        """The place from which another agent was called."""

    @property
    def context(self) -> Ids:
        """[T] the ids before this place, as a read-only view: what the engine is asked to continue."""
        view = self._open_segment().buffer[: self._length]
        view.flags.writeable = False
        return view

    @property
    def num_tokens(self) -> int:
        """Number of tokens before this place."""
        return self._length

    @property
    def num_routed(self) -> int:
        """Number of tokens before this place, up to the first whose experts are unknown."""
        return min(self._open_segment().routed, self._length)

    @property
    def media(self) -> tuple[Any, ...]:
        """The images and other media that the context shows."""
        return tuple(self._open_segment().media[: self._num_media]) if self._num_media else ()

    @property
    def is_open(self) -> bool:
        """Whether this place is in a segment; a new builder, and another agent's, must `open` one first."""
        return self._current >= 0

    @property
    def place(self) -> BuilderState:
        """The current place of this builder."""
        return BuilderState(self._current, self._length, self._num_media)

    def fork(self, *, agent: str | None = None, at: BuilderState | None = None) -> TrajectoryBuilder:
        """Return a second place to append at.

        Args:
            agent: None goes on from here; another name starts without context, and its first segment remembers that it was
                called from here.
            at: A place where this builder stood, to go on from instead of here; nothing before it may have been cut since.
        """
        self._open_segment()
        here = at or self.place
        segment = self._segments[here.segment]
        segment.pinned = max(segment.pinned, here.length)
        other = TrajectoryBuilder(agent=agent or self.agent)
        other._segments = self._segments  # the list itself: what either appends, both may go on from
        if agent is None:
            other._current, other._length, other._num_media = here
        else:
            other._origin = Branch(self._current, self._length)
        return other

    def rename(self, agent: str) -> None:
        """Let what comes from here on be another agent's: its first segment remembers that it went on from here."""
        self._origin = Branch(self._current, self._length)
        self.agent = agent

    def open(self, ids: ArrayLike, *, turn: int = -1, parent: Branch | None = None) -> SpanRef:
        """Start a segment with the prompt `ids` and make it the one that grows; what it shares with its parent went to the
        same experts."""
        routes = None if parent is None else self._segments[parent.segment].routes(parent.length)
        self._segments.append(_Open(agent=self.agent, parent=parent))
        self._current, self._length, self._num_media = len(self._segments) - 1, 0, 0
        ref = self._append(Span(ids=ids_array(ids), source=SpanSource.PROMPT, turn=turn))
        if routes is not None:
            self._segments[self._current].route(routes, first=0)
        return ref

    def sample(self, completion: Completion, *, turn: int, weights: ArrayLike | None = None) -> tuple[SpanRef, ...]:
        """Append a completion exactly as it was sampled; k policy versions become k spans.

        Args:
            completion: What the engine returned.
            turn: The turn it belongs to.
            weights: [len(completion.token_ids)] weights in the loss; None trains every token with weight 1.

        Raises:
            AlignmentError: `weights` has another length, or there are more routes than tokens.
        """
        ids = completion.token_ids
        chosen: Floats | None = None if weights is None else float_array(weights)
        if chosen is not None and len(chosen) != len(ids):
            raise AlignmentError(f"turn {turn}: {len(chosen)} weights for {len(ids)} sampled tokens; they must be as many")
        starts = [start for start, _ in completion.policy_versions]
        ends = [*starts[1:], len(ids)]
        refs = []
        for (start, version), end in zip(completion.policy_versions, ends, strict=True):
            refs.append(
                self._append(
                    Span(
                        ids=ids[start:end],
                        source=SpanSource.SAMPLED,
                        turn=turn,
                        logprobs=None if completion.logprobs is None else completion.logprobs[start:end],
                        support=None if completion.support is None else completion.support[start:end],
                        policy_version=version,
                        weights=None if chosen is None else chosen[start:end],
                    )
                )
            )
        if (routes := completion.routed_experts) is not None:
            # The last token was never fed, so the routes end with the one before it.
            self._segments[self._current].route(routes, first=self._length - 1 - len(routes))
        return tuple(refs)

    def observe(self, ids: ArrayLike, *, turn: int) -> SpanRef:
        """Append what the environment and the template added after turn `turn`; these tokens weigh 0."""
        return self._append(Span(ids=ids_array(ids), source=SpanSource.OBSERVATION, turn=turn))

    def rewrite(self, ids: ArrayLike, *, turn: int, media: Sequence[Any] = ()) -> SpanRef | None:
        """Continue from the full prompt `ids`, which shows `media`, wherever it came from.

        It extends the longest segment of the agent that it continues token for token, showing the same media; when none
        does, a new segment starts, which remembers where it branched. Nothing is repaired or re-aligned.

        Returns:
            The span that was added; None when `ids` is exactly the segment so far.
        """
        new = ids_array(ids)
        best = -1  # the longest that fits, so that as few sampled tokens as possible are replayed as prompt
        for index, segment in enumerate(self._segments):
            is_longest = segment.agent == self.agent and (best < 0 or segment.length > self._segments[best].length)
            if is_longest and self._continues(segment, new) and segment.media == list(media[: len(segment.media)]):
                best = index
        if best >= 0:
            segment = self._segments[best]
            self._current, self._length, self._num_media = best, segment.length, len(segment.media)
            rest = new[self._length :].copy()  # a view would keep the whole prompt alive in the span
            ref = self.observe(rest, turn=turn) if len(rest) else None
        else:
            ref = self.open(new, turn=turn, parent=self._parent_of(new))
        self.add_media(*media[self._num_media :])
        return ref

    def continues(self, ids: ArrayLike, *, media: Sequence[Any] = ()) -> bool:
        """Return whether the full prompt `ids`, which shows `media`, goes on token for token from what stands here."""
        new = ids_array(ids)
        if not self.is_open or len(new) < self._length or self.media != tuple(media[: self._num_media]):
            return False
        return bool(np.array_equal(self.context, new[: self._length]))

    def cut(self, refs: Sequence[SpanRef], *, keep: int) -> int:
        """Drop all but the first `keep` tokens of the completion that was sampled last; return how many are gone.

        Where a fork stands behind them they stay, for they are in its context, and only this place goes back: then 0.

        Raises:
            AlignmentError: something follows the completion, it was not sampled here, or it has fewer tokens.
        """
        segment = self._open_segment()
        spans = [self.span(ref) for ref in refs]
        total = sum(map(len, spans))
        if any(r.segment != self._current for r in refs) or any(s.source is not SpanSource.SAMPLED for s in spans):
            raise AlignmentError("only a completion that was sampled into the segment that grows now can be cut")
        if not 0 <= keep <= total:
            raise AlignmentError(f"a completion of {total} tokens cannot keep {keep}")
        if keep == total:
            return 0
        is_last = self._length == segment.length and bool(refs) and refs[-1].span == len(segment.spans) - 1
        start = self._length - total
        if segment.pinned > start + keep:
            self._length = start + keep
            return 0
        if not is_last:
            raise AlignmentError("a completion that something follows cannot be cut any more; rewrite the history instead")
        left = keep
        for ref, span in zip(refs, spans, strict=True):
            size = min(left, len(span))
            left -= size
            segment.spans[ref.span] = dataclasses.replace(
                span,
                ids=span.ids[:size],
                logprobs=None if span.logprobs is None else span.logprobs[:size],
                support=None if span.support is None else span.support[:size],
                weights=None if span.weights is None else span.weights[:size],
                routed_experts=None if span.routed_experts is None else span.routed_experts[:size],
            )
        segment.truncate(start + keep)
        self._length = segment.length
        return total - keep

    def reweigh(self, refs: Sequence[SpanRef], weights: ArrayLike) -> None:
        """Set the weights of sampled spans that are already there, `weights` running over all of them in order.

        Raises:
            AlignmentError: a span was not sampled, the lengths differ, or a weight is not finite.
        """
        chosen = float_array(weights)
        if len(odd := chosen[~np.isfinite(chosen)]):
            raise AlignmentError(f"a sampled token was given the loss weight {odd[0]}; give finite ones")
        spans = [self.span(ref) for ref in refs]
        for span in spans:
            if span.source is not SpanSource.SAMPLED:
                raise AlignmentError(f"this {span.source.value} span cannot be weighted; only sampled tokens can be trained")
        total = sum(len(span) for span in spans)
        if len(chosen) != total:
            raise AlignmentError(f"{len(chosen)} weights for {total} sampled tokens; they must be as many")
        start = 0
        for ref, old in zip(refs, spans, strict=True):
            end = start + len(old)
            self._segments[ref.segment].spans[ref.span] = dataclasses.replace(old, weights=chosen[start:end])
            start = end

    def add_media(self, *items: Any) -> None:
        """Attach images or other media to the segment that grows now; call it behind the tokens that show them."""
        if items:
            self._grow_here().media.extend(items)
            self._num_media += len(items)

    def span(self, ref: SpanRef) -> Span:
        """Return the span that `ref` names."""
        return self._segments[ref.segment].spans[ref.span]

    def build(self) -> tuple[Segment, ...]:
        """Return the segments so far, as records."""
        return tuple(
            Segment(spans=tuple(s.spans), media=tuple(s.media), agent=s.agent, parent=s.parent) for s in self._segments
        )

    def _open_segment(self) -> _Open:
        if not self._segments:
            raise AlignmentError("there is no segment yet; call `open` with the prompt first")
        return self._segments[self._current]

    def _grow_here(self) -> _Open:
        """Return the segment that ends at this place; where the current one has gone on without us, a new one is opened."""
        segment = self._open_segment()
        if self._length == segment.length:
            return segment
        media = self.media
        self.open(self.context.copy(), parent=Branch(self._current, self._length))
        self._segments[self._current].media.extend(media)
        self._num_media = len(media)
        return self._segments[self._current]

    def _append(self, span: Span) -> SpanRef:
        segment = self._grow_here()
        segment.append(span)
        self._length = segment.length
        return SpanRef(self._current, len(segment.spans) - 1)

    def _continues(self, segment: _Open, ids: Ids) -> bool:
        return len(ids) >= segment.length and bool(np.array_equal(segment.ids, ids[: segment.length]))

    def _parent_of(self, ids: Ids) -> Branch | None:
        """Return the segment of this agent that shares most with `ids`; for another agent's first, where it was called."""
        parent, shared = None, 0
        for index, segment in enumerate(self._segments):
            common = _common_prefix(segment.ids, ids) if segment.agent == self.agent else 0
            if common > shared:
                parent, shared = Branch(index, common), common
        if parent is None and self._origin is not None:
            origin = self._segments[self._origin.segment].ids[: self._origin.length]
            return Branch(self._origin.segment, _common_prefix(origin, ids))
        return parent


def _common_prefix(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix of `a` and `b`."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
