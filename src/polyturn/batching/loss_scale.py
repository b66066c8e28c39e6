"""Loss scale: strategies that give each sampled token a weight in the loss. The trainer applies them after the rollout.

    strategy             sampled tokens that are trained
    default              all, in all turns
    all                  another name for `default`
    last_round           the sample's last assistant message, which may have several turns (`episode.go_on`)
    ignore_empty_think   all except an empty <think></think> at the beginning of a turn, or a </think> there
    ignore_think_prefix  all except the <think> at the beginning of a turn
    last_round+mine      several strategies: their weights are multiplied

A strategy is called once per training sample, with the turns that were sampled into it. It returns for each turn one weight,
or one weight per token of the turn. Its weights do not apply to tokens whose weight a scheduler set (`episode.weigh`), nor
to prompts and observations, whose weight is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from polyturn.core.arrays import Floats, Ids
from polyturn.core.code_origin import defined_at
from polyturn.core.errors import AlignmentError, ConfigError, plugin_errors_as
from polyturn.core.messages import Message
from polyturn.core.reward import brief
from polyturn.core.trajectory import Segment, SpanSource, Trajectory, Turn
from polyturn.infra.live import NameOrObject
from polyturn.infra.plugins import Registry

Decode = Callable[[Ids], str]

_MAX_TOGETHER = 16
"""Maximum number of tokens that are decoded together to find where their text begins. They are decoded together because a
byte-level token may be only a part of a character."""


@dataclass(kw_only=True)
class SampledTurn:
    """A turn in one training sample."""

    turn: Turn
    ids: Ids
    """[N] the sampled tokens that the sample keeps."""
    is_last_round: bool
    """Whether the turn belongs to the last message of the sample."""
    decode: Decode
    stop_token_ids: Collection[int] = ()
    """The tokens that end an assistant turn."""
    query: str = ""
    """The text of the user or tool messages that the turn's message answers: the last ones before it in
    `Trajectory.messages`."""

    @cached_property
    def starts(self) -> list[int]:
        """[N] for each token the offset in `text` at which it begins, in characters."""
        starts: list[int] = []
        at = 0
        while len(starts) < len(self.ids):
            first = len(starts)
            for num in range(1, _MAX_TOGETHER + 1):  # add tokens until they decode to whole characters
                text = self.decode(self.ids[first : first + num])
                if self.text.startswith(text, at) and (text or num == 1):
                    break
            else:  # the text of these tokens depends on earlier ones, so decode from the beginning each time
                return [_num_shared(self.decode(self.ids[:i]), self.text) for i in range(len(self.ids))]
            inside = range(1, min(num, len(self.ids) - first))
            starts += [at, *(at + _num_shared(self.decode(self.ids[first : first + i]), self.text[at:]) for i in inside)]
            at += len(text)
        return starts

    @cached_property
    def text(self) -> str:
        """The ids as text, control tokens included."""
        return self.decode(self.ids)

    @property
    def reply(self) -> str:
        """`text` without the token that ends the turn."""
        ends = len(self.ids) > 0 and int(self.ids[-1]) in self.stop_token_ids
        return self.text[: self.starts[-1]] if ends else self.text

    def weights_of(self, parts: Sequence[tuple[int, int, float]]) -> Floats:
        """Return [N] the weight of each token.

        A part is (start, end, weight), with offsets in `text`, in characters. A token gets the weight of the part in which
        it begins; 1 if it begins in none.
        """
        weights = np.ones(len(self.ids), np.float32)
        starts = np.asarray(self.starts)
        for start, end, weight in parts:
            weights[(starts >= start) & (starts < end)] = weight
        return weights


def _num_shared(beginning: str, text: str) -> int:
    """Return the length of the common prefix, in characters. It ends before the replacement character (U+FFFD) that stands
    for an incomplete character at the end of `beginning`."""
    return next((i for i, (a, b) in enumerate(zip(beginning, text, strict=False)) if a != b), min(len(beginning), len(text)))


Strategy = Callable[[Sequence[SampledTurn]], Sequence[ArrayLike]]
"""(the turns of a sample, in order) -> for each turn a weight, or one weight per token."""

loss_scale: Registry[Strategy] = Registry("loss_scale")


@loss_scale.register("default")
def default(turns: Sequence[SampledTurn]) -> list[float]:
    """Train all sampled tokens."""
    return [1.0] * len(turns)


loss_scale.register("all")(default)


@loss_scale.register("last_round")
def last_round(turns: Sequence[SampledTurn]) -> list[float]:
    """Train the last message of each sample."""
    return [float(t.is_last_round) for t in turns]


_EMPTY_THOUGHT = re.compile(r"\A(<think>\s*)?</think>\s*")  # the generation prompt may have opened the reasoning
_THINK_PREFIX = re.compile(r"\A<think>\n?")


@loss_scale.register("ignore_empty_think")
def ignore_empty_think(turns: Sequence[SampledTurn]) -> list[Floats]:
    """Leave out the tokens of empty reasoning."""
    return [t.weights_of([(m.start(), m.end(), 0.0) for m in _EMPTY_THOUGHT.finditer(t.text)]) for t in turns]


@loss_scale.register("ignore_think_prefix")
def ignore_think_prefix(turns: Sequence[SampledTurn]) -> list[Floats]:
    """Leave out the tag that opens a turn's reasoning."""
    return [t.weights_of([(m.start(), m.end(), 0.0) for m in _THINK_PREFIX.finditer(t.text)]) for t in turns]


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The strategies of a run."""

    name: str
    strategies: tuple[Strategy, ...]
    decode: Decode
    stop_token_ids: Collection[int]

    def weights(self, trajectory: Trajectory, segment: Segment) -> Floats:
        """Return [T] the weight of each token of a training sample.

        Raises:
            AlignmentError: a strategy returned a wrong number of weights, or a weight that is not finite.
        """
        turns = self._turns(trajectory, segment)
        factors = {t.turn.index: np.ones(len(t.ids), np.float32) for t in turns}
        for strategy in self.strategies:
            with plugin_errors_as(f"loss_scale {self.name!r}", AlignmentError):
                weights_of_turns = [np.asarray(weights, np.float32) for weights in strategy(turns)]
            if len(weights_of_turns) != len(turns):
                raise AlignmentError(
                    f"loss_scale {self.name!r} gave weights for {len(weights_of_turns)} turns; return one entry for each of "
                    f"the {len(turns)} turns{defined_at(strategy)}"
                )
            for one, values in zip(turns, weights_of_turns, strict=True):
                if values.shape not in ((), (len(one.ids),)) or not np.isfinite(values).all():
                    raise AlignmentError(
                        f"loss_scale {self.name!r} gave the weights {brief(values.tolist())} for the {len(one.ids)} tokens "
                        f"of turn {one.turn.index} of trajectory {trajectory.id!r}; give a finite number, or one for each"
                        f"{defined_at(strategy)}"
                    )
                factors[one.turn.index] = factors[one.turn.index] * values  # [N], or one number for all tokens of the turn
        parts, used = [np.empty(0, np.float32)], dict.fromkeys(factors, 0)
        for span in segment.spans:
            own = span.loss_weights
            if span.source is SpanSource.SAMPLED and len(span):
                start = used[span.turn]
                used[span.turn] += len(span)
                # `span.weights` were set by a scheduler; they are used unchanged.
                own = own if span.weights is not None else factors[span.turn][start : used[span.turn]]
            parts.append(own)
        return np.concatenate(parts)

    def _turns(self, trajectory: Trajectory, segment: Segment) -> list[SampledTurn]:
        by_index = {t.index: t for t in trajectory.turns}
        ids: dict[int, list[Ids]] = {}
        for span in segment.spans:
            if span.source is SpanSource.SAMPLED and len(span):
                ids.setdefault(span.turn, []).append(span.ids)
        indices = list(ids)
        first = len(indices) - 1  # the first turn of the last message
        while first > 0 and by_index[indices[first - 1]].is_continued:
            first -= 1
        queries = _queries(trajectory)
        return [
            SampledTurn(
                turn=by_index[i],
                ids=np.concatenate(ids[i]),
                is_last_round=n >= first,
                decode=self.decode,
                stop_token_ids=self.stop_token_ids,
                query=queries[i],
            )
            for n, i in enumerate(indices)
        ]


def _queries(trajectory: Trajectory) -> dict[int, str]:
    """Return turn index -> `SampledTurn.query`."""
    queries: dict[int, str] = {}
    query = _last_query(trajectory.task.prompt)
    for turn in trajectory.turns:
        queries[turn.index] = query
        query = query if turn.is_continued else _last_query(turn.observation) or query
    return queries


def _last_query(messages: Sequence[Message]) -> str:
    """Return the text of the last consecutive messages that are neither an assistant's nor system messages."""
    runs = [list(run) for is_reply, run in groupby(messages, lambda m: m.role == "assistant") if not is_reply]
    return "".join(m.text for m in runs[-1] if m.role != "system") if runs else ""


def build_loss_scale(
    name: NameOrObject, *, decode: Decode, stop_token_ids: Collection[int] = (), base: Path | None = None
) -> LossScale | None:
    """Return the strategies that a name such as `a+b` lists; None if `default` (or `all`) is the only one.

    Args:
        name: Names of strategies, or a function.
        decode: Returns the text of ids, control tokens included.
        stop_token_ids: The tokens that end an assistant turn.
        base: The folder from which a relative file path starts.

    Raises:
        ConfigError: a name does not lead to a function.
    """
    strategies = []
    for part in [one.strip() for one in name.split("+")] if isinstance(name, str) else [name]:
        strategy = loss_scale.resolve(part, base=base, key="algorithm.loss_scale")
        if not callable(strategy):
            raise ConfigError(f"algorithm.loss_scale: {part!r} is {strategy!r:.100}; it must be a function")
        if strategy is not default:
            strategies.append(strategy)
    if not strategies:
        return None
    return LossScale(name=str(name), strategies=tuple(strategies), decode=decode, stop_token_ids=stop_token_ids)
