"""TrajectoryBuilder: the only object that appends tokens to a trajectory.

It keeps one growing buffer per segment, so that a turn costs O(new tokens) however long the history is, and hands the
engine a read-only view of it: the prompt that the engine sees *is* the prefix of the training sample (I1 in
`docs/architecture.md`).

    builder.open(prompt_ids)                     segment 0: PROMPT
    builder.sample(completion, turn=0)           segment 0: PROMPT SAMPLED
    builder.observe(feedback_ids, turn=0)        segment 0: PROMPT SAMPLED OBSERVATION
    builder.set_prompt(edited_ids, turn=1)       segment 1: PROMPT, a branch of segment 0; or, if the ids extend
                                                 segment 0, OBSERVATION in segment 0
    other = builder.fork()                       a second position; the builder that appends second opens a segment

A builder is a position in the segments of an episode. Forks share the segments but have separate positions. If the position
is the end of a segment, new tokens are appended to that segment. Otherwise they start a new segment, whose prompt replays
everything before the position. So each token is SAMPLED in exactly one segment, and PROMPT in all others that have it (I4).
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
    """Number of tokens before the furthest fork: they are part of its context and cannot be cut."""
    routed: int = 0
    """Number of tokens before the first token whose experts are unknown."""

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
            self.buffer = grown  # engines may still read views of the old buffer, which stays as it is
        self.buffer[self.length : end] = span.ids
        self.length = end
        self.spans.append(span)

    def route(self, routes: Any, *, first: int) -> None:
        """Record the experts of the tokens from `first` on that have none yet; earlier spans do not change."""
        if first < 0:
            raise AlignmentError(f"the engine returned routes of {len(routes)} tokens, but was fed {first + len(routes)}")
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
        """Return the experts of the first `length` tokens, up to the first token whose experts are unknown."""
        known = Segment(spans=tuple(self.spans)).routed_experts if self.routed else None
        return None if known is None else known[: min(length, self.routed)]

    def truncate(self, length: int) -> None:
        self.routed = min(self.routed, length)
        self.buffer = self.buffer[: self.length].copy()  # a copy, because engines may still read views of the old buffer
        self.length = length


class BuilderState(NamedTuple):
    """A position of a builder. `fork` can continue from it after the builder has moved on."""

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
        """Number of tokens of the current segment before this position."""
        self._num_media = 0
        """Number of media of the current segment before this position."""
        self._origin: Branch | None = None
        """The position from which this agent was called; None for the first agent."""

    @property
    def context(self) -> Ids:
        """[T] the ids before this position, as a read-only view: the prompt of the next request to the engine."""
        view = self._open_segment().buffer[: self._length]
        view.flags.writeable = False
        return view

    @property
    def num_tokens(self) -> int:
        """Number of tokens before this position."""
        return self._length

    @property
    def num_routed(self) -> int:
        """Number of tokens before this position, up to the first token whose experts are unknown."""
        return min(self._open_segment().routed, self._length)

    @property
    def media(self) -> tuple[Any, ...]:
        """The images and other media of the context, in order."""
        return tuple(self._open_segment().media[: self._num_media]) if self._num_media else ()

    @property
    def is_open(self) -> bool:
        """Whether a segment is open here. A new builder, or a fork for another agent, must call `open` first."""
        return self._current >= 0

    @property
    def place(self) -> BuilderState:
        """The current position of this builder."""
        return BuilderState(self._current, self._length, self._num_media)

    def fork(self, *, agent: str | None = None, at: BuilderState | None = None) -> TrajectoryBuilder:
        """Return a second builder on the same segments, with a position of its own.

        Args:
            agent: None continues from here. Another name starts with an empty context; the parent of its first segment is
                this position.
            at: An earlier position of this builder to fork at; no token before it may have been cut since.
        """
        self._open_segment()
        here = at or self.place
        segment = self._segments[here.segment]
        segment.pinned = max(segment.pinned, here.length)
        other = TrajectoryBuilder(agent=agent or self.agent)
        other._segments = self._segments  # the same list: each builder may extend the segments of the other
        if agent is None:
            other._current, other._length, other._num_media = here
        else:
            other._origin = Branch(here.segment, here.length)
        return other

    def rename(self, agent: str) -> None:
        """Attribute everything from here on to `agent`; the parent of its first segment is this position."""
        self._origin = Branch(self._current, self._length)
        self.agent = agent

    def open(self, ids: ArrayLike, *, turn: int = -1, parent: Branch | None = None) -> SpanRef:
        """Start a segment with the prompt `ids` and move to its end. The experts of the prefix shared with `parent` are
        copied from there."""
        routes = None if parent is None else self._segments[parent.segment].routes(parent.length)
        self._segments.append(_Open(agent=self.agent, parent=parent))
        self._current, self._length, self._num_media = len(self._segments) - 1, 0, 0
        ref = self._append(Span(ids=ids_array(ids), source=SpanSource.PROMPT, turn=turn))
        if routes is not None:
            self._segments[self._current].route(routes, first=0)
        return ref

    def sample(self, completion: Completion, *, turn: int, weights: ArrayLike | None = None) -> tuple[SpanRef, ...]:
        """Append a completion exactly as it was sampled, with one span for each policy version.

        Args:
            completion: The answer of the engine.
            turn: The turn of the completion.
            weights: [len(completion.token_ids)] weights in the loss; None trains every token with weight 1.

        Raises:
            AlignmentError: `weights` has another length, or there are more routes than tokens.
        """
        ids = completion.token_ids
        chosen: Floats | None = None if weights is None else float_array(weights)
        if chosen is not None and len(chosen) != len(ids):
            raise AlignmentError(
                f"turn {turn}: {len(chosen)} weights for {len(ids)} sampled tokens; give one weight for each token"
            )
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
        """Append the tokens that the environment and the template added after turn `turn`; their loss weight is 0."""
        return self._append(Span(ids=ids_array(ids), source=SpanSource.OBSERVATION, turn=turn))

    def set_prompt(self, ids: ArrayLike, *, turn: int, media: Sequence[Any] = ()) -> SpanRef | None:
        """Continue from the complete prompt `ids` with its `media`.

        If a segment of this agent is a prefix of `ids` and has the same media, the longest such segment is extended.
        Otherwise a new segment starts, with the position where it branched as its parent. No ids are repaired or realigned.

        Returns:
            The added span; None if `ids` equals the segment.
        """
        new = ids_array(ids)
        best = -1  # the longest match, so that as few sampled tokens as possible are replayed as prompt
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
        """Return whether the context and media at this position are a prefix of the complete prompt `ids` and `media`."""
        new = ids_array(ids)
        if not self.is_open or len(new) < self._length or self.media != tuple(media[: self._num_media]):
            return False
        return bool(np.array_equal(self.context, new[: self._length]))

    def num_before(self, refs: Sequence[SpanRef]) -> int:
        """Return the number of tokens of the consecutive spans `refs` that are before this position in its segment."""
        if not refs or refs[0].segment != self._current:
            return 0
        start = sum(map(len, self._segments[refs[0].segment].spans[: refs[0].span]))
        return min(self._length - start, sum(len(self.span(ref)) for ref in refs))

    def cut(self, refs: Sequence[SpanRef], *, keep: int) -> int:
        """Drop all but the first `keep` tokens of the last sampled completion; return the number of dropped tokens.

        If a fork has these tokens in its context, they stay in the segment. Then only this builder moves back, and the
        result is 0.

        Raises:
            AlignmentError: the completion is not the last of this builder, or has fewer than `keep` tokens.
        """
        segment = self._open_segment()
        spans = [self.span(ref) for ref in refs]
        total = sum(map(len, spans))
        if any(r.segment != self._current for r in refs) or any(s.source is not SpanSource.SAMPLED for s in spans):
            raise AlignmentError("only sampled tokens of the current segment can be cut")
        if not 0 <= keep <= total:
            raise AlignmentError(f"a completion of {total} tokens cannot keep {keep}")
        if keep == total:
            return 0
        is_last = self._length == segment.length and bool(refs) and refs[-1].span == len(segment.spans) - 1
        start = self._length - self.num_before(refs)
        if segment.pinned > start + keep:
            self._length = start + keep
            return 0
        if not is_last:
            raise AlignmentError("only the last completion of a segment can be cut; rewrite the history instead")
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
        """Replace the loss weights of the sampled spans `refs`; `weights` covers their tokens in order.

        Raises:
            AlignmentError: a span was not sampled, the lengths differ, or a weight is not finite.
        """
        chosen = float_array(weights)
        if len(odd := chosen[~np.isfinite(chosen)]):
            raise AlignmentError(f"the loss weight of a sampled token is {odd[0]}; give finite weights")
        spans = [self.span(ref) for ref in refs]
        for span in spans:
            if span.source is not SpanSource.SAMPLED:
                raise AlignmentError(f"this {span.source.value} span cannot be weighted; only sampled tokens can be trained")
        total = sum(len(span) for span in spans)
        if len(chosen) != total:
            raise AlignmentError(f"{len(chosen)} weights for {total} sampled tokens; give one weight for each token")
        start = 0
        for ref, old in zip(refs, spans, strict=True):
            end = start + len(old)
            self._segments[ref.segment].spans[ref.span] = dataclasses.replace(old, weights=chosen[start:end])
            start = end

    def add_media(self, *items: Any) -> None:
        """Attach images or other media to the current segment; call this after appending the tokens that show them."""
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
        if not self.is_open:
            raise AlignmentError("there is no segment yet; call `open` with the prompt first")
        return self._segments[self._current]

    def _grow_here(self) -> _Open:
        """Return the segment that ends here; open a new one if a fork has extended the current segment."""
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
        """Return the branch from the segment of this agent with the longest prefix in common with `ids`.

        The first segment of a called agent branches from the position of the call.
        """
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
