"""The records of a rollout: spans of tokens, segments, turns, the trajectory, the group.

Index t of every array describes token t. Only `batching/layout.py` shifts the arrays to prediction targets.

    segment   [ PROMPT ............ | SAMPLED turn 0 | OBSERVATION turn 0 | SAMPLED turn 1 ]
    weights     0 0 0 0 0 0 0 0 0 0   1 1 1 1 1 1 1    0 0 0 0 0 0 0 0 0    1 1 1 1 1 1 1

A `Span` holds ids, logprobs, weights and source together, so that they always have the same length; every array over a
segment is computed from its spans. One segment is one training sample. `parent` shows where a segment branched from
another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from polyturn.core.arrays import Floats, Ids, Record, Support, float_array, ids_array, joined_support, support_array
from polyturn.core.errors import AlignmentError, DataError
from polyturn.core.generation import FinishReason
from polyturn.core.lifecycle import StopReason
from polyturn.core.media import Media
from polyturn.core.messages import Message
from polyturn.core.reward import Reward
from polyturn.core.routing import Routes, blank_like, routes_array
from polyturn.core.task import Task

CUT_BY_REQUEST = "request_max_tokens"
"""Key in a turn's info: the `max_tokens` of a client's request, if it, and not a limit of the run, cut the completion."""


class SpanSource(Enum):
    """How a span's tokens came into the segment: as prompt, sampled by the model, or as an observation."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    OBSERVATION = "observation"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span(Record):
    """Consecutive tokens of one source, one turn and one policy version."""

    ids: NDArray[np.int32]
    source: SpanSource
    turn: int = -1
    """The turn that the tokens belong to; -1 for the first prompt of an agent, and for tokens that a fork replays as prompt.
    An observation belongs to the turn that it answers."""
    logprobs: NDArray[np.float32] | None = None
    """[len(ids)] log-probability of each sampled token under the engine's policy; None unless sampled."""
    support: Support | None = None
    """[len(ids), K] the tokens that each sampled token was drawn from; None unless the run records them."""
    policy_version: int | None = None
    """The version of the weights that sampled the tokens; None unless sampled."""
    weights: NDArray[np.float32] | None = None
    """[len(ids)] loss weight; None means 1 for a sampled span and 0 otherwise."""
    routed_experts: Routes | None = None
    """[len(ids), L, K] for each of L layers with experts the K experts that processed the token as an input, sampled or not
    (`core/routing.py`): uint8, or uint16 from 256 experts on; the largest number means unknown. None if unknown."""

    def __post_init__(self) -> None:
        self._freeze(ids=ids_array, logprobs=float_array, weights=float_array, routed_experts=routes_array)
        self._freeze(support=support_array)
        if self.source is not SpanSource.SAMPLED:
            self._check_not_sampled()
        for name in ("logprobs", "weights", "routed_experts", "support"):
            if (array := getattr(self, name)) is not None and len(array) != len(self.ids):
                kind = name.replace("_", " ")
                raise AlignmentError(f"a span of {len(self.ids)} ids has {len(array)} {kind}; give one entry for each id")

    def _check_not_sampled(self) -> None:
        if self.policy_version is not None:
            raise AlignmentError(
                f"this {self.source.value} span has policy version {self.policy_version}; only sampled tokens have one"
            )
        if self.logprobs is not None or self.support is not None:
            kind = "logprobs" if self.logprobs is not None else "a support"
            raise AlignmentError(f"this {self.source.value} span has {kind}; only sampled tokens have {kind}")
        if self.weights is not None and np.any(self.weights):
            raise AlignmentError(
                f"this {self.source.value} span has a weight other than 0; only sampled tokens can be trained"
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def loss_weights(self) -> Floats:
        """[len(ids)] the weight of each token in the loss."""
        if self.weights is not None:
            return self.weights
        value = 1.0 if self.source is SpanSource.SAMPLED else 0.0
        return np.full(len(self.ids), value, dtype=np.float32)


class Branch(NamedTuple):
    """The point where a segment branched off: it shares the first `length` tokens of segment `segment`."""

    segment: int
    length: int


class SpanRef(NamedTuple):
    """A reference to a span: the index of its segment, and its index within the segment."""

    segment: int
    span: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment(Record):
    """One continuous token sequence that the engine saw and extended: one training sample."""

    spans: tuple[Span, ...]
    media: tuple[Media, ...] = ()
    """The media of the tokens, in order. If a later segment repeats tokens, it repeats their media, too."""
    agent: str = "assistant"
    parent: Branch | None = None

    def __len__(self) -> int:
        return sum(len(s) for s in self.spans)

    @property
    def token_ids(self) -> Ids:
        """[T] all ids."""
        return _join([s.ids for s in self.spans], np.int32)

    @property
    def loss_weights(self) -> Floats:
        """[T] the weight of each token in the loss; 0 for all tokens that were not sampled."""
        return _join([s.loss_weights for s in self.spans], np.float32)

    @property
    def logprobs(self) -> Floats:
        """[T] the engine's log-probability of each sampled token; 0 elsewhere, and if the engine gave none."""
        blank = [np.zeros(len(s), np.float32) if s.logprobs is None else s.logprobs for s in self.spans]
        return _join(blank, np.float32)

    @property
    def support(self) -> Support | None:
        """[T, K] the tokens that each sampled token was drawn from, -1 elsewhere; None if the run does not record them."""
        return joined_support([(len(s), s.support) for s in self.spans])

    @property
    def turn_ids(self) -> Ids:
        """[T] `Span.turn` of each token."""
        return _join([np.full(len(s), s.turn, np.int32) for s in self.spans], np.int32)

    @property
    def sampled_mask(self) -> NDArray[np.bool_]:
        """[T] whether each token was sampled, regardless of its weight."""
        return self._mask(SpanSource.SAMPLED)

    @property
    def observed_mask(self) -> NDArray[np.bool_]:
        """[T] whether each token belongs to an observation: text of a tool, user or environment, and template text after a
        completion."""
        return self._mask(SpanSource.OBSERVATION)

    def _mask(self, source: SpanSource) -> NDArray[np.bool_]:
        return _join([np.full(len(s), s.source is source, np.bool_) for s in self.spans], np.bool_)

    @property
    def versions(self) -> Ids:
        """[T] the policy version of each sampled token, -1 elsewhere."""
        blank = [np.full(len(s), -1 if s.policy_version is None else s.policy_version, np.int32) for s in self.spans]
        return _join(blank, np.int32)

    @property
    def routed_experts(self) -> Any | None:
        """[T, L, K] the experts of each token (`core/routing.py`); None if no span has any."""
        known = next((s.routed_experts for s in self.spans if s.routed_experts is not None), None)
        if known is None:
            return None
        return routes_array(
            np.concatenate([blank_like(known, len(s)) if s.routed_experts is None else s.routed_experts for s in self.spans])
        )


_Scalar = TypeVar("_Scalar", np.int32, np.float32, np.bool_)


def _join(parts: list[NDArray[_Scalar]], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    array = np.concatenate(parts) if parts else np.empty(0, dtype)
    array.flags.writeable = False
    return array


TextOf = Literal["answer", "turn", "turns"]
"""The part of the model's text that a reward reads: the last message without reasoning and calls ("answer"), the exact last
message ("turn"), or all exact messages joined with line breaks ("turns")."""

RAISED_AT = "raised_at"
"""Key in the metrics of a call whose tool crashed: the line that raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of one tool call."""

    call_id: str
    name: str
    content: str | tuple[Mapping[str, Any], ...]
    """The text or parts that the model reads."""
    reward: float | None = None
    """The step reward that `execute` returned; None if it returned none."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """The kind of failure, one of `polyturn.tools.failures.ToolFailure`; None for a successful call."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn(Record):
    """One completion and the observation that answered it."""

    index: int
    message: Message
    finish_reason: FinishReason
    spans: tuple[SpanRef, ...] = ()
    """The sampled spans of this turn, then its observation spans."""
    tool_results: tuple[ToolResult, ...] = ()
    observation: tuple[Message, ...] = ()
    """The answer of the environment. An answer that ended the episode is recorded, too, although it was never encoded."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Named scores of this turn: "interaction", "tool/<name>"."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """The metadata of the interaction, and any values that a scheduler stores about the turn."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Durations of "generate", "tools" and "interaction" in seconds; "start" is the beginning of the turn, in seconds since
    1970."""
    is_continued: bool = False
    """Whether the next turn continues the same assistant message after the observation. The message of that turn then
    includes this one."""

    @property
    def score(self) -> float | None:
        """The sum of the turn's scores; None if it has none."""
        return sum(self.scores.values()) if self.scores else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory(Record):
    """The record of one episode."""

    id: str
    task: Task
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    reward: Reward | None = None
    error: str | None = None
    """Why the trajectory failed; None unless `stop_reason` is a failure."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        worth = "no reward" if self.reward is None else f"reward {self.reward.total:.4g}"
        return f"Trajectory({self.id!r}: {len(self.turns)} turns, {self.stop_reason.value}, {worth})"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The task's prompt, then the message and observation of every turn of the episode and its forks, by turn index."""
        out = list(self.task.prompt)
        for turn in self.turns:
            if not turn.is_continued:
                out += [turn.message, *turn.observation]
        return tuple(out)

    def text_of(self, which: TextOf) -> str:
        """Return the text that a reward function reads; empty if the model wrote nothing.

        Raises:
            DataError: the exact text of a turn with reasoning or calls is not recorded.
        """
        if which == "answer":
            last = self.turns[-1].message if self.turns else Message(role="assistant")
            return last.text if last.own is None else last.own.text
        turns = [turn for turn in self.turns if not turn.is_continued] if which == "turns" else self.turns[-1:]
        if lost := next(
            (t for t in turns if t.message.written is None and (t.message.reasoning or t.message.tool_calls)), None
        ):
            raise DataError(
                f"turn {lost.index} of trajectory {self.id!r} has reasoning or calls and no record of the model's own text; "
                "set reward.text to 'answer'"
            )
        return "\n".join(_written(t.message) for t in turns)

    @property
    def turn_scores(self) -> tuple[float | None, ...]:
        """The score of each turn; None for a turn without scores."""
        return tuple(t.score for t in self.turns)

    @property
    def is_failed(self) -> bool:
        """Whether the episode failed, so that the trajectory is left out of the loss and of its group's statistics."""
        return self.stop_reason.is_failure

    def agent_of(self, turn: Turn) -> str:
        """Return the agent of the segment that holds the turn's first span; "assistant" for a turn without spans."""
        return self.segments[turn.spans[0].segment].agent if turn.spans else "assistant"

    def span(self, ref: SpanRef) -> Span:
        """Return the span that `ref` names."""
        return self.segments[ref.segment].spans[ref.span]

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model wrote."""
        return sum(len(s) for seg in self.segments for s in seg.spans if s.source is SpanSource.SAMPLED)


def _written(message: Message) -> str:
    """Return the model's own text of a message, with tags and calls."""
    if message.own is not None:
        return message.own.written
    return message.text if message.written is None else message.written


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryGroup(Record):
    """The trajectories of one task, whose rewards are compared with one another."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    """A greedily decoded trajectory, as the baseline of some advantage estimators. It is neither trained nor counted in
    statistics; None unless the run needs one."""
